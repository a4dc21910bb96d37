"""What is fixed for the life of an engine, read once when it starts.

`EngineFacts` is what vLLM's two configurations say, in each process of the engine. `SchedulerFacts`
are plain values for the scheduler's side, which also knows the region and the first worker's note.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.engine.keys import Group, Layout, chunk_tokens_for, window_tokens
from xinference_xavier.errors import ConfigError
from xinference_xavier.protocol.load import Serving


def xavier_config(vllm: VllmConfig) -> XavierConfig:
    """Our configuration, which vLLM carries in its own. Raises ConfigError."""
    return XavierConfig.from_dict(_extra(vllm)[XAVIER])


def _extra(vllm: VllmConfig) -> dict[str, Any]:
    transfer = vllm.kv_transfer_config
    assert transfer is not None, "vLLM makes a connector from a transfer configuration"
    return transfer.kv_connector_extra_config


@dataclass(frozen=True)
class EngineFacts:
    """`groups` are the KV-cache groups that are offloaded, by number. `offloading` is vLLM's own
    summary of its two configurations, with our chunk size."""

    config: XavierConfig
    vllm: VllmConfig
    cache: KVCacheConfig
    offloading: OffloadingConfig
    groups: Mapping[int, KVCacheGroupSpec]

    @classmethod
    def read(cls, config: XavierConfig, vllm: VllmConfig, cache: KVCacheConfig) -> EngineFacts:
        """`config` is `xavier_config(vllm)`. Raises ConfigError if the chunk size does not suit the
        model."""
        offloading = _offloading_config(vllm, cache)
        groups = {
            group.group_id: cache.kv_cache_groups[group.group_id] for group in offloading.groups
        }
        block_tokens = [group.tokens_per_block for group in offloading.groups]
        windows = [window_tokens(group) for group in groups.values()]
        chunk_tokens = chunk_tokens_for(config, block_tokens, windows)
        # vLLM's own entry. Since 0.33, it also derives sliding windows from it.
        _extra(vllm)["blocks_per_chunk"] = chunk_tokens // max(block_tokens)
        return cls(config, vllm, cache, _offloading_config(vllm, cache), groups)

    @property
    def blocks_per_chunk(self) -> int:
        return self.offloading.cache.blocks_per_chunk

    @property
    def chunk_tokens(self) -> int:
        """The tokens of the longest chunks."""
        return self.blocks_per_chunk * max(
            group.tokens_per_block for group in self.offloading.groups
        )

    @property
    def block_tokens(self) -> int:
        """The tokens of the smallest blocks."""
        return min(group.kv_cache_spec.block_size for group in self.groups.values())

    @property
    def prefix_caching(self) -> bool:
        return bool(self.vllm.cache_config.enable_prefix_caching)

    @property
    def longest_probe(self) -> int:
        """The tokens of a request that answers one more and takes half of the KV cache at most."""
        groups = self.cache.kv_cache_groups
        blocks = self.cache.num_blocks // (2 * max(1, len(groups)))
        tokens = blocks * min(group.kv_cache_spec.block_size for group in groups)
        longest: int = self.vllm.model_config.max_model_len
        return min(longest - 1, tokens)

    def layout(self, spec: OffloadingSpec) -> Layout:
        """The groups as vLLM's scheduler will look them up, by its own `spec`."""
        groups = SchedulerOffloadConfig.from_spec(spec, self.vllm, self.cache).kv_group_configs
        return Layout(
            self.chunk_tokens,
            {group.group_idx.to_bytes(4): lookup_group(group) for group in groups},
        )


def _offloading_config(vllm: VllmConfig, cache: KVCacheConfig) -> OffloadingConfig:
    try:
        return build_offloading_config(vllm, cache)
    except AssertionError as error:  # the groups' block sizes have no common hash size
        raise ConfigError(
            "enable_prefix_caching",
            vllm.cache_config.enable_prefix_caching,
            f"does not suit this model's KV cache: {error}",
            "launch with enable_prefix_caching=True, or without enable_xavier",
        ) from error


def lookup_group(group: GroupOffloadConfig) -> Group:
    """The group as vLLM looks it up: one more chunk than it loads for a drafter's group."""
    window = group.sliding_window_size_in_chunks
    if window is not None:
        window += group.is_eagle_group
    return Group(group.tokens_per_chunk, window)


@dataclass(frozen=True, kw_only=True)
class SchedulerFacts:
    """An engine as its scheduler's side sees it. Unless it `shares`, it stores and loads nothing.

    Hits that save fewer than `min_fetch_tokens` are not worth a fetch. Unless `adaptive`, all
    others are, without a prediction. `fetch_timeout` bounds, in seconds, how long a request waits
    for all of its fetches. Routers sign their marks with `serving.mark_key`.
    """

    layout: Layout
    serving: Serving
    row_bytes: int
    step_tokens: int  # that one step computes at most
    min_fetch_tokens: int
    adaptive: bool
    fetch_timeout: float
    kv_tokens: int | None = None  # that vLLM's KV cache holds
    cached_tokens: int = 0  # that its prefix cache holds
    alone: bool = True  # no other rank computes in step with it, and would wait with it
    shares: bool = True

    @classmethod
    def for_region(
        cls, engine: EngineFacts, layout: Layout, row_bytes: int, shares: bool
    ) -> SchedulerFacts:
        config, scheduling = engine.config, engine.vllm.scheduler_config
        parallel = engine.vllm.parallel_config
        # vLLM keeps one block for itself.
        kv_tokens = (engine.cache.num_blocks - 1) * engine.block_tokens
        return cls(
            layout=layout,
            serving=serving_of(config, layout, row_bytes, scheduling.max_num_seqs),
            row_bytes=row_bytes,
            step_tokens=scheduling.max_num_batched_tokens,
            min_fetch_tokens=max(layout.chunk_tokens, config.least_fetch_tokens),
            adaptive=config.min_fetch_tokens is None,
            fetch_timeout=config.fetch_timeout,
            kv_tokens=kv_tokens,
            cached_tokens=kv_tokens if engine.prefix_caching else 0,
            alone=parallel.pipeline_parallel_size == parallel.data_parallel_size == 1,
            shares=shares,
        )


def serving_of(config: XavierConfig, layout: Layout, row_bytes: int, slots: int) -> Serving:
    groups = layout.groups.values()
    tokens = layout.groups[layout.main].chunk_tokens
    # Of groups with a window a hit needs only the last few rows.
    whole = [group for group in groups if group.window is None] or groups
    rows = sum(tokens / group.chunk_tokens for group in whole)
    return Serving(
        tokens,
        round(rows * row_bytes),
        config.request_limit,
        config.routing,
        config.queue,
        config.role,
        mark_key=secrets.token_hex(16),
        drain=config.drain,
        slots=slots,
    )
