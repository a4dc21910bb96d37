"""One replica: vLLM's scheduler, both sides of our connector, pool, rows, copy jobs and disk.

Everything is real but the model, the peers, the clock and most threads. The copy threads run beside
the scheduler's; see `CopyJobs`. Whatever other threads and processes of a replica would do happens
when the simulation does it: between two steps, or between two calls of vLLM's into our manager
(`interrupt`).
"""

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.engine.scheduling import Clock, without_requests
from tests.engine.vllm_scheduler import NOBODY, Core, hasher_of, request_of, starts_of
from tests.simulation.adapters import AdapterFiles
from tests.simulation.contents import (
    BLOCK_TOKENS,
    LAYERS,
    Group,
    Layout,
    Numbers,
    Text,
    ages,
    contents,
    layout,
)
from tests.simulation.neighbours import Window
from tests.simulation.options import Options
from tests.simulation.peers import Peers
from tests.simulation.worker import CopyJobs, ModelRunner, WrongBytesError
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.engine import adapters as adapters_module
from xinference_xavier.engine import connector as connector_module
from xinference_xavier.engine import identity
from xinference_xavier.engine.adapters import salted
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.idle import IdleWait
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.pool.pool import Pool, Row, RowState
from xinference_xavier.pool.region import ROW_ALIGNMENT, Memory, Region

_LOADS = RequestStatus.WAITING_FOR_REMOTE_KVS


