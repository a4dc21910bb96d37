"""KV caches in the form in which vLLM hands them to an offloading worker."""

from collections.abc import Sequence

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

BLOCKS = 24


def kv_caches(
    groups: Sequence[Sequence[int]], seed: int = 0, padding: int = 0, device: str = "cpu"
) -> CanonicalKVCaches:
    """`groups` has the page sizes (bytes) of each group; each page has a tensor of random blocks.

    `padding` bytes at the end of each block belong to no page.
    """
    random = torch.Generator().manual_seed(seed)
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[list[CanonicalKVCacheRef]] = []
    for pages in groups:
        refs.append([])
        for page in pages:
            size = page + padding
            data = torch.randint(-128, 128, (BLOCKS, size), dtype=torch.int8, generator=random)
            refs[-1].append(CanonicalKVCacheRef(len(tensors), page))
            tensors.append(CanonicalKVCacheTensor(data.to(device), size))
    return CanonicalKVCaches(tensors, refs)


def cell_bytes(caches: CanonicalKVCaches, blocks_per_chunk: int) -> int:
    return sum(tensor.page_size_bytes for tensor in caches.tensors) * blocks_per_chunk


def pages_of(caches: CanonicalKVCaches, group: int, block: int) -> list[bytes]:
    """The bytes of one block, page by page, without padding."""
    return [
        caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].cpu().numpy().tobytes()
        for ref in caches.group_data_refs[group]
    ]
