"""Makes vLLM's offloading connector use our pool: lays out the region, makes workers and manager.

The scheduler's process and every worker each make a spec. Life cycle: the workers agree on the
layout when they get their KV caches, and the first one creates the region. The other workers
receive it, and so does the scheduler's side after warm-up.

A row is `[worker 0's cell | worker 1's cell | … | padding to a page]`. A cell holds the chunk's
pages, tensor after tensor. The stages of a pipeline can have different numbers of layers, so what
vLLM tells a spec about pages is its own worker's, and on the scheduler's side the first worker's.
The connector chooses the chunk size. Importing this module has no side effects, because vLLM
imports it in its API process too.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    SchedulerOffloadConfig,
)
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from xinference_xavier.config import XAVIER, XavierConfig
from xinference_xavier.engine import identity, metrics
from xinference_xavier.engine.keys import Group, Layout, PromptChunker
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.probes import OwnRequests, Probes
from xinference_xavier.engine.process import end_with_parent
from xinference_xavier.engine.sketches import Sketcher
from xinference_xavier.engine.waiting import Arrivals
from xinference_xavier.engine.worker import DeviceRegion, HostWorker, device_worker
from xinference_xavier.engine.workload import take_all
from xinference_xavier.errors import ConfigError, NotSharing, RegionError
from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import (
    ROW_ALIGNMENT,
    Region,
    RegionServer,
    promised_bytes,
    receive_region,
)
from xinference_xavier.protocol.load import Serving
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.peer_tier import DiskTier, PeerTier
from xinference_xavier.replica.replica import Engine, Replica
from xinference_xavier.runtime.host import free_memory

logger = logging.getLogger(__name__)

ENGINE = "xavier_engine"
"""The entry of the connector's extra configuration that has vLLM's own of the engine, for a spec's
scheduler side: a `VllmConfig` and a `KVCacheConfig`."""
_REGION_TIMEOUT = 60.0  # seconds to wait for the first worker
MIN_ROWS = 16
_PARTS = 4  # of the free memory; by default, the pools take one
_BYTES_PER_TABLE_BYTE = 512
_POPULATE_AT_ONCE = 1 << 30
"""Bytes. A larger region is populated in the background where vLLM need not wait; elsewhere so many
of them show how long it will take."""


class WorkerNote(NamedTuple):
    """What the first worker tells the scheduler's side; JSON-able."""

    pages: list[dict[str, Any]]  # its `page_format`
    prefix_caching: bool  # whether it is on there
    parts: dict[str, list[Any]]  # from `describe_pages`
    cells: Sequence[int] = ()  # bytes of each worker's cell
    cache_rows: int = 0  # that would hold the whole KV cache