class Manager(XavierManager):
    """Calls `interrupt` before most of vLLM's calls, as other threads run meanwhile."""

    interrupt: Callable[[], None]
    check_loaded: Callable[[Sequence[bytes], LoadStoreSpec], None]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self.interrupt()
        return super().lookup(key, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self.interrupt()
        slots = super().prepare_load(keys, req_context)
        request = self.requests[req_context.req_id]
        self.check_loaded([request.row_key(key) for key in keys], slots)
        return slots

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self.interrupt()
        return super().prepare_store(keys, req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.interrupt()
        super().on_schedule_end(context)


class Asked(NamedTuple):
    """A request: its text with the whole answer, of which the first `prompt` tokens are asked."""

    req_id: str
    text: Text
    prompt: int
    answer: int


class Chunk(NamedTuple):
    """What a key of a pool stands for: the tokens of `text` up to `end`, in one group, computed
    with this `content` of an adapter."""

    text: Text
    end: int
    group: int
    content: int = 0


def _raise(_: str) -> None:
    """End the run by the error that is being handled."""
    raise


class _Batch(NamedTuple):
    step: SchedulerOutput
    sampled: dict[str, list[int]]
    output: list[ModelRunnerOutput]  # once the worker has computed it


class Replica:
    """`config` is vLLM's for some small model; `patch` undoes what this replaces in modules. Files
    are in the current folder."""

    def __init__(
        self,
        options: Options,
        config: VllmConfig,
        rng: random.Random,
        patch: pytest.MonkeyPatch,
        log: Callable[[str], None],
    ) -> None:
        self.options, self._rng, self.log = options, rng, log
        self.layout: Layout = layout(options.groups, options.blocks, options.window)
        self.clock = Clock()
        self.weights = 0
        self.oldest_allowed = 0
        """The weights that were there when all caches were last reset with success."""
        self.files = AdapterFiles()
        self.texts: dict[str, Text] = {}
        self.loras: dict[str, LoRARequest] = {}
        self.asked: dict[str, Asked] = {}
        self.chunks: dict[bytes, Chunk] = {}
        self.batches: deque[_Batch] = deque()
        self.sending: list[Row] = []  # pinned for a peer that copies them
        self.tokens = 0  # scheduled
        self._busy = False
        self._computing = False

        config = self._config(config)
        caches = self.layout.config
        self.region = Region.create(options.slots, ROW_ALIGNMENT)
        self.window = Window(self.region)
        self._row_numbers = LAYERS * options.chunk_blocks * BLOCK_TOKENS
        self.pool = Pool(options.slots)
        self.peers = Peers(
            self.pool,
            self.window,
            rng,
            patch,
            folder=Path("disk"),
            has_disk=options.disk is not None,
            saves_all=options.disk == "all",
            nearby=options.nearby,
            lent=options.lent,
            clock=self.clock,
            write=self._write,
            stored=self._check_stored,
            log=log,
        )

        def worker(spec: XavierSpec, pages: CanonicalKVCaches) -> OffloadingWorker:
            self.copy_jobs = CopyJobs(pages, self.window.array, spec.blocks_per_chunk)
            return self.copy_jobs

        def manager(spec: XavierSpec) -> OffloadingManager:
            groups = spec.facts.layout(spec)
            self.manager = Manager(
                replace(
                    SchedulerFacts.for_region(
                        spec.facts, groups, self.region.row_bytes, shares=True
                    ),
                    min_fetch_tokens=groups.chunk_tokens,
                    adaptive=options.adaptive,
                ),
                self.pool,
                self.peers,
                partial(without_requests, self.pool),
                self.clock,
            )
            self.manager.interrupt = self._interrupted
            self.manager.check_loaded = self._check_loaded
            patch.setattr(self.manager.errors, "caught", _raise)
            return self.manager

        patch.setattr(adapters_module, "DaemonThreads", self.peers.make_calls)
        patch.setattr(XavierSpec, "get_manager", manager)
        patch.setattr(XavierSpec, "get_worker", worker)
        patch.setattr(identity, "fingerprint_fields", lambda *_: {})
        patch.setattr(connector_module, "time", SimpleNamespace(monotonic=self.clock))
        # An idle engine gives the others time instead of waiting for them.
        patch.setattr(IdleWait, "wait", lambda *_: self._interrupted())

        kind = AsyncScheduler if options.batches > 1 else Scheduler
        self._core = Core(config, caches, kind)
        self.scheduler, self._hash_tokens = self._core.scheduler, self._core.hash_tokens
        self.connector = XavierConnector(deepcopy(config), KVConnectorRole.WORKER, caches)
        self.runner = ModelRunner(
            self.layout,
            self.connector,
            self.texts,
            self.loras,
            self.files,
            weights=lambda: self.weights,
            oldest_allowed=lambda: self.oldest_allowed,
        )
        self.connector.register_kv_caches(self.runner.kv_caches)
        workers: Any = self._core.model_executor
        workers.add_lora = self.runner.load_adapter
        self._hasher = hasher_of(config, self._hash_tokens)

    def _config(self, config: VllmConfig) -> VllmConfig:
        options, config = self.options, deepcopy(config)
        xavier = XavierConfig(
            "model",
            NOBODY,
            pool_bytes=1 << 26,
            chunk_tokens=options.chunk_blocks * BLOCK_TOKENS,
            audit=False,
        )
        config.kv_transfer_config = KVTransferConfig(**kv_transfer_config(xavier))
        config.cache_config.block_size = BLOCK_TOKENS
        config.cache_config.prefix_match_unit = options.hash_tokens
        config.cache_config.prefix_cache_retention_interval = options.retention
        if "recurrent" in options.groups:
            config.cache_config.mamba_cache_mode = "align"
        scheduling = config.scheduler_config
        scheduling.max_num_batched_tokens = options.step_tokens
        scheduling.max_num_seqs = options.running
        scheduling.async_scheduling = options.batches > 1
        return config

    def close(self) -> None:
        self.connector.shutdown()
        self.peers.close()
        self.window.close()
        self.region.close()

    # -- what clients do ----------------------------------------------------------------------

    def ask(self, asked: Asked) -> None:
        asked.text.continue_to(asked.prompt + asked.answer + 4)
        self.asked[asked.req_id], self.texts[asked.req_id] = asked, asked.text
        if asked.text.adapter is not None:
            self.loras[asked.req_id] = self.files.requests[asked.text.adapter]
        self.learn(asked.text)
        self.scheduler.add_request(
            self._request(asked.req_id, asked.text, asked.prompt, asked.answer)
        )

    def _request(self, req_id: str, text: Text, prompt: int, answer: int) -> Request:
        lora = None if text.adapter is None else self.files.requests[text.adapter]
        return request_of(
            req_id,
            text.tokens[:prompt],
            answer,
            self._hasher,
            cache_salt=text.salt,
            lora_request=lora,
        )

    def learn(self, text: Text) -> list[list[bytes]]:
        """Know what vLLM's keys of the text stand for. Returns those of whole chunks, by group."""
        hashes = self._request("", text, len(text.tokens), 1).block_hashes
        for number in range(len(self.layout.groups)):
            for place, block_hash in enumerate(hashes):
                key = make_offload_key(block_hash, number)
                self.chunks[key] = Chunk(text, (place + 1) * self._hash_tokens, number)
        hashes_per_chunk = self.options.chunk_blocks * BLOCK_TOKENS // self._hash_tokens
        return [
            [
                make_offload_key(each, number)
                for each in hashes[hashes_per_chunk - 1 :: hashes_per_chunk]
            ]
            for number in range(len(self.layout.groups))
        ]

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def stuck_in_vllm(self) -> str | None:
        """A request that vLLM up to 0.32 lets wait for ever, so that its client gives up: it was
        loaded, and now there is no block for the rest of it. When loads are begun, vLLM reserves
        too few blocks of sliding windows for those under way: it counts the ones that they have
        left behind as theirs (`SingleTypeKVCacheManager.get_num_blocks_to_allocate`)."""
        scheduler = self.scheduler
        if scheduler.running or "window" not in self.options.groups:
            return None
        for request in getattr(scheduler, "kv_holding_waiting", scheduler.waiting):
            if request.num_computed_tokens and request.status is not _LOADS:
                return str(request.request_id)
        return None

    def announce_adapter(self, name: str, in_place: bool) -> None:
        """vLLM loads what is in the files now, before any request needs it."""
        request = self.files.announce(name, in_place)
        self.log(f"{name} is {request.lora_int_id}: {self.files.read(request)} {in_place=}")
        for calls in self.peers.calls:
            calls.at_once = True
        self._core.add_lora(request)
        for calls in self.peers.calls:
            calls.at_once = False

    # -- what an engine does ------------------------------------------------------------------

    def schedule(self) -> None:
        step = self.scheduler.schedule()
        self.tokens += step.total_num_scheduled_tokens
        starts = starts_of(step)
        sampled = {}
        for req_id, count in step.num_scheduled_tokens.items():
            end = starts[req_id] + count
            goes_on = self.scheduler.requests[req_id].is_prefill_chunk
            sampled[req_id] = [] if goes_on else self.texts[req_id].tokens[end : end + 1]
        self.batches.append(_Batch(step, sampled, []))
        self.log(
            f"schedules {dict(step.num_scheduled_tokens)}"
            + (f" preempted {set(step.preempted_req_ids)}" if step.preempted_req_ids else "")
            + (f" finished {set(step.finished_req_ids)}" if step.finished_req_ids else "")
            + self._jobs_of(step)
        )

    @staticmethod
    def _jobs_of(step: SchedulerOutput) -> str:
        metadata: Any = step.kv_connector_metadata
        told = ""
        for kind, jobs in (("load", metadata.load_jobs), ("store", metadata.store_jobs)):
            for job_id, job in jobs.items():
                told += f"; {kind} {job_id} for {job.req_id}: {job.src_spec.block_ids.tolist()}"
                told += f" -> {job.dst_spec.block_ids.tolist()}"
        if metadata.jobs_to_flush:
            told += f"; flush {metadata.jobs_to_flush}"
        return told

    def compute(self) -> None:
        """The worker computes the oldest batch that it has not computed."""
        batch = next((batch for batch in self.batches if not batch.output), None)
        if batch is not None and not self._computing:
            self._computing = True
            batch.output.append(self.runner.execute(batch.step, batch.sampled))
            self._computing = False

    def take_output(self) -> None:
        """vLLM's scheduler gets the output of the oldest batch."""
        while not self.batches[0].output:
            self.compute()
        batch = self.batches.popleft()
        self.scheduler.update_from_output(batch.step, batch.output[0])

    def reset(self, connector: bool, running: bool) -> None:
        """The weights change. Unless vLLM refuses, its cache is reset for them, and with
        `connector` ours too."""
        try:
            done = self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError:  # requests load, or are still being computed
            self.log(f"reset refused: connector={connector} running={running}")
            return
        self.log(f"reset: connector={connector} running={running} -> {done}")
        if connector:
            self.weights += 1
            if done:
                self.oldest_allowed = self.weights

    def load_weights(self) -> None:
        """The weights change in place, and vLLM keeps its cache."""
        self._core.collective_rpc("reload_weights")
        self.weights += 1
        self.log(f"weights {self.weights} in place")

    # -- what other threads do ----------------------------------------------------------------

    def _interrupted(self) -> None:
        if not self._busy and self._rng.random() < self.options.interrupts:
            self.background()

    def background(self) -> None:
        """One of the things that happen on other threads and in other processes."""
        self._busy = True
        try:
            self._rng.choice(
                4 * [self._fetch]
                + 4 * [self._copy]
                + 3 * [self._call]
                + 2 * [self._use_rows]
                + 2 * [self._use_disk]
                + 2 * [self.peers.go_on_lending]
                + [self.compute, self._claim, self.peers.go_on_joining]
            )()
        finally:
            self._busy = False

    def _fetch(self) -> None:
        if self._rng.random() < self.options.transfers:
            self.peers.go_on(self.clock())

    def _copy(self) -> None:
        if self._rng.random() < self.options.copies:
            self.copy_jobs.go_on(self._rng.choice((1, 2, 40)))

    def _call(self) -> None:
        """Threads for slow calls go on."""
        if waiting := [calls for calls in self.peers.calls if calls.waiting]:
            for _ in range(self._rng.choice((1, 4))):
                self._rng.choice(waiting).run_one()
            self.peers.loop.go_on()

    def _use_disk(self) -> None:
        while self.manager.finished:
            self.peers.disk.used(self.manager.finished.popleft())
        if self._rng.random() < 0.5:
            self.peers.compute_canary(self.weights)
        self.peers.loop.go_on()

    def _claim(self) -> None:
        for claim in self.peers.claims:
            if claim.held_by_peer is None:
                claim.held_by_peer = self._rng.randrange(len(claim.keys) + 1)

    def _use_rows(self) -> None:
        """Peers copy some, and others get their checksums."""
        self._send(self._rng)
        for row in self.pool.rows():
            lacks = row.state is RowState.READY and row.checksum is None and not row.is_lent
            if lacks and self._rng.random() < 0.5:
                self.pool.set_checksum(row, self.region.checksum(row.slot, row.key))

    def _send(self, rng: random.Random) -> None:
        """A peer begins to copy a few rows, or has copied them."""
        if self.sending:
            for row in self.sending:
                self._check_row(row, "is sent")
            self.pool.unpin(self.sending)
            self.sending = []
        elif rows := self.pool.rows():
            wanted = [row.key for row in rng.sample(rows, min(3, len(rows)))]
            self.sending = self.pool.pin_shared(wanted)

    def flush(self) -> None:
        flushed = self.pool.flush(self.pool.rows())
        self.log(f"flushed {len(flushed)} rows")

    # -- rows ---------------------------------------------------------------------------------

    def _chunk(self, key: bytes) -> Chunk:
        """What a key of the pool stands for: it has the content of the adapter in it."""
        if key in self.chunks:
            return self.chunks[key]
        for content, digest in enumerate(self.files.digests[1:], 1):
            if (chunk := self.chunks.get(salted(key, digest))) is not None:
                return chunk._replace(content=content)
        raise WrongBytesError(f"{key.hex()} stands for nothing")

    def _view(self, key: bytes, row: Memory) -> tuple[Group, Numbers, Numbers]:
        """The key's group, the numbers in its row that the group uses, of shape (layers, tokens),
        and the hashes for which they should stand."""
        text, end, number, _ = self._chunk(key)
        group, size = self.layout.groups[number], self.options.chunk_blocks * BLOCK_TOKENS
        numbers: Numbers = row.view(np.uint64)[: self._row_numbers].reshape(LAYERS, -1)
        if group.is_recurrent:  # the last block's state
            return group, numbers[:, size - BLOCK_TOKENS][:, None], text.hashes(end - 1, end)
        first = (end - 1) // size * size  # the key may be that of a part of a chunk
        return group, numbers[:, : end - first], text.hashes(first, end)

    def _write(self, row: Memory, key: bytes, weights: int) -> None:
        """What the key stands for, computed with these weights."""
        group, numbers, hashes = self._view(key, row)
        numbers[:] = group.numbers(hashes, weights, self._chunk(key).content)

    def _check_row(self, row: Row, what: str, oldest: int = 0) -> None:
        group, found, hashes = self._view(row.key, self.window.array[row.slot])
        if group.faults(found, hashes):
            raise WrongBytesError(f"{row} {what}, but its bytes are not those of its key")
        if (computed := contents(found)) != {content := self._chunk(row.key).content}:
            raise WrongBytesError(
                f"{row} {what}, but was computed with contents {computed} of its adapter instead "
                f"of {content}"
            )
        if (age := int(ages(found).min())) < oldest:
            raise WrongBytesError(
                f"{row} {what}, but depends on weights {age}; its cache was reset for {oldest}"
            )

    def _check_stored(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._check_row(row, "was stored", self._oldest_row)

    def _check_loaded(self, keys: Sequence[bytes], slots: LoadStoreSpec) -> None:
        read: Any = slots
        for key, slot in zip(keys, read.block_ids.tolist(), strict=True):
            row = self.pool._held[key]
            assert row.slot == slot
            self._check_row(row, "is loaded", self._oldest_row)

    @property
    def _oldest_row(self) -> int:
        """The weights that a row may depend on: those that came with the connector's latest
        reset, even if vLLM did not reset its own cache then, because requests ran."""
        return self.weights

    def check_at_rest(self) -> None:
        """Nothing runs: nothing is held, half done or waited for."""
        counts, manager = self.pool.counts(), self.manager
        states = {
            "rows being filled": counts.filling,
            "rows pinned": counts.pinned,
            "slots in quarantine": counts.quarantined,
            "requests in the manager": len(manager.requests),
            "jobs in the manager": bool(manager._jobs),
            "fetches": len(manager.fetches),
            "rows that neighbours lend": sum(row.is_lent for row in self.pool.rows()),
            "rows that neighbours have granted": self.peers.granted,
            "deferred requests": len(manager.tier_lookup._attempts),
            "jobs of the worker": not self.copy_jobs.is_at_rest,
            "jobs in the worker's connector": len(self.connector._jobs),
            "requests in vLLM": len(self.scheduler.requests),
            "blocks in use": self.options.blocks
            - 1
            - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }
        if left := {what: count for what, count in states.items() if count}:
            raise AssertionError(f"nothing runs any more, but there are {left}")
        for row in self.pool.rows():
            self._check_row(row, "is at rest", self._oldest_row)
