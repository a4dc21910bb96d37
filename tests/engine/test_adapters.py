"""Rows of LoRA adapters are told apart by what the adapters contain."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from tests.engine.scheduling import Scheduling, chunks, prefix_scan
from xinference_xavier.engine.adapters import Adapter, Adapters, salted


class Loaded(Adapters):
    """Waits until an adapter's content is read."""

    def find(self, request: LoRARequest) -> Adapter:
        adapter = super().find(request)
        read = threading.Event()
        self._thread.submit(read.set)
        read.wait()
        return adapter


def adapter(folder: Path, content: str = "weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def request(folder: Path, number: int = 1, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("tuned", number, str(folder), load_inplace=load_inplace)


def digest(folder: Path) -> bytes | None:
    return Loaded().find(request(folder)).digest


def test_equal_adapters_share_wherever_they_are(tmp_path: Path) -> None:
    assert digest(adapter(tmp_path / "a")) == digest(adapter(tmp_path / "b")) is not None


def test_what_vllm_does_not_load_does_not_matter(tmp_path: Path) -> None:
    other = adapter(tmp_path / "b")
    (other / "README.md").write_text("about")
    (other / "checkpoint-9").mkdir()
    assert digest(other) == digest(adapter(tmp_path / "a"))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_another_content_does_not_share(tmp_path: Path, file: str) -> None:
    other = adapter(tmp_path / "b")
    (other / file).write_text("else")
    assert digest(other) != digest(adapter(tmp_path / "a"))


def test_an_adapter_that_changes_on_disk_is_no_longer_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM keeps what it has loaded, or loads it again: nobody can tell."""
    adapters = Loaded()
    found = adapters.find(request(adapter(tmp_path / "a")))
    assert found.digest is not None
    adapter(tmp_path / "a", "other weights")
    assert adapters.find(request(tmp_path / "a")).digest is None
    adapter(tmp_path / "a")
    assert adapters.find(request(tmp_path / "a")).digest is None
    assert found.digest is None
    assert caplog.text.count("adapter changed under the engine") == 1


def test_an_adapter_that_vllm_loads_in_place_is_another_one(tmp_path: Path) -> None:
    adapters = Loaded()
    before = adapters.find(request(adapter(tmp_path / "a")))
    own = before.digest
    adapter(tmp_path / "a", "other weights")
    after = adapters.find(request(tmp_path / "a", load_inplace=True))
    assert after.digest not in (None, own)
    assert before.digest is None  # requests that run compute with both
    assert adapters.find(request(tmp_path / "a")).digest == after.digest


def test_an_adapter_that_is_not_here_is_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert digest(tmp_path / "hub" / "name") is None
    assert "adapter has no files here" in caplog.text


def test_an_adapter_that_cannot_be_read_is_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    assert digest(folder) is None
    assert "cannot read adapter" in caplog.text


def test_a_key_keeps_its_group() -> None:
    (key,) = chunks("prompt", 1, group=3)
    mixed = salted(key, b"\x01" * 32)
    assert mixed != key
    assert mixed[-4:] == key[-4:]
    assert salted(mixed, b"\x01" * 32) == key


class TestRequests:
    """Through the manager, whose adapters have been read."""

    @pytest.fixture
    def vllm(self) -> Scheduling:
        vllm = Scheduling()
        vllm.manager._adapters = Loaded()
        return vllm

    @staticmethod
    def run(vllm: Scheduling, req_id: str, lora: LoRARequest | None) -> int | None:
        """The hits of a request for one prompt, which then stores what is missing."""
        keys = chunks("prompt", 4)
        request = vllm.arrive(req_id, keys)
        vllm.manager.begin_lookups(req_id, 0, lora_request=lora)
        hits = prefix_scan(vllm.manager.lookup, keys, request.context)
        vllm.end_step()
        vllm.schedule(request, hits or 0)
        if hits:
            vllm.loaded(request, hits)
        vllm.finish(request)
        vllm.stored(request, vllm.begin_store(request, keys))
        return hits

    def test_each_finds_only_its_own_rows(self, vllm: Scheduling, tmp_path: Path) -> None:
        first = request(adapter(tmp_path / "a", "first"), 1)
        second = request(adapter(tmp_path / "b", "second"), 2)
        hits = [self.run(vllm, str(n), lora) for n, lora in enumerate((None, first, second) * 2)]
        assert hits == [0, 0, 0, 4, 4, 4]

    def test_peers_get_keys_with_the_content_in_them(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        lora = request(adapter(tmp_path / "a"))
        self.run(vllm, "r", lora)
        own = digest(tmp_path / "a")
        assert own is not None
        stored = {row.key for row in vllm.tier.stored_rows}
        assert stored == {salted(key, own) for key in chunks("prompt", 4)}

    def test_two_that_store_the_same_prompt_at_once(self, vllm: Scheduling, tmp_path: Path) -> None:
        """Up to vLLM 0.30 their keys are equal."""
        keys = chunks("prompt", 2)
        stores = []
        for number in (1, 2):
            request_ = vllm.arrive(str(number), keys)
            folder = adapter(tmp_path / str(number), str(number))
            lora = request(folder, number)
            vllm.manager.begin_lookups(str(number), 0, lora_request=lora)
            stores.append((request_, vllm.begin_store(request_, keys)))
        for request_, stored in stores:
            assert stored == keys
            vllm.stored(request_, stored)
        assert len({row.key for row in vllm.tier.stored_rows}) == 4

    def test_without_a_digest_nothing_is_stored_or_found(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        lora = request(tmp_path / "hub" / "name")
        assert [self.run(vllm, str(number), lora) for number in range(2)] == [0, 0]
        assert vllm.tier.stored_rows == []