class XavierSpec(OffloadingSpec):
    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        self._xavier = XavierConfig.from_dict(config.extra_config[XAVIER])
        super().__init__(config)
        # Events that describe chunks would keep the tokens of each, until one says that it is gone.
        self.kv_events_config = OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        )
        self._chunk_tokens = self.blocks_per_chunk * max(self.tokens_per_block)
        self.replicated_layout = config.replicated_layout and current_platform.is_cuda_alike()
        self._cell_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk  # its own
        self.describe: Callable[[CanonicalKVCaches], WorkerNote] = lambda _: WorkerNote(
            [], True, {}
        )
        """What only a worker knows; set it before `get_worker`."""
        self._region_server: RegionServer | None = None
        self._worker: OffloadingWorker | None = None
        self._manager: XavierManager | None = None

    # -- a worker's side ----------------------------------------------------------------------

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            end_with_parent()  # it may have a process of its own
            rank = 0 if self.replicated_layout else self.config.parallel.rank
            cells = self._gather_cells()
            row_bytes = -(-sum(cells) // ROW_ALIGNMENT) * ROW_ALIGNMENT
            if self.config.parallel.rank == 0:
                region = self._create_region(row_bytes, kv_caches, cells)
            else:
                region = self._receive(row_bytes)
            if current_platform.is_cpu():
                self._worker = HostWorker(
                    kv_caches, region, self.blocks_per_chunk, sum(cells[:rank])
                )
            else:
                self._worker = device_worker(
                    kv_caches, self.blocks_per_chunk, DeviceRegion(region, rank, cells)
                )
        return self._worker

    def _gather_cells(self) -> list[int]:
        """The bytes of each cell in a row. Waits for the other stages of a pipeline, which vLLM
        gives their KV caches at the same time."""
        parallel = self.config.parallel
        if self.replicated_layout:
            return [self._cell_bytes]
        stages = [self._cell_bytes] * parallel.pp_size
        if parallel.pp_size > 1:
            torch.distributed.all_gather_object(
                stages, self._cell_bytes, group=get_pp_group().cpu_group
            )
        workers = parallel.world_size // parallel.pp_size  # of each stage, with equal caches
        return [cell for cell in stages for _ in range(workers)]

    def _create_region(
        self, row_bytes: int, kv_caches: CanonicalKVCaches, cells: Sequence[int]
    ) -> Region:
        """vLLM has its KV cache by now, which on the CPU platform takes host memory, too."""
        cache_rows = -(-len(kv_caches.tensors[0].tensor) // self.blocks_per_chunk)
        region = Region.create(self._rows(row_bytes, cache_rows), row_bytes)
        # Engines that asked at the same moment see each other's regions now.
        self._rows(row_bytes, cache_rows, own=region.size)
        note = self.describe(kv_caches)._replace(cells=cells, cache_rows=cache_rows)
        self._region_server = RegionServer(region, self.config.engine_id, json.dumps(note).encode())
        logger.info(
            "pool created: chunks=%d chunk_bytes=%d cache_chunks=%d",
            region.rows,
            row_bytes,
            cache_rows,
        )
        if current_platform.is_cpu() and region.size > _POPULATE_AT_ONCE:
            threading.Thread(target=region.populate, name="xavier-populate", daemon=True).start()
        else:  # a device's worker pins it next, which would allocate it on one thread
            _populate(region)
        return region

    def _rows(self, row_bytes: int, cache_rows: int, own: int = 0) -> int:
        """`rows_of` with the host's memory as it is now. Of what is promised, `own` bytes are this
        engine's."""
        memory = free_memory()
        return rows_of(
            self._xavier,
            row_bytes=row_bytes,
            cache_rows=cache_rows,
            workers=self.config.parallel.world_size,
            free=memory.free,
            page_cache=memory.page_cache,
            promised=promised_bytes() - own,
        )

    def _receive(self, row_bytes: int) -> Region:
        region = receive_region(self.config.engine_id, _REGION_TIMEOUT)
        if region.row_bytes != row_bytes:
            raise RegionError(
                f"the first worker made rows of {region.row_bytes} bytes, but this process expects "
                f"{row_bytes}; start all workers of a replica with the same arguments and versions"
            )
        return region

    # -- the scheduler's side -----------------------------------------------------------------

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            region = receive_region(self.config.engine_id, _REGION_TIMEOUT)
            vllm_config, kv_cache_config = self.extra_config[ENGINE]
            note = WorkerNote(*json.loads(region.note))
            # vLLM also switches it off itself, perhaps in its workers only. Then it computes
            # prompts with loaded rows wrongly.
            shares = bool(vllm_config.cache_config.enable_prefix_caching and note.prefix_caching)
            if not shares:
                logger.warning("nothing is shared because prefix caching is off")
            fingerprint_fields = {
                **identity.fingerprint_fields(vllm_config, kv_cache_config, self._chunk_tokens),
                "pages": note.pages,
                "cells": note.cells,
            }
            pool = Pool(region.rows)
            mirror = Mirror(self.config.engine_id)
            disk = None
            if self._xavier.disk is not None and shares:
                disk = Disk(
                    Path(self._xavier.disk),
                    self._xavier.disk_bytes,
                    self._xavier.model_uid,
                    region,
                    pool,
                    saves_all=self._xavier.disk_save == "all",
                )
            tier = PeerTier(pool, mirror) if disk is None else DiskTier(pool, mirror, disk)
            sketcher = Sketcher(
                region,
                pool,
                note.parts,
                # The first worker has described its pages: other stages have other layers.
                cells=1 if self.config.parallel.pp_size > 1 else len(note.cells),
                cell_bytes=note.cells[0],
                blocks_per_chunk=self.blocks_per_chunk,
            )
            layout = self.layout(vllm_config, kv_cache_config)
            manager = XavierManager(
                pool,
                tier,
                layout=layout,
                serving=serving_of(
                    self._xavier,
                    layout,
                    region.row_bytes,
                    slots=vllm_config.scheduler_config.max_num_seqs,
                ),
                row_bytes=region.row_bytes,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                min_fetch_tokens=self._xavier.least_fetch_tokens,
                adaptive=self._xavier.min_fetch_tokens is None,
                fetch_timeout=self._xavier.fetch_timeout,
                probes=partial(
                    Probes,
                    requests=OwnRequests.at(vllm_config) if shares else OwnRequests(None),
                    sketcher=sketcher,
                    pool=pool,
                    chunk_tokens=self._chunk_tokens,
                    max_tokens=longest_probe(vllm_config, kv_cache_config),
                    vocabulary=vllm_config.model_config.get_vocab_size(),
                    audits=self._xavier.audit and shares,
                ),
                arrivals=Arrivals.at(vllm_config),
                shares=shares,
                on_shutdown=lambda: replica.stop(),
            )
            engine = Engine(
                PromptChunker(vllm_config, layout, self.config.cache.tokens_per_hash),
                sketch=sketcher.sketch,
                stats=manager.stats,
                load=manager.workload.load,
                work_on_probes=manager.probes.work,
                take_prompts=partial(take_all, manager.workload.prompts),
                take_answers=partial(take_all, manager.workload.answers),
                take_computed=partial(take_all, manager.workload.computed),
                take_marked=partial(take_all, manager.workload.marked),
                take_finished=partial(take_all, manager.finished),
            )
            replica = Replica(
                self._xavier,
                engine=engine,
                tier=tier,
                incarnation=self.config.engine_id,
                namespace=identity.digest(fingerprint_fields),
                key_bytes=identity.key_bytes(vllm_config),
                region=region,
                disk=disk,
                cache_rows=note.cache_rows,
                fingerprint_fields=identity.readable(fingerprint_fields),
                not_sharing=None if shares else NotSharing.NO_PREFIX_CACHING,
            )
            replica.start()
            end_with_parent()
            self._manager = manager
        return self._manager

    def layout(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Layout:
        """The groups as vLLM's scheduler is about to look them up."""
        groups = SchedulerOffloadConfig.from_spec(self, vllm_config, kv_cache_config)
        return Layout(
            self._chunk_tokens,
            {group.group_idx.to_bytes(4): lookup_group(group) for group in groups.kv_group_configs},
        )


def _populate(region: Region) -> None:
    """Allocate the region while vLLM waits, and say so: a large one takes minutes."""
    began = time.monotonic()
    logger.info("vLLM waits until the pool is allocated: bytes=%d", region.size)
    region.populate(lambda: region.allocated < _POPULATE_AT_ONCE)
    seconds = (time.monotonic() - began) * region.size / region.allocated
    patience = envs.VLLM_ENGINE_READY_TIMEOUT_S
    if seconds > patience:
        logger.warning(
            "vLLM may give up before the pool is allocated, which takes about %.0f s: use a "
            "smaller xavier_pool_bytes, or set VLLM_ENGINE_READY_TIMEOUT_S to more than %d",
            seconds,
            patience,
        )
    region.populate()
    logger.info("pool allocated: seconds=%.1f", time.monotonic() - began)


def rows_of(
    config: XavierConfig,
    *,
    row_bytes: int,
    cache_rows: int,
    workers: int,
    free: int,
    page_cache: int = 0,
    promised: int | None = None,
) -> int:
    """The rows of one engine's pool, with vLLM's `workers` and `free` bytes of memory, of which
    `page_cache` hold what the kernel would drop.

    Other pools on this host have still to take `promised` bytes: replicas that start together see
    the same free memory, later ones what the first have left. If that is not known, all engines
    that the launch may place here are to come. No count of replicas is compared otherwise: a host
    may get fewer than another, and a replica may be added or started again.

    By default as many as the engine's own KV cache takes, but the launch's pools on this host take
    at most a quarter of the free memory. Page tables count: 8 bytes for each page of 4 KiB, in
    every process that maps the pool.

    Raises:
        ConfigError: the pool is too small to work with, or does not fit into the free memory.
    """
    here = config.replicas_per_host * config.engines
    # Mapped by the workers, the engine, and the transfer processes of all engines here.
    mappings = workers + 1 + here
    mapped_bytes = row_bytes + -(-mappings * row_bytes // _BYTES_PER_TABLE_BYTE)
    given = config.pool_bytes
    if given is None:
        left = free - (promised or 0)
        rows = max(MIN_ROWS, min(cache_rows, left // _PARTS // here // mapped_bytes))
    else:
        rows = given // config.engines // row_bytes
        if rows < MIN_ROWS:
            raise ConfigError(
                "xavier_pool_bytes",
                given,
                f"holds {rows} chunks of {row_bytes} bytes, fewer than {MIN_ROWS}",
                f"use at least {MIN_ROWS * row_bytes * config.engines}",
            )
    needed = rows * mapped_bytes
    others = (here - 1) * needed if promised is None else promised
    if needed + others > free:
        together = f", {needed + others} with what other pools on this host have still to take"
        raise ConfigError(
            "xavier_pool_bytes",
            given or rows * row_bytes,
            f"takes {needed} bytes with its page tables{together if others else ''}, more than the "
            f"{free} that are free ({page_cache} of them hold page cache)",
            "use less, or leave it out, or give the host or the container more memory",
        )
    return rows


def lookup_group(group: GroupOffloadConfig) -> Group:
    """The group as vLLM looks it up: one more chunk than it loads for a drafter's group."""
    window = group.sliding_window_size_in_chunks
    if window is not None:
        window += group.is_eagle_group
    return Group(group.tokens_per_chunk, window)


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


def longest_probe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """The tokens of a request that answers one more and takes half of the KV cache at most."""
    groups = kv_cache_config.kv_cache_groups
    blocks = kv_cache_config.num_blocks // (2 * max(1, len(groups)))
    tokens = blocks * min(group.kv_cache_spec.block_size for group in groups)
    longest: int = vllm_config.model_config.max_model_len
    return min(longest - 1, tokens)
