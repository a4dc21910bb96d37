"""What our classes need of vLLM's, checked at run time where its version was never tested.

`tests/engine/test_seam.py` holds each supported version against this and against more, which needs
its sources.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.request import Request

from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.worker import DeviceRegion, HostWorker

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
    "get_load_source": 2, "on_reset_flushed": 0, "take_events": 0,
}  # fmt: skip
"""The methods of a manager that some version of vLLM calls, and the number of their arguments."""
INHERITED = frozenset({"lock", "config_info"})
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
    base.OffloadingEvent: ("keys", "medium", "removed"),
    base.OffloadingKVEventsConfig: ("enable_kv_cache_events",),
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
    OffloadingConnector.__init__: ("self.connector_scheduler",),
    scheduler.OffloadingConnectorScheduler.__init__: ("self.manager",),
    base.OffloadingSpec.__init__: ("self.kv_events_config",),
    build_offloading_config: ('.get("blocks_per_chunk")',),
    Scheduler.update_from_output: ("self.connector.take_events()",),
    Scheduler._connector_finished: ("self.connector.request_finished_all_groups(",),
    Scheduler.add_request: ("self.connector.on_new_request(request)",),
    EngineCore.__init__: ("self.model_executor = ", "self.scheduler: "),
    Request.__init__: ("trace_headers", "self.arrival_time"),
}
"""What vLLM's functions must contain, because we rely on what they do."""


def faults() -> list[str]:
    """What the installed vLLM lacks of what we use, a sentence each."""
    return [*_overrides(), *_calls(), *_fields(), *_texts(), *_region()]


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in NEWER_PARAMETERS]


def _overrides() -> Iterator[str]:
    for own, inherited in OVERRIDES:
        for name in sorted(getattr(own, "__abstractmethods__", ())):
            yield f"{inherited.__name__}.{name} is new"
        for name, method in vars(own).items():
            overridden = getattr(inherited, name, None)
            if name == "__init__" and own is not XavierConnector:
                continue  # our own code calls it
            if not inspect.isfunction(method) or overridden is None:
                continue
            if parameters(method) != parameters(overridden):
                yield f"{inherited.__name__}.{name} takes {', '.join(parameters(overridden))}"
    for method, replaced in REPLACED:
        if parameters(method) != parameters(replaced):
            yield f"{replaced.__qualname__} takes {', '.join(parameters(replaced))}"


def _calls() -> Iterator[str]:
    called = set(re.findall(r"self\.manager\.(\w+)", inspect.getsource(scheduler)))
    for name in sorted(called - CALLS.keys() - INHERITED):
        yield f"its scheduler calls OffloadingManager.{name}"
    for name in sorted({"lookup", "prepare_load", "prepare_store", "on_schedule_end"} - called):
        yield f"its scheduler does not call OffloadingManager.{name}"


def _fields() -> Iterator[str]:
    for kind, names in FIELDS.items():
        known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
        for name in names:
            if name not in known and not hasattr(kind, name):
                yield f"{kind.__name__}.{name} is gone"


def _texts() -> Iterator[str]:
    for function, texts in TEXTS.items():
        source = inspect.getsource(function)
        for text in texts:
            if text not in source:
                yield f"{function.__qualname__} lacks {text!r}"


def _region() -> Iterator[str]:
    taken = parameters(gpu_worker.CPUOffloadingWorker.__init__)
    for name in ("kv_caches", "blocks_per_chunk", "num_cpu_chunks", "mmap_region"):
        if name not in taken:
            yield f"CPUOffloadingWorker takes no {name}"
    read = set(re.findall(r"region\.(\w+)", inspect.getsource(gpu_worker)))
    read.discard("create_next_canonical_view")  # for a layout that our spec never uses
    has = {*dir(DeviceRegion), *_assigned(DeviceRegion)}
    for name in sorted(read - has):
        yield f"CPUOffloadingWorker reads {name} of its region"


def _assigned(kind: type) -> set[str]:
    return set(re.findall(r"self\.(\w+)[:\s=]", inspect.getsource(kind)))
