"""Makes vLLM's offloading connector use our pool: lays out the region, makes workers and manager.

The scheduler's process and every worker each have a connector, which makes a spec. The workers
agree on the layout when they get their KV caches, and the first one creates the region. The other
workers receive it, and so does the scheduler's side after warm-up.

A row is `[worker 0's cell | worker 1's cell | … | padding to a page]`. A cell holds the chunk's
pages, tensor after tensor. The stages of a pipeline can have different numbers of layers, so what
vLLM tells a spec about pages is its own worker's, and on the scheduler's side the first worker's.
Importing this module has no side effects, because vLLM imports it in its API process too.
"""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

from xinference_xavier.config import XavierConfig
from xinference_xavier.engine import first_tokens, identity
from xinference_xavier.engine.facts import EngineFacts, SchedulerFacts
from xinference_xavier.engine.keys import PromptChunker
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.probes import OwnRequests, Probes
from xinference_xavier.engine.process import end_with_parent
from xinference_xavier.engine.sketcher import Described, Sketcher, describe_pages
from xinference_xavier.engine.worker_side import (
    DevicePinning,
    DeviceRegion,
    HostWorker,
    device_worker,
)
from xinference_xavier.errors import ConfigError, NotSharing, RegionError
from xinference_xavier.index import Index
from xinference_xavier.limits import START_DEADLINE
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import (
    ROW_ALIGNMENT,
    Memory,
    Region,
    populate,
    promised_bytes,
    receive_region,
    serve_region,
)
from xinference_xavier.pool.window import Window, WindowServer
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.replica import Engine, Replica
from xinference_xavier.runtime.host import free_memory

logger = logging.getLogger(__name__)

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
    stages: list[Described]  # of the pipeline, each from `describe_pages`
    cells: Sequence[int]  # bytes of each worker's cell
    cache_rows: int  # that would hold the whole KV cache


