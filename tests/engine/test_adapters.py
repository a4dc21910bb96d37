"""Rows of LoRA adapters are told apart by what the adapters contain."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest

from tests.engine.scheduling import Scheduling, assert_nothing_left, chunks
from tests.harness.remote import PATIENCE
from xinference_xavier.engine import adapters as adapters_module
from xinference_xavier.engine.adapters import Adapter, Adapters, Look, salted


class Loaded(Adapters):
    """Waits until an adapter's content is read."""

    def look(self, request: LoRARequest) -> Look:
        look = super().look(request)
        look.ended.wait()
        settle(self)
        return look

    def find(self, request: LoRARequest) -> Adapter:
        adapter = self.look(request).adapter
        assert adapter is not None
        return adapter


def settle(adapters: Adapters) -> None:
    """Wait until all files are looked at and read."""
    for thread in (adapters._looking, adapters._reading):
        thread.submit(lambda: None).result()


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


def test_an_adapter_of_the_same_name_replaces_the_former_one(tmp_path: Path) -> None:
    """vLLM may load it in place or under another number; its own cache knows only the name."""
    adapters = Loaded()
    first = adapters.find(request(adapter(tmp_path / "a")))
    assert not first.replaces
    assert not adapters.find(request(tmp_path / "a", 2)).replaces, "it is the same one"
    adapter(tmp_path / "a", "other weights")
    assert adapters.find(request(tmp_path / "a", 3)).replaces
    adapter(tmp_path / "a", "third weights")
    in_place = adapters.find(request(tmp_path / "a", 3, load_inplace=True))
    assert in_place.replaces
    adapters.forget_replaced(())
    settle(adapters)
    assert not in_place.replaces


def test_what_replaces_an_adapter_is_the_same_adapter_under_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own cache still has the first one's blocks. Its keys have the path, too."""
    monkeypatch.setattr(adapters_module, "LIMIT", 2)
    adapters = Loaded()
    first = adapters.find(request(adapter(tmp_path / "a")))
    adapter(tmp_path / "a", "other weights")
    again = [adapters.find(request(tmp_path / "a", number)) for number in (2, 3)]
    assert [each.replaces for each in (first, *again)] == [True] * 3
    elsewhere = adapters.find(request(adapter(tmp_path / "b"), 4))
    assert not elsewhere.replaces
    adapters.find(request(adapter(tmp_path / "c"), 5))
    assert adapters.find(request(adapter(tmp_path / "d"), 6)).replaces, "nobody remembers all names"
    adapters.forget_replaced(())
    settle(adapters)
    assert not adapters.find(request(tmp_path / "d", 7)).replaces


