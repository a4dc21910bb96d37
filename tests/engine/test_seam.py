"""The installed vLLM has everything that we use, in the form in which we use it.

A new version that moves or renames any of it fails here, and not in a user's engine. What can be
checked without vLLM's tests is in `engine/seam.py`; this checks more closely what we rely on.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import to_builtins
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import kv_transfer_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from xinference_xavier.engine import compat, seam
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.worker import DeviceRegion, HostWorker


def test_the_installed_vllm_has_what_we_use() -> None:
    assert seam.faults() == []


def test_a_manager_takes_the_arguments_it_gets() -> None:
    for name, count in seam.CALLS.items():
        method = inspect.signature(getattr(XavierManager, name))
        required = [p for p in method.parameters.values() if p.default is inspect.Parameter.empty]
        assert len(required) == 1 + count, name


class Changes:
    """What a later vLLM may do."""

    def moves_a_field(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(seam.FIELDS, base.CanonicalKVCaches, ("tensors", "layouts"))
        return "CanonicalKVCaches.layouts is gone"

    def adds_an_argument(self, monkeypatch: pytest.MonkeyPatch) -> str:
        def lookup(self: object, key: bytes, req_context: object, tier: int) -> None: ...

        monkeypatch.setattr(base.OffloadingManager, "lookup", lookup)
        return "OffloadingManager.lookup takes self, key, req_context, tier"

    def adds_an_argument_to_what_we_replace(self, monkeypatch: pytest.MonkeyPatch) -> str:
        def reset(self: object, hard: bool) -> bool: ...

        reset.__qualname__ = "KVCacheManager.reset_prefix_cache"
        monkeypatch.setattr(seam, "REPLACED", ((seam.REPLACED[0][0], reset),))
        return "KVCacheManager.reset_prefix_cache takes self, hard"

    def adds_an_abstract_method(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(HostWorker, "__abstractmethods__", frozenset({"drain"}))
        return "OffloadingWorker.drain is new"

    def calls_another_method(self, monkeypatch: pytest.MonkeyPatch) -> str:
        known = {name: count for name, count in seam.CALLS.items() if name != "prepare_store"}
        monkeypatch.setattr(seam, "CALLS", known)
        return "its scheduler calls OffloadingManager.prepare_store"

    def no_longer_takes_events(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(seam.TEXTS, Scheduler.update_from_output, ("self.connector.events()",))
        return "Scheduler.update_from_output lacks 'self.connector.events()'"

    def reads_more_of_a_region(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.delattr(DeviceRegion, "create_next_worker_view")
        return "CPUOffloadingWorker reads create_next_worker_view of its region"


@pytest.mark.parametrize("change", [name for name in vars(Changes) if not name.startswith("_")])
def test_a_change_is_found(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    assert getattr(Changes(), change)(monkeypatch) in seam.faults()


def test_jobs_have_the_fields_we_read() -> None:
    result = base.TransferResult(1, True, 2, 3.0)
    assert (result.job_id, result.success) == (1, True)
    assert (result.transfer_size, result.transfer_time) == (2, 3.0)
    gpu = base.GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[5])
    assert (gpu.block_ids.tolist(), gpu.group_sizes, gpu.block_indices) == ([1, 2], [2], [5])
    assert isinstance(CPULoadStoreSpec([1]), base.BlockIDsLoadStoreSpec)


def test_a_failed_job_ends_the_engine() -> None:
    """`HostWorker` relies on it."""
    source = inspect.getsource(worker.OffloadingConnectorWorker.get_finished)
    assert "assert transfer_result.success" in source


def test_vllm_flushes_old_jobs_at_a_reset() -> None:
    """`Jobs` relies on it: once a later job has ended, those from before have."""
    reset = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "self._current_batch_jobs_to_flush.update(self._jobs.keys())" in reset
    flush = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert "self.worker.wait(kv_connector_metadata.jobs_to_flush)" in flush


def test_a_request_s_keys_are_known_before_its_first_lookup() -> None:
    """Otherwise requests would fetch one chunk at a time."""
    context = base.ReqContext(req_id="r")
    assert not compat.key_positions(context)
    keys = [base.make_offload_key(bytes(32), group) for group in range(2)]
    for key in keys:
        context.set_offload_key_position(key, 128)
    assert compat.key_positions(context) == dict.fromkeys(keys, 128)
    assert keys[1][-4:] == (1).to_bytes(4, "big")
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens)
    assert source.index("update_offload_keys") < source.index("_lookup(")


def test_vllm_takes_events_once_per_step() -> None:
    """`XavierConnector.take_events` ends the step."""
    update = inspect.getsource(Scheduler.update_from_output)
    (asks,) = re.findall(
        r"\n(\s+)if self\.connector is not None:\n\s+\w+ = self\.connector\.take_events\(\)", update
    )
    assert asks == 8 * " ", "unconditionally"
    assert "self.connector.take_events()" not in inspect.getsource(Scheduler.schedule)


def test_what_the_connector_leaves_out_does_nothing() -> None:
    """See `XavierConnector.update_connector_output`, `take_events` and `has_connector_metadata`."""
    output = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "assert meta is None\n            meta = OffloadingWorkerMetadata()" in output
    nothing = OffloadingWorkerMetadata()
    assert nothing.transfer_stats.is_empty()
    assert not nothing.completed_jobs
    events = OffloadingEventsTracker(base.OffloadingKVEventsConfig(True, True))
    assert [*events.take_events(())] == []
    layer = inspect.getsource(kv_transfer_utils.maybe_transfer_kv_layer)
    assert "not connector.has_connector_metadata():\n            return func(" in layer
    for name in ("wait_for_layer_load", "save_kv_layer"):
        assert inspect.getsource(getattr(OffloadingConnector, name)).rstrip().endswith("pass")


def test_a_worker_s_connector_sees_the_jobs_of_each_step_before_vllm_takes_any() -> None:
    """`WorkerSide` counts them in `handle_preemptions`, which both model runners call first."""
    first = {
        "gpu_model_runner": r"\n {8}if has_kv_transfer_group\(\):\n"
        r" {12}kv_connector_metadata = .*\n {12}assert .*\n"
        r" {12}get_kv_transfer_group\(\)\.handle_preemptions\(kv_connector_metadata\)\n",
        "gpu.kv_connector": r"\n {8}self\.kv_connector\."
        r"handle_preemptions\(kv_connector_metadata\)\n"
        r" {8}self\.kv_connector\.bind_connector_metadata\(kv_connector_metadata\)\n",
    }
    for name, calls in first.items():
        spec = importlib.util.find_spec(f"vllm.v1.worker.{name}")
        assert spec is not None
        assert spec.origin is not None
        assert re.search(calls, Path(spec.origin).read_text()), name
    begun = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert "in self._unsubmitted_store_jobs:" in begun, "also those of the step before"


def test_an_engine_s_process_receives_requests_where_we_look_for_them() -> None:
    """Its thread fills the queue, which is there before connectors are."""
    made = inspect.getsource(EngineCoreProc.__init__)
    queue = made.index("self.input_queue = queue.Queue[")
    assert queue < made.index("super().__init__(")
    receive = inspect.getsource(EngineCoreProc.process_input_sockets)
    assert "self.input_queue.put_nowait((request_type, request))" in receive


# -- what differs between versions --------------------------------------------------------------


@pytest.mark.parametrize("field", ["kv_cache_block_copies", "kv_connector_block_state"])
def test_copied_blocks_are_noticed(field: str) -> None:
    step = SchedulerOutput.make_empty()
    assert not compat.copies_blocks(step)
    state = SimpleNamespace(boundary_state_offloads={})
    step.kv_connector_block_state = state  # type: ignore[assignment]
    assert not compat.copies_blocks(step)
    state.boundary_state_offloads["request"] = [(0, 7, 128)]
    if field != "kv_connector_block_state":
        step.kv_connector_block_state = None
        setattr(step, field, {"request": [(0, 7, 128)]})
    assert compat.copies_blocks(step)


def test_what_the_engine_is_told_is_seen() -> None:
    """The connector is made by the scheduler, which is made by the engine. Another process sends
    arguments as plain data, which vLLM converts to what the method takes."""
    seen: list[Any] = []

    def watch(method: Callable[..., Any], *arguments: Any) -> Any:
        seen.append(*arguments)
        return method(*arguments)

    class Core(EngineCoreProc):
        def __init__(self) -> None:
            self.model_executor = Mock(add_lora=lambda request: request.lora_int_id == 1)
            self.make_scheduler()

        def make_scheduler(self) -> None:
            compat.watch_engine(add_lora=watch)

    core = Core()
    requests = [LoRARequest("good", 1, "/a"), LoRARequest("bad", 2, "/b")]
    sent = [core._convert_msgspec_args(core.add_lora, [to_builtins(each)]) for each in requests]
    assert [core.add_lora(*arguments) for arguments in sent] == [True, False]
    assert seen == requests


def test_vllm_s_engine_has_what_is_looked_for() -> None:
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("self.model_executor = ") < source.index("self.scheduler: ")