class XavierSpec(OffloadingSpec):
    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return first_tokens.definitions()

    def __init__(
        self, facts: EngineFacts, layers: Mapping[str, torch.Tensor | list[torch.Tensor]] = {}
    ) -> None:
        """`layers` are a worker's KV caches."""
        super().__init__(facts.offloading)
        # Events that describe chunks would keep the tokens of each, until one says that it is gone.
        self.kv_events_config = OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        )
        self.replicated_layout = (
            facts.offloading.replicated_layout and current_platform.is_cuda_alike()
        )
        self.facts = facts
        self._layers = layers
        self._cell_bytes = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk  # its own
        self._closing = ExitStack()

    def close(self) -> None:
        """End what was made beside worker and manager."""
        self._closing.close()

    # -- a worker's side ----------------------------------------------------------------------

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        end_with_parent()  # it may have a process of its own
        rank = 0 if self.replicated_layout else self.config.parallel.rank
        stages = self._gather_stages(kv_caches)
        # A stage's workers have equal caches.
        each = 1 if self.replicated_layout else self.config.parallel.world_size // len(stages)
        cells = [cell_bytes for cell_bytes, _ in stages for _ in range(each)]
        row_bytes = -(-sum(cells) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        if self.config.parallel.rank == 0:
            described = [parts for _, parts in stages]
            window = self._create_region(row_bytes, kv_caches, cells, described)
        else:
            window = Window(self._receive(row_bytes))
        start, is_cpu = sum(cells[:rank]), current_platform.is_cpu()
        server = WindowServer(
            window,
            self.config.engine_id,
            self.config.parallel.rank,
            slice(start, start + cells[rank]),
            None if is_cpu else DevicePinning(),
        )
        self._closing.callback(server.close)
        if is_cpu:
            return HostWorker(kv_caches, window.array, self.blocks_per_chunk, start)
        return device_worker(kv_caches, self.blocks_per_chunk, DeviceRegion(window, rank, cells))

    def _gather_stages(self, kv_caches: CanonicalKVCaches) -> list[tuple[int, Described]]:
        """The bytes of a worker's cell, and what it has there, in each stage of the pipeline. Waits
        for the other stages, which vLLM gives their KV caches at the same time."""
        described = describe_pages(
            self.facts.groups, self._layers, kv_caches, self.blocks_per_chunk
        )
        stages = [(self._cell_bytes, described)]
        if self.config.parallel.pp_size > 1:
            stages *= self.config.parallel.pp_size
            torch.distributed.all_gather_object(stages, stages[0], group=get_pp_group().cpu_group)
        return stages

    def _create_region(
        self,
        row_bytes: int,
        kv_caches: CanonicalKVCaches,
        cells: Sequence[int],
        stages: list[Described],
    ) -> Window:
        """vLLM has its KV cache by now, which on the CPU platform takes host memory, too."""
        cache_rows = -(-len(kv_caches.tensors[0].tensor) // self.blocks_per_chunk)
        region = Region.create(self._rows(row_bytes, cache_rows), row_bytes)
        window = Window(region)
        # Engines that asked at the same moment see each other's regions now.
        self._rows(row_bytes, cache_rows, own=region.size)
        pages = identity.page_format(self.facts.vllm, self.facts.cache, self._layers)
        note = WorkerNote(pages, self.facts.prefix_caching, stages, cells, cache_rows)
        served = serve_region(region, self.config.engine_id, json.dumps(note).encode())
        self._closing.callback(served.close)
        logger.info(
            "pool created: chunks=%d chunk_bytes=%d cache_chunks=%d",
            region.rows,
            row_bytes,
            cache_rows,
        )
        own = window.array[: region.rows]
        if current_platform.is_cpu() and region.size > _POPULATE_AT_ONCE:
            work = partial(populate, own)
            threading.Thread(target=work, name="xavier-populate", daemon=True).start()
        else:  # a device's worker pins it next, which would allocate it on one thread
            _populate(region, own)
        return window

    def _rows(self, row_bytes: int, cache_rows: int, own: int = 0) -> int:
        """`rows_of` with the host's memory as it is now. Of what is promised, `own` bytes are this
        engine's."""
        memory = free_memory()
        return rows_of(
            self.facts.config,
            row_bytes=row_bytes,
            cache_rows=cache_rows,
            workers=self.config.parallel.world_size,
            free=memory.free,
            page_cache=memory.page_cache,
            promised=promised_bytes() - own,
        )

    def _receive(self, row_bytes: int) -> Region:
        region = receive_region(self.config.engine_id, START_DEADLINE)
        if region.row_bytes != row_bytes:
            raise RegionError(
                f"the first worker made rows of {region.row_bytes} bytes, but this process expects "
                f"{row_bytes}; start all workers of a replica with the same arguments and versions"
            )
        return region

    # -- the scheduler's side -----------------------------------------------------------------

    def get_manager(self) -> OffloadingManager:
        region = receive_region(self.config.engine_id, START_DEADLINE)
        note = WorkerNote(*json.loads(region.note))
        facts, config, vllm_config = self.facts, self.facts.config, self.facts.vllm
        # vLLM also switches it off itself, perhaps in its workers only. Then it computes prompts
        # with loaded rows wrongly.
        shares = facts.prefix_caching and note.prefix_caching
        if not shares:
            logger.warning("nothing is shared because prefix caching is off")
        fingerprint_fields = {
            **identity.fingerprint_fields(vllm_config, facts.cache, facts.chunk_tokens),
            "pages": note.pages,
            "cells": note.cells,
        }
        pool = Pool(region.rows)
        index = Index(Peers(self.config.engine_id))
        disk: Disk = NoDisk()
        if config.disk is not None and shares:
            disk = Disk(
                Path(config.disk),
                config.disk_bytes,
                config.model_uid,
                region,
                pool,
                saves_all=config.disk_save == "all",
                by_name=identity.known_by_name(fingerprint_fields),
            )
        tier = PeerTier(pool, index, disk)
        window = Window(region)
        sketcher = Sketcher(window.array, note.stages, note.cells, self.blocks_per_chunk)
        if not shares:
            requests = OwnRequests(None, NotSharing.NO_PREFIX_CACHING)
        elif unlocated := sketcher.unlocated:
            cannot = f"nothing says where KV-cache group {min(unlocated)} has numbers"
            requests = OwnRequests(None, cannot)
        else:
            requests = OwnRequests.at(vllm_config)
        probes = partial(
            Probes,
            requests=requests,
            sketcher=sketcher,
            pool=pool,
            chunk_tokens=facts.chunk_tokens,
            max_tokens=facts.longest_probe,
            vocabulary=vllm_config.model_config.get_vocab_size(),
            audits=config.audit and shares,
        )
        layout = facts.layout(self)
        manager = XavierManager(
            SchedulerFacts.for_region(facts, layout, region.row_bytes, shares),
            pool,
            tier,
            probes,
        )
        engine = Engine(
            PromptChunker(vllm_config, layout, self.config.cache.tokens_per_hash),
            cannot_compare=requests.cannot,
            stats=manager.stats,
            load=manager.workload.load,
            work_on_probes=manager.probes.work,
            prompts=manager.workload.prompts,
            answers=manager.workload.answers,
            computed=manager.workload.computed,
            marked=manager.workload.marked,
            finished=manager.finished,
        )
        replica = Replica(
            config,
            engine=engine,
            tier=tier,
            namespace=identity.digest(fingerprint_fields),
            key_bytes=identity.key_bytes(vllm_config),
            window=window,
            workers=self.config.parallel.world_size,
            cache_rows=note.cache_rows,
            fingerprint_fields=identity.readable(fingerprint_fields),
            not_sharing=None if shares else NotSharing.NO_PREFIX_CACHING,
        )
        self._closing.callback(replica.stop)
        replica.start()
        end_with_parent()
        return manager


def _populate(region: Region, rows: Memory) -> None:
    """Allocate the region while vLLM waits, and say so: a large one takes minutes."""
    began = time.monotonic()
    logger.info("vLLM waits until the pool is allocated: bytes=%d", region.size)
    populate(rows, lambda: region.allocated < _POPULATE_AT_ONCE)
    seconds = (time.monotonic() - began) * region.size / region.allocated
    patience = envs.VLLM_ENGINE_READY_TIMEOUT_S
    if seconds > patience:
        logger.warning(
            "vLLM may give up before the pool is allocated, which takes about %.0f s: use a "
            "smaller xavier_pool_bytes, or set VLLM_ENGINE_READY_TIMEOUT_S to more than %d",
            seconds,
            patience,
        )
    populate(rows)
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
    # Mapped by the workers of all engines here, its own engine and its own transfer process.
    mappings = workers * here + 2
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
