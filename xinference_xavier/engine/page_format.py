"""How a worker's attention kernels lay out the pages of its KV cache.

Pages of equal size can hold equal numbers in different orders: each backend has its own layout, the
CPU backend has one per instruction set, and a kernel may split a block into smaller ones. Only a
worker with its KV cache knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

from xinference_xavier.engine import compat


def page_format(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
) -> list[dict[str, Any]]:
    """One JSON-able entry per KV-cache group. `kv_caches` are this worker's tensors by layer.

    The result does not depend on the number of blocks.
    """
    return [
        {
            "backends": _backends(vllm_config, group.layer_names),
            "kernels": _cpu_kernels(vllm_config, group.kv_cache_spec),
            "tensors": sorted(
                {
                    tensor_format(tensor, kv_cache_config.num_blocks)
                    for layer in group.layer_names
                    for tensor in tensors_of(kv_caches.get(layer))
                }
            ),
        }
        for group in kv_cache_config.kv_cache_groups
    ]


def tensor_format(tensor: torch.Tensor, blocks: int) -> str:
    """Type, shape and memory order of the dimensions, outermost first.

    The number of blocks is replaced by the number of kernel blocks per vLLM block.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: strides[axis], reverse=True)
    shape = [str(size) for size in tensor.shape]
    for axis in order:
        if tensor.shape[axis] >= blocks and tensor.shape[axis] % blocks == 0:
            shape[axis] = f"{tensor.shape[axis] // blocks} × blocks"
            break
    return f"{tensor.dtype} ({', '.join(shape)}) in the order {order}"


def _backends(vllm_config: VllmConfig, layers: list[str]) -> list[str]:
    return sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config, layers))


def _cpu_kernels(vllm_config: VllmConfig, spec: KVCacheSpec) -> list[str]:
    """The CPU backend's kernels. AMX packs K and V, VEC keeps K by column, NEON differs again."""
    if not current_platform.is_cpu():
        return []
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()  # by layer, if they differ
    return sorted(
        {
            compat.cpu_kernel(vllm_config, layer)
            for layer in specs
            if isinstance(layer, AttentionSpec)
        }
    )


def tensors_of(cache: torch.Tensor | list[torch.Tensor] | None) -> Iterable[torch.Tensor]:
    if cache is None:  # another worker's layer
        return ()
    return (cache,) if isinstance(cache, torch.Tensor) else cache
