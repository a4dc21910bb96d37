"""What differs among vLLM's versions looks the same to the rest of the engine."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload import base

from xinference_xavier.engine import compat


def test_the_keys_of_a_request_are_known_before_its_first_lookup() -> None:
    """Otherwise requests would fetch one chunk at a time."""
    context = base.ReqContext(req_id="r")
    groups = [[base.make_offload_key(bytes(32), group)] for group in range(2)]
    status = SimpleNamespace(
        req_context=context, group_states=[SimpleNamespace(offload_keys=keys) for keys in groups]
    )
    compat.record_keys(SimpleNamespace(_req_status={"r": status}), "r")  # type: ignore[arg-type]
    record = getattr(context, "set_offload_key_position", None)
    if record is not None:  # vLLM 0.31 and later record them
        assert compat.known_keys(context) == []
        for (key,) in groups:
            record(key, 128)
    assert compat.known_keys(context) == [key for (key,) in groups]
    assert base.make_offload_key(b"hash", 7)[-4:] == (7).to_bytes(4, "big")


@pytest.mark.process
def test_the_first_hash_of_a_chain_is_the_same_in_every_process() -> None:
    program = (
        "import os\n"
        "os.environ.pop('PYTHONHASHSEED', None)\n"
        "from vllm.utils.hashing import get_hash_fn_by_name\n"
        "from vllm.v1.core import kv_cache_utils\n"
        "from xinference_xavier.engine import compat\n"
        "compat.hash_seed('sha256')\n"
        "kv_cache_utils.init_none_hash(get_hash_fn_by_name('sha256'))\n"
        "print('first', kv_cache_utils.NONE_HASH.hex())\n"
    )
    firsts = set()
    for _ in range(2):
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        firsts.update(re.findall(r"^first (\w+)$", child.stdout, re.MULTILINE))
    assert len(firsts) == 1


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_that_can_collide_keeps_its_random_seed(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert compat.hash_seed(algorithm) is None


def test_fields_that_only_some_versions_have_are_optional() -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert not compat.keeps_cache_in_host_memory(cache)
    group = SimpleNamespace(tokens_per_block=16)
    assert compat.group_number(group, 3) == 3  # type: ignore[arg-type]
    group.group_id = 5
    assert compat.group_number(group, 3) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["kv_cache_block_copies", "partial_tail_offloads", "kv_connector_block_state"]
)
def test_copied_blocks_are_noticed(field: str) -> None:
    step = SchedulerOutput.make_empty()
    assert not compat.copies_blocks(step)
    state = SimpleNamespace(boundary_state_offloads={})
    step.kv_connector_block_state = state  # type: ignore[assignment]  # since 0.29
    assert not compat.copies_blocks(step)
    state.boundary_state_offloads["request"] = [(0, 7, 128)]
    if field != "kv_connector_block_state":
        step.kv_connector_block_state = None
        setattr(step, field, {"request": [(0, 7, 128)]})
    assert compat.copies_blocks(step)


def test_adapters_that_the_engine_loads_before_their_requests_are_seen() -> None:
    """The connector is made by the scheduler, which is made by the engine."""
    seen: list[Any] = []

    def load(request: Any, load_it: Callable[[], bool]) -> bool:
        seen.append(request)
        return load_it()

    class Core:
        def __init__(self) -> None:
            self.model_executor = object()
            self.make_scheduler()

        def make_scheduler(self) -> None:
            compat.watch_adapters(load)

        def add_lora(self, request: Any) -> bool:
            return request == "good"

    core = Core()
    assert [core.add_lora("good"), core.add_lora("bad")] == [True, False]
    assert seen == ["good", "bad"]


def test_vllm_s_engine_has_what_is_looked_for() -> None:
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("self.model_executor = ") < source.index("self.scheduler: ")
    assert callable(EngineCore.add_lora)
