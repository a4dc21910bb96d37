"""The installed vLLM has everything that we use, in the form in which we use it.

A new version that moves or renames any of it fails here, and not in a user's engine. `make
test-matrix` runs this with each supported version, and with the newest one.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import to_builtins
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import kv_transfer_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.request import Request

from xinference_xavier.engine import compat
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.worker_side import DeviceRegion, HostWorker

OVERRIDES = (
    (XavierManager, base.OffloadingManager),
    (HostWorker, base.OffloadingWorker),
    (XavierSpec, base.OffloadingSpec),
    (XavierConnector, OffloadingConnector),
)
"""Our classes and those of vLLM that they extend."""
REPLACED = ((XavierConnector._reset_both, KVCacheManager.reset_prefix_cache),)
"""Our methods and those of vLLM that they stand in for."""
NEWER_PARAMETERS = frozenset({"expedited"})
"""We take them although not every supported version passes them: `expedited` is 0.33's."""

CALLS = {
    "lookup": 2, "on_new_request": 1, "on_request_finished": 1, "on_schedule_end": 1,
    "prepare_load": 2, "complete_load": 2, "prepare_store": 2, "complete_store": 2,
    "has_pending_work": 0, "reset_cache": 0, "get_stats": 0, "shutdown": 0,
    "get_load_source": 2, "on_reset_flushed": 0,
}  # fmt: skip
"""The methods of a manager that some version of vLLM calls, and the number of their arguments."""
INHERITED = frozenset({"lock", "config_info", "take_events"})
"""Attributes of a manager that vLLM uses and we inherit."""

FIELDS = {
    VllmConfig: (
        "model_config", "cache_config", "parallel_config", "speculative_config", "load_config",
        "kv_transfer_config",
    ),
    KVCacheConfig: ("kv_cache_groups", "num_blocks", "hisparse_host_num_blocks"),
    EngineCore: ("add_lora", "collective_rpc", "set_weight_version"),
    SchedulerOutput: (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
        "finished_req_ids", "preempted_req_ids", "kv_cache_block_copies",
        "kv_connector_block_state", "total_num_scheduled_tokens",
    ),
    Request: ("num_output_tokens", "is_finished", "get_finished_reason"),
    base.ReqContext: ("req_id", "_offload_key_positions"),
    base.OffloadingKVEventsConfig: ("enable_kv_cache_events", "self_describing_kv_events"),
    base.CanonicalKVCaches: ("tensors", "group_data_refs"),
    base.CanonicalKVCacheTensor: ("tensor", "page_size_bytes"),
    base.CanonicalKVCacheRef: ("tensor_idx", "page_size_bytes"),
    offload_config.OffloadingConfig: (
        "groups", "worker_kv_bytes_per_block", "extra_config", "engine_id", "parallel", "cache",
        "replicated_layout",
    ),
    offload_config.OffloadingGroupConfig: ("tokens_per_block", "group_id"),
    offload_config.OffloadingCacheConfig: ("blocks_per_chunk", "tokens_per_hash"),
    offload_config.OffloadingParallelConfig: ("rank", "world_size", "pp_size"),
}  # fmt: skip
"""Attributes of vLLM's classes that we read."""

TEXTS: dict[Callable[..., object], tuple[str, ...]] = {
    scheduler.OffloadingConnectorScheduler.__init__: ("self.manager",),
    base.OffloadingSpec.__init__: ("self.kv_events_config",),
    build_offloading_config: ('.get("blocks_per_chunk")',),
    Scheduler.update_from_output: ("self.connector.take_events()",),
    Scheduler._connector_finished: ("self.connector.request_finished_all_groups(",),
    Scheduler.add_request: ("self.connector.on_new_request(request)",),
    EngineCore.__init__: ("self.model_executor = ", "self.scheduler: "),
    Request.__init__: ("self.arrival_time",),
}
"""What vLLM's functions must contain, because we rely on what they do."""


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in NEWER_PARAMETERS]


@pytest.mark.parametrize(("own", "inherited"), OVERRIDES)
def test_vllm_calls_our_classes_as_it_calls_its_own(own: type, inherited: type) -> None:
    assert not own.__abstractmethods__  # type: ignore[attr-defined]
    overriding = {
        name: method
        for name, method in vars(own).items()
        if inspect.isfunction(method) and hasattr(inherited, name)
    }
    if own is not XavierConnector:
        overriding.pop("__init__")  # our own code calls it
    for name, method in overriding.items():
        assert parameters(method) == parameters(getattr(inherited, name)), name


@pytest.mark.parametrize(("own", "replaced"), REPLACED)
def test_vllm_calls_what_stands_in_for_its_methods_likewise(own: Any, replaced: Any) -> None:
    assert parameters(own) == parameters(replaced)


def test_vllm_s_scheduler_calls_no_other_method_of_a_manager() -> None:
    called = {*re.findall(r"self\.manager\.(\w+)", inspect.getsource(scheduler))}
    assert not called - CALLS.keys() - INHERITED
    assert called >= {"lookup", "prepare_load", "prepare_store", "on_schedule_end"}


def test_a_manager_takes_the_arguments_it_gets() -> None:
    for name, count in CALLS.items():
        method = inspect.signature(getattr(XavierManager, name))
        required = [p for p in method.parameters.values() if p.default is inspect.Parameter.empty]
        assert len(required) == 1 + count, name


@pytest.mark.parametrize("kind", FIELDS)
def test_vllm_has_the_attributes_that_we_read(kind: type) -> None:
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set[str]()
    assert [name for name in FIELDS[kind] if name not in known and not hasattr(kind, name)] == []


@pytest.mark.parametrize("function", TEXTS)
def test_vllm_s_functions_do_what_we_rely_on(function: Callable[..., object]) -> None:
    source = inspect.getsource(function)
    assert [text for text in TEXTS[function] if text not in source] == []


def test_vllm_s_worker_takes_our_region() -> None:
    taken = parameters(gpu_worker.CPUOffloadingWorker.__init__)
    assert {"kv_caches", "blocks_per_chunk", "num_cpu_chunks", "mmap_region"} <= {*taken}
    read = {*re.findall(r"region\.(\w+)", inspect.getsource(gpu_worker))}
    read.discard("create_next_canonical_view")  # for a layout that our spec never uses
    assigned = {*re.findall(r"self\.(\w+)[:\s=]", inspect.getsource(DeviceRegion))}
    assert not read - {*dir(DeviceRegion)} - assigned


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


def test_we_make_all_that_vllm_s_connector_would_make() -> None:
    """`WorkerSide` calls the constructor of its base instead of its own."""
    made = inspect.getsource(OffloadingConnector.__init__)
    assert {*re.findall(r"self\.(\w+)[:\s]", made)} == {
        "_canonical_layout",  # which nothing reads
        "connector_scheduler",
        "connector_worker",
    }
    assert "_canonical_layout" not in inspect.getsource(OffloadingConnector).replace(made, "")


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
