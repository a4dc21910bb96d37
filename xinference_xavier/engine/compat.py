"""What we use of vLLM although it has no public name, and differences among vLLM 0.31 to 0.33.

Some differences need no code here. `HostWorker.submit_load` takes 0.33's `expedited`, and
`XavierManager` has methods that only some versions call: `get_load_source` since 0.32,
`on_reset_flushed` since 0.33. `tests/engine/test_seam.py` checks what the versions have in common.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from xinference_xavier.peers import DISK

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

try:
    from vllm.v1.kv_offload.cpu.host_register import host_register as host_register
    from vllm.v1.kv_offload.cpu.host_register import host_unregister as host_unregister
except ImportError:  # up to 0.31, which registers on CUDA only

    def host_register(ptr: int, num_bytes: int) -> bool:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        return int(cudart.cudaHostRegister(ptr, num_bytes, 0)) == 0

    def host_unregister(ptr: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        cudart.cudaHostUnregister(ptr)


def key_positions(context: ReqContext) -> Mapping[OffloadKey, int]:
    """A request's chunk keys in order, group by group, each with the number of tokens up to its
    chunk's end; empty before its first lookup."""
    return context._offload_key_positions


def copies_blocks(step: SchedulerOutput) -> bool:
    """True if vLLM copies blocks for requests in this step, or hands copies to the connector."""
    state = step.kv_connector_block_state
    return bool(step.kv_cache_block_copies or (state is not None and state.boundary_state_offloads))


def engine_core() -> Any:
    """vLLM's `EngineCore` that is being made on this thread; None in a worker's process.

    It hands its scheduler no reference to itself.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        members = getattr(owner, "__dict__", {})
        if "model_executor" in members and hasattr(owner, "add_lora"):
            return owner
        frame = frame.f_back
    return None


def watch_engine(**watchers: Callable[..., Any]) -> None:
    """Have each watcher called instead of the engine's method of its name, with that method and
    its arguments. Call it on the thread that makes the engine.

    What stands in for a method must look like it: vLLM converts what its API process sends by the
    method's signature.
    """
    core = engine_core()
    if core is not None:
        for name, watcher in watchers.items():
            method = getattr(core, name)
            setattr(core, name, wraps(method)(partial(watcher, method)))


READING_CALLS = {
    "compute_weight_checksums",
    "get_encoder_timing_stats",
    "get_model_inspection",
    "init_weight_transfer_engine",
    "release_late_interaction_query_cache",
    "save_tensorized_model",
    "shutdown_weight_transfer_engine",
}
"""What vLLM's clients have the workers do by `EngineCore.collective_rpc` without changing what they
compute. Any other call may load weights in place."""


def load_source(fetched_from: str | None) -> "CacheHitSource":
    """The source under which vLLM 0.32 and later count tokens that were loaded from the pool, to
    which they may have been fetched."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    if fetched_from is None:
        return CacheHitSource.HOST
    return CacheHitSource.DISK if fetched_from == DISK else CacheHitSource.P2P


def cpu_kernel(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """The CPU backend's attention kernel for a layer, for example "amx".

    It depends on the processor, the types and the sizes, and has no public name.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = vllm_config.model_config.dtype
    return _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)  # type: ignore[arg-type]  # no text at run time
