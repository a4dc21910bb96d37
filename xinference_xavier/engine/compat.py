"""Differences among vLLM 0.27 to 0.33; `tests/engine/test_seam.py` checks what they have in common.

Some differences need no code here. `HostWorker.submit_load` takes 0.33's `expedited`, and
`XavierManager` has methods that only some versions call: `touch` up to 0.30, `get_load_source`
since 0.32, `on_reset_flushed` since 0.33.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from queue import Queue
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, ReqContext
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

try:
    from vllm.v1.kv_offload.cpu.host_register import host_unregister as host_unregister
except ImportError:  # up to 0.31, which registers on CUDA only

    def host_unregister(ptr: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        cudart.cudaHostUnregister(ptr)


class RecordedKeys:
    """A request's chunk keys by group. The lists grow with the request."""

    def __init__(self, groups: Sequence[list[bytes]]) -> None:
        self.groups = groups


def record_keys(scheduler: "OffloadingConnectorScheduler", req_id: str) -> None:
    """Let `known_keys` see a request's keys; call it before the request's lookups.

    Up to 0.30 vLLM keeps them where a manager does not see them.
    """
    status = scheduler._req_status[req_id]
    if not hasattr(status.req_context, "_offload_key_positions"):
        groups: list[list[bytes]] = [group.offload_keys for group in status.group_states]  # type: ignore[misc]  # keys are bytes
        status.req_context.set_state(RecordedKeys(groups))


def known_keys(context: ReqContext) -> list[bytes]:
    """All chunk keys of a request in order, group by group; empty before its first lookup."""
    positions: dict[bytes, int] | None = getattr(context, "_offload_key_positions", None)
    if positions is not None:
        return list(positions)
    recorded = context.get_state(RecordedKeys)
    return [] if recorded is None else list(chain.from_iterable(recorded.groups))


def key_positions(context: ReqContext) -> Iterable[tuple[bytes, int | None]]:
    """Each known key with the tokens up to its end; None up to 0.30, which has keys only for whole
    chunks."""
    positions: dict[bytes, int] | None = getattr(context, "_offload_key_positions", None)
    return ((key, None) for key in known_keys(context)) if positions is None else positions.items()


def copies_blocks(step: SchedulerOutput) -> bool:
    """Whether vLLM gives requests copies of blocks in this step, or hands such to the connector.

    Up to 0.28, `partial_tail_offloads` has the latter.
    """
    state = getattr(step, "kv_connector_block_state", None)
    return bool(
        step.kv_cache_block_copies
        or getattr(step, "partial_tail_offloads", None)
        or (state is not None and state.boundary_state_offloads)
    )


def reuses_partial_blocks(kv_cache_manager: KVCacheManager) -> bool:
    """Whether requests may begin with a part of a block of vLLM's own cache."""
    return bool(getattr(kv_cache_manager.coordinator, "enable_partial_hash_hits", False))


def engine_core() -> Any:
    """vLLM's `EngineCore` that is being made on this thread; None in a worker's process.

    It hands its scheduler no reference to itself. Only one that has a process of its own has an
    `input_queue`; else its caller's thread runs the steps.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        members = getattr(owner, "__dict__", {})
        if isinstance(members.get("input_queue"), Queue):
            return owner
        if "model_executor" in members and hasattr(owner, "add_lora"):
            return owner
        frame = frame.f_back
    return None


def watch_adapters(load: Callable[[LoRARequest, Callable[[], bool]], bool]) -> None:
    """Let `load` see each adapter that the engine loads before any request needs it, and do it by
    calling its second argument. Call it on the thread that makes the engine."""
    core = engine_core()
    if core is not None:
        add = core.add_lora
        core.add_lora = lambda request: load(request, partial(add, request))


def load_source(from_peer: bool) -> "CacheHitSource":
    """The source under which vLLM 0.32 and later count loaded tokens."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.P2P if from_peer else CacheHitSource.HOST


def device_worker(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, rows: int, region: Any
) -> CPUOffloadingWorker:
    """vLLM's worker for CUDA and XPU. Up to 0.29 it calls rows blocks."""
    taken = inspect.signature(CPUOffloadingWorker.__init__).parameters
    count = "num_cpu_chunks" if "num_cpu_chunks" in taken else "num_cpu_blocks"
    return CPUOffloadingWorker(
        kv_caches=kv_caches,
        blocks_per_chunk=blocks_per_chunk,
        mmap_region=region,
        **{count: rows},  # type: ignore[arg-type]  # the name is known at run time
    )


def group_number(group: OffloadingGroupConfig, place: int) -> int:
    """The number at the end of a group's chunk keys: its place up to 0.29, which offloads all
    groups."""
    return getattr(group, "group_id", place)


def cpu_kernel(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """The CPU backend's attention kernel for a layer, for example "amx".

    It depends on the processor, the types and the sizes, and has no public name.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype
    return _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)  # type: ignore[arg-type]  # no text at run time


def calculates_scales(cache: CacheConfig) -> bool:
    """Whether an engine takes the scales of an fp8 cache from its first request: up to 0.27."""
    return bool(getattr(cache, "calculate_kv_scales", False))


def keeps_cache_in_host_memory(kv_cache: KVCacheConfig) -> bool:
    """Whether vLLM itself keeps the KV cache in host memory, as 0.30 and later can."""
    return getattr(kv_cache, "hisparse_host_num_blocks", None) is not None


def hash_seed(algorithm: str) -> str | None:
    """The seed of this engine's chains of block hashes; None for vLLM's default.

    Call it before vLLM computes the first hash. Up to 0.28 the default is random in each process
    and no key would ever match, so this sets a fixed one, except for hashes that can collide.
    """
    if algorithm.startswith("sha256") and not hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        os.environ.setdefault("PYTHONHASHSEED", "0")
    return os.environ.get("PYTHONHASHSEED")
