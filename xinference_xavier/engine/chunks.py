"""How long a chunk is, and whether vLLM stores all of it.

vLLM keeps only the latest blocks of a group with a sliding window and frees the others. A chunk
must be stored while it has all its blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from xinference_xavier.config import XavierConfig
from xinference_xavier.engine.request import GROUP
from xinference_xavier.errors import ConfigError

DEFAULT_CHUNK_TOKENS = 128


def chunk_tokens_for(
    config: XavierConfig, block_tokens: Sequence[int], windows: Sequence[int | None]
) -> int:
    """Tokens per chunk: the configured number, or the default rounded up to whole blocks.

    `block_tokens` and `windows` are those of each KV-cache group. A window is how many tokens back
    vLLM keeps the group's blocks; None: all. No chunk of several blocks is longer than its window.

    Raises:
        ConfigError: the configured number is not a multiple of every block size, or too large.
    """
    block = math.lcm(*block_tokens)
    limits = [
        max(1, window // own) * max(block_tokens)
        for own, window in zip(block_tokens, windows, strict=True)
        if window is not None
    ]
    longest = max(block, min(limits) // block * block) if limits else None
    tokens = config.chunk_tokens or DEFAULT_CHUNK_TOKENS
    whole = -(-tokens // block) * block
    if config.chunk_tokens is not None and tokens != whole:
        raise ConfigError(
            "xavier_chunk_tokens",
            tokens,
            f"is not a multiple of the model's block size, {block} tokens",
            f"use {whole}",
        )
    if longest is not None and whole > longest:
        if config.chunk_tokens is not None:
            raise ConfigError(
                "xavier_chunk_tokens",
                tokens,
                "is longer than the model's sliding window",
                f"use at most {longest}",
            )
        return longest
    return whole


def window_tokens(group: KVCacheGroupSpec) -> int | None:
    """How many tokens back vLLM keeps a group's blocks; None: all.

    A chunk must be stored before any of its blocks may be freed. A drafter's chunks are stored one
    chunk late, so two must fit.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        window = spec.attention_chunk_size
    else:
        return None
    return window // 2 if getattr(group, "is_eagle_group", False) else window


def stores_whole_chunks(
    blocks: GPULoadStoreSpec,
    keys: Iterable[bytes],
    groups: Mapping[int, KVCacheSpec],
    blocks_per_chunk: int,
) -> bool:
    """Whether a store has every block of the chunks with `keys`.

    `groups` are by number, in the order of `blocks`. Of a chunk of recurrent states, only the last
    block must be there.
    """
    chunks = Counter(key[GROUP] for key in keys)
    sizes_and_starts = zip(blocks.group_sizes, blocks.block_indices, strict=True)
    for (number, spec), (size, start) in zip(groups.items(), sizes_and_starts, strict=True):
        skipped = start % blocks_per_chunk
        if skipped and not isinstance(spec, MambaSpec):
            return False
        if skipped + size != chunks[number.to_bytes(4)] * blocks_per_chunk:
            return False
    return True