def test_an_adapter_that_may_have_been_forgotten_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may still have what its files were once."""
    monkeypatch.setattr(adapters_module, "LIMIT", 3)
    adapters = Loaded()
    loras = [request(adapter(tmp_path / str(number)), number) for number in range(1, 6)]
    for lora in (*loras[:3], loras[0], *loras[3:]):
        assert adapters.find(lora).digest is not None
    assert adapters.find(loras[0]).digest is not None, "it was used lately"
    assert adapters.find(loras[1]).digest is None


@contextmanager
def hanging(adapters: Adapters) -> Iterator[None]:
    """The file system does not answer meanwhile."""
    answers = threading.Event()
    adapters._looking.submit(answers.wait)
    try:
        yield
    finally:
        answers.set()


class TestPreloaded:
    """vLLM loads an adapter before any request needs it."""

    @pytest.mark.parametrize("change", ["while it is loaded", "afterwards", "never"])
    def test_it_is_what_was_loaded_then(self, tmp_path: Path, change: str) -> None:
        """Once its files change, nobody can tell what that was."""
        adapters = Loaded()
        lora = request(adapter(tmp_path / "a"))

        def load(_: LoRARequest) -> bool:
            if change == "while it is loaded":
                adapter(tmp_path / "a", "written meanwhile")
            return True

        assert adapters.load(load, lora)
        settle(adapters)
        if change == "afterwards":
            adapter(tmp_path / "a", "written after it was loaded")
        shared = digest(tmp_path / "a") if change == "never" else None
        assert adapters.find(lora).digest == shared

    def test_an_error_of_vllm_is_passed_on(self, tmp_path: Path) -> None:
        load = Mock(side_effect=ValueError("no such adapter"))
        with pytest.raises(ValueError, match="no such adapter"):
            Loaded().load(load, request(tmp_path / "a"))


class TestSlowFiles:
    """The scheduler thread never waits for a file system, nor does the end of the process."""

    def test_one_that_never_answers(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "adapter_model.safetensors")  # nobody writes to it

        def look() -> None:
            Adapters().look(request(tmp_path)).ended.wait()

        process = multiprocessing.get_context("fork").Process(target=look)
        process.start()
        process.join(PATIENCE)
        process.kill()
        assert process.exitcode == 0

    @pytest.mark.parametrize("count", [0, 4])
    def test_a_request_waits_until_they_are_looked_at(
        self, vllm: Scheduling, tmp_path: Path, count: int
    ) -> None:
        """A prompt of no whole chunk as well: vLLM would load the adapter for it."""
        lora, asked = request(adapter(tmp_path / "a")), vllm.ask(count)
        with hanging(vllm.manager.adapters):
            assert vllm.attempt(asked, lora_request=lora) is None
        settle(vllm.manager.adapters)
        assert vllm.attempt(asked, lora_request=lora) == 0
        found = vllm.manager.requests["r"].adapter
        assert found is not None
        assert found.digest == digest(tmp_path / "a")

    def test_it_waits_for_a_second_and_shares_nothing_then(
        self, vllm: Scheduling, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """vLLM loads the adapter meanwhile, so nobody can tell what it has loaded."""
        lora, asked = request(adapter(tmp_path / "a")), vllm.ask(4)
        with hanging(vllm.manager.adapters):
            assert vllm.attempt(asked, lora_request=lora) is None
            vllm.clock.now += 1.0
            assert vllm.attempt(asked, lora_request=lora) == 0
            assert vllm.attempt(vllm.ask(4, "the next does not wait"), lora_request=lora) == 0
        settle(vllm.manager.adapters)
        assert vllm.attempt(vllm.ask(4, "later"), lora_request=lora) in (None, 0)
        settle(vllm.manager.adapters)
        assert [each.shares for each in vllm.manager.requests.values()] == [False] * 3
        assert "adapter's files answer too slowly" in caplog.text


class TestRequests:
    """Through the manager, whose adapters have been read."""

    @pytest.fixture
    def vllm(self) -> Scheduling:
        vllm = Scheduling()
        vllm.manager.adapters = Loaded(vllm.clock)
        return vllm

    @staticmethod
    def run(
        vllm: Scheduling,
        req_id: str,
        lora: LoRARequest | None,
        own_prefix: int = 0,
        reuses_parts: bool = False,
    ) -> int | None:
        """The hits of a request for four chunks, which then stores all of them. vLLM's own cache
        has the first `own_prefix`, and perhaps a part of a block."""
        request = vllm.ask(4, req_id)
        hits = vllm.attempt(request, own_prefix, lora_request=lora, reuses_parts=reuses_parts)
        vllm.schedule(request, hits or 0, own_prefix)
        if hits:
            vllm.loaded(request, hits, own_prefix)
        vllm.finish(request)
        vllm.stored(request, vllm.begin_store(request, request.keys))
        vllm.end_step()
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

    def test_files_that_change_between_a_lookup_and_its_load_change_nothing_for_it(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        """The load gets the rows that the lookup found; what is computed then is not stored."""
        lora = request(adapter(tmp_path / "a"))
        self.run(vllm, "first", lora)
        vllm.tier.forget()
        keys = chunks("prompt", 4)
        asking = vllm.arrive("second", [*keys, *chunks("answer", 1)])
        assert vllm.scan(asking, lora_request=lora) == 4
        adapter(tmp_path / "a", "other weights")
        vllm.manager.adapters.look(lora)
        assert len(vllm.schedule(asking, 4)) == 4
        assert vllm.begin_store(asking, chunks("answer", 1)) == []

    @pytest.mark.parametrize("load_inplace", [True, False])
    def test_what_was_computed_until_the_files_changed_is_not_shared(
        self, vllm: Scheduling, tmp_path: Path, load_inplace: bool
    ) -> None:
        """vLLM has perhaps loaded the others: it reloads an adapter that was loaded in place before
        each step."""
        lora = request(adapter(tmp_path / "a"), load_inplace=load_inplace)
        asking = vllm.ask(4)
        vllm.scan(asking, lora_request=lora)
        stored = vllm.begin_store(asking, asking.keys)
        assert stored == asking.keys
        adapter(tmp_path / "a", "other weights")
        vllm.stored(asking, stored)
        vllm.finish(asking)
        vllm.end_step()
        assert vllm.tier.stored_rows == []
        assert_nothing_left(vllm)

    def test_what_is_stored_while_the_files_do_not_answer_is_dropped_after_a_second(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        lora = request(adapter(tmp_path / "a"))
        asking = vllm.ask(4)
        vllm.scan(asking, lora_request=lora)
        stored = vllm.begin_store(asking, asking.keys)
        with hanging(vllm.manager.adapters):
            vllm.manager.adapters.look = partial(Adapters.look, vllm.manager.adapters)  # type: ignore[method-assign]
            vllm.stored(asking, stored)
            vllm.finish(asking)
            vllm.end_step()
            assert vllm.manager.has_pending_work(), "or vLLM would not ask again"
            vllm.clock.now += 1.0
            vllm.end_step()
            assert vllm.tier.stored_rows == []
            assert_nothing_left(vllm)

    def test_two_that_store_the_same_prompt_at_once(self, vllm: Scheduling, tmp_path: Path) -> None:
        """vLLM's keys do not tell two contents of one path apart."""
        keys = chunks("prompt", 2)
        stores = []
        for number in (1, 2):
            request_ = vllm.arrive(str(number), keys)
            folder = adapter(tmp_path / str(number), str(number))
            lora = request(folder, number)
            vllm.scan(request_, lora_request=lora)
            stores.append((request_, vllm.begin_store(request_, keys)))
        for request_, stored in stores:
            assert stored == keys
            vllm.stored(request_, stored)
        vllm.end_step()
        assert len({row.key for row in vllm.tier.stored_rows}) == 4

    def test_rows_of_one_that_is_not_here_are_neither_stored_nor_found(
        self, vllm: Scheduling, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        lora = request(tmp_path / "hub" / "name")
        assert [self.run(vllm, str(number), lora) for number in range(2)] == [0, 0]
        assert vllm.tier.stored_rows == []
        assert "adapter has no files here" in caplog.text

    def test_what_a_replaced_adapter_computed_is_not_stored_as_the_new_ones(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        """vLLM's own cache hands the old adapter's blocks to requests of the new one."""
        self.run(vllm, "old", request(adapter(tmp_path / "a", "old")))
        vllm.tier.forget()
        new = request(adapter(tmp_path / "a", "new"), load_inplace=True)
        self.run(vllm, "hit", new, own_prefix=1)
        assert vllm.tier.stored_rows == []
        assert self.run(vllm, "all its own", new) == 0
        assert len(vllm.tier.stored_rows) == 4
        assert self.run(vllm, "loads", new, own_prefix=1) == 3

    def test_once_vllm_has_emptied_its_own_cache_all_is_stored(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        self.run(vllm, "old", request(adapter(tmp_path / "a", "old")))
        new = request(adapter(tmp_path / "a", "new"), load_inplace=True)
        self.run(vllm, "first", new, own_prefix=1)
        vllm.manager.on_prefix_cache_reset(True)
        vllm.manager.reset_cache()
        settle(vllm.manager.adapters)
        vllm.tier.forget()
        self.run(vllm, "after", new, own_prefix=1)
        assert len(vllm.tier.stored_rows) == 4

    def test_a_part_of_a_block_may_be_the_old_adapters_too(
        self, vllm: Scheduling, tmp_path: Path
    ) -> None:
        self.run(vllm, "old", request(adapter(tmp_path / "a", "old")))
        vllm.tier.forget()
        new = request(adapter(tmp_path / "a", "new"), load_inplace=True)
        self.run(vllm, "new", new, reuses_parts=True)
        assert vllm.tier.stored_rows == []
