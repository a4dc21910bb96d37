"""Where vLLM 0.30 to 0.33 differ in what we use; the seam's tests check what they have in common.

Two more differences need no code of their own: `HostWorker.submit_load` takes 0.33's `expedited`,
and `XavierManager` has methods that only later versions call (`get_load_source` from 0.32,
`on_reset_flushed` from 0.33) or only earlier ones (`touch` up to 0.30).
"""

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import ReqContext

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

try:
    from vllm.v1.kv_offload.cpu.host_register import host_unregister as host_unregister
except ImportError:  # up to 0.31, which registers on CUDA only

    def host_unregister(ptr: int) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
        cudart.cudaHostUnregister(ptr)


def known_keys(context: ReqContext) -> list[bytes]:
    """All chunk keys of a request, in order, group after group; none up to 0.30.

    Later versions record them before the first lookup, but offer no way to list them.
    """
    positions: dict[bytes, int] = getattr(context, "_offload_key_positions", {})
    return list(positions)


def load_source(from_peer: bool) -> "CacheHitSource":
    """What vLLM, from 0.32 on, counts loaded tokens under."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource.P2P if from_peer else CacheHitSource.HOST
