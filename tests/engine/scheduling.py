"""Both sides of a manager without an engine: vLLM's scheduler above it, a scripted tier below.

`Scheduling` calls the manager in the order in which vLLM's offloading scheduler does. Pool and
index are real. `ScriptedTier` replaces what talks to other processes, so that a test decides when
and how a fetch ends.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from tests.harness.comparisons import compared, compared_index, snapshot
from xinference_xavier.engine.audits import CanAudit
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.keys import Group, Layout
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.probes import OwnRequests, Probes
from xinference_xavier.engine.workload import Step
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.load import Serving
from xinference_xavier.replica.fetcher import Fetch, FetchState
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.tracker_client import Claim

CHUNK = 128
"""Tokens per chunk."""

FETCH_TIMEOUT = 5.0
ROW_BYTES = 1 << 20
SERVING = Serving(CHUNK, ROW_BYTES, mark_key="secret")
KEY_BYTES = 36


def layout_of(*groups: Group) -> Layout:
    """A layout whose groups have the numbers 0, 1 and so on."""
    return Layout(CHUNK, {number.to_bytes(4): group for number, group in enumerate(groups)})


ONE_GROUP = layout_of(Group(CHUNK))


def chunks(prompt: str, count: int, group: int = 0) -> list[OffloadKey]:
    """The keys of a prompt's first chunks in one group; equal prompts have equal keys."""
    hashes = [hashlib.sha256(f"{prompt}/{number}".encode()).digest() for number in range(count)]
    return [make_offload_key(block_hash, group) for block_hash in hashes]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedTier(PeerTier):
    """Records what it is asked for. The test ends its fetches, in the ways in which a `Fetcher`
    does."""

    def __init__(self, pool: Pool, name: str) -> None:
        disk: Any = SimpleNamespace(index={})
        super().__init__(pool, compared_index(name), disk)
        self.host_disk = disk
        self.is_ready = True
        self.listening = True
        self.forget()

    def forget(self) -> None:
        """What it was asked for so far."""
        self.stored_rows: list[Row] = []
        self.evicted_keys: list[bytes] = []
        self.fetches: list[Fetch] = []
        self.claims: list[Claim] = []
        self.released: list[Claim] = []
        self.weights_versions: list[str] = []

    @property
    def reaches_peers(self) -> bool:
        return self.is_ready

    @property
    def sharing(self) -> bool:
        return self.is_ready

    def on_stored(self, rows: Sequence[Row]) -> None:
        self.stored_rows += rows

    def rejoin(self, weights_version: str) -> None:
        self.weights_versions.append(weights_version)

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        self.evicted_keys += keys

    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        if not self.listening:
            return super().submit_load(source, rows, deadline)
        fetch = Fetch(source, rows, deadline)
        self.fetches.append(fetch)
        return fetch

    def claim(self, keys: Sequence[bytes], seconds: float) -> Claim | None:
        if not (self.is_ready and self.peers.enabled and self.peers.members):
            return None
        self.claims.append(Claim(keys, seconds))
        return self.claims[-1]

    def release_claim(self, claim: Claim) -> None:
        self.released.append(claim)

    def reset(self) -> None:
        self.pool.reset()

    # -- what peers do ------------------------------------------------------------------------

    def peers_hold(self, disk: Iterable[bytes] = (), **holdings: Iterable[bytes]) -> None:
        """These incarnations hold these chunks, and no others hold any; and so the disk."""
        self.host_disk.index = tuple(disk)
        self.index.apply(snapshot(*map(compared, holdings), **holdings))

    def only_hold(self, **holdings: Iterable[bytes]) -> None:
        """Like `peers_hold`, but who was there before stays, and holds nothing."""
        self.peers_hold(**dict.fromkeys(self.peers.members, ()) | holdings)

    def end(
        self,
        fetch: Fetch,
        arrived: int | None = None,
        seconds: float = 0.01,
        transport: str = "gloo",
    ) -> None:
        """The first `arrived` rows arrived (default: all), and the rest will not."""
        fetch.seconds, fetch.transport = seconds, transport
        rows = fetch.rows if arrived is None else fetch.rows[:arrived]
        fetch.committed = [row for row in rows if self.pool.commit(row, checksum=1, pins=1)]
        complete = len(fetch.committed) == len(fetch.rows)
        fetch.state = FetchState.COMMITTED if complete else FetchState.ROLLED_BACK
        fetch.ended.set()
        for row in fetch.rows:
            self.pool.abort(row)

    def abandon(self, fetch: Fetch) -> None:
        """The fetch ends by its deadline, but its rows may still be written until `drain`."""
        for row in fetch.rows:
            self.pool.quarantine(row)
        fetch.state = FetchState.ROLLED_BACK
        fetch.ended.set()

    def drain(self, fetch: Fetch) -> None:
        """Nobody can write the rows of an abandoned fetch any more."""
        for row in fetch.rows:
            self.pool.abort(row)


class Request:
    """A request of vLLM's, as its keys by KV-cache group."""

    def __init__(self, req_id: str, *groups: Sequence[OffloadKey]) -> None:
        self.groups = groups
        self.context = ReqContext(req_id=req_id)
        for keys in groups:  # as vLLM records them before a request's first lookup
            for number, key in enumerate(keys):
                self.context.set_offload_key_position(key, (number + 1) * CHUNK)

    @property
    def req_id(self) -> str:
        return self.context.req_id

    @property
    def keys(self) -> Sequence[OffloadKey]:
        return self.groups[0]


def without_requests(
    pool: Pool,
    can_audit: CanAudit,
    *,
    chunk_tokens: int = CHUNK,
    max_tokens: int = 4 * CHUNK,
    vocabulary: int = 1000,
    audits: bool = False,
) -> Probes:
    """Probes that are never computed. Nothing is sampled."""
    return Probes(
        can_audit,
        OwnRequests(None, "a test"),
        Mock(),
        pool,
        chunk_tokens=chunk_tokens,
        max_tokens=max_tokens,
        vocabulary=vocabulary,
        audits=audits,
    )


FACTS = SchedulerFacts(
    layout=ONE_GROUP,
    serving=SERVING,
    row_bytes=ROW_BYTES,
    step_tokens=CHUNK,
    min_fetch_tokens=2 * CHUNK,
    adaptive=False,
    fetch_timeout=FETCH_TIMEOUT,
)


class Scheduling:
    """A manager over a pool of `slots` rows, and vLLM's scheduler above it."""

    def __init__(
        self,
        slots: int = 32,
        facts: SchedulerFacts = FACTS,
        name: str = "own",
        probes: Callable[[Pool, CanAudit], Probes] = without_requests,
        **other_facts: Any,
    ) -> None:
        self.pool = Pool(slots)
        self.tier = ScriptedTier(self.pool, name)
        self.clock = Clock()
        self.manager = XavierManager(
            replace(facts, **other_facts),
            self.pool,
            self.tier,
            partial(probes, self.pool),
            self.clock,
        )

    def arrive(self, req_id: str, *groups: Sequence[OffloadKey]) -> Request:
        request = Request(req_id, *groups)
        self.manager.on_new_request(request.context)
        return request

    def ask(self, count: int, req_id: str = "r", **held: int) -> Request:
        """A request arrives for a prompt of `count` chunks. Peers hold as many of its first chunks
        as `held` says, and nothing else."""
        keys = chunks("prompt", count)
        self.tier.peers_hold(**{peer: keys[:number] for peer, number in held.items()})
        return self.arrive(req_id, keys)

    def begin_step(
        self, tokens: int, prompts: dict[str, int] | None = None, depth: float = 0.0
    ) -> None:
        """The engine computes it until `manager.steps.end`."""
        of_prompts = prompts or {}
        prompt_tokens = sum(of_prompts.values())
        requests = len(of_prompts) + tokens - prompt_tokens
        self.manager.steps.begin(
            Step(self.clock(), tokens, of_prompts, prompt_tokens, depth, requests)
        )

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def scan(self, request: Request, own_prefix: int = 0, **asked: Any) -> int | None:
        """One scheduling attempt with full attention: the number of hits after `own_prefix` chunks.

        None defers the request. `asked` is for `begin_lookups`. The caller ends the step with
        `end_step`.
        """
        if not self.manager.begin_lookups(request.req_id, own_prefix * CHUNK, **asked):
            return None
        return prefix_scan(self.manager.lookup, request.keys[own_prefix:], request.context)

    def attempt(self, request: Request, own_prefix: int = 0, **asked: Any) -> int | None:
        """`scan`, in a step of its own."""
        hits = self.scan(request, own_prefix, **asked)
        self.end_step()
        return hits

    def schedule(self, request: Request, hits: int, own_prefix: int = 0) -> list[int]:
        """vLLM has blocks for the request. Returns the slots that it loads from."""
        slots = []
        if hits:
            keys = request.keys[own_prefix : own_prefix + hits]
            spec = self.manager.prepare_load(keys, request.context)
            assert isinstance(spec, BlockIDsLoadStoreSpec)
            slots = spec.block_ids.tolist()
        self.manager.count_prompt(request.req_id, len(request.keys) * CHUNK, hits * CHUNK)
        return slots

    def loaded(self, request: Request, hits: int, own_prefix: int = 0) -> None:
        keys = request.keys[own_prefix : own_prefix + hits]
        self.manager.complete_load(set(keys), request.context)

    def fetch_and_finish(self, request: Request, seconds: float = 0.01) -> None:
        """All chunks of the request are fetched in so many seconds, and it ends."""
        assert self.attempt(request) is None
        self.tier.end(self.tier.fetches[-1], seconds=seconds)
        assert self.attempt(request) == len(request.keys)
        self.finish(request)
        self.end_step()

    def load_and_finish(self, request: Request, hits: int) -> None:
        """vLLM has blocks for the request, loads its hits and ends it."""
        self.schedule(request, hits)
        self.end_step()
        self.loaded(request, hits)
        self.finish(request)

    def begin_store(self, request: Request, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        output = self.manager.prepare_store(keys, request.context)
        assert output is not None, "None makes vLLM warn at every step"
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        assert len(output.store_spec.block_ids) == len(output.keys_to_store)
        return output.keys_to_store

    def stored(self, request: Request, keys: Iterable[OffloadKey]) -> None:
        self.manager.complete_store(set(keys), request.context)

    def finish(self, request: Request) -> None:
        self.manager.on_request_finished(request.context)

    def fill(self, keys: Sequence[OffloadKey]) -> None:
        """A request arrives, computes and stores these chunks, and ends."""
        request = self.arrive(f"fill-{keys[0].hex()}", keys)
        self.stored(request, self.begin_store(request, keys))
        self.finish(request)


def prefix_scan(
    lookup: Callable[[OffloadKey, ReqContext], LookupResult],
    keys: Iterable[OffloadKey],
    context: ReqContext,
) -> int | None:
    """vLLM's lookups for a full-attention group: the number of leading hits."""
    hits, deferred = 0, False
    for key in keys:
        answer = lookup(key, context)
        if answer is LookupResult.MISS:
            break
        if answer is LookupResult.HIT:
            hits += 1
        else:
            deferred = True
    return None if deferred else hits


def window_scan(
    lookup: Callable[[OffloadKey, ReqContext], LookupResult],
    keys: Sequence[OffloadKey],
    window: int,
    context: ReqContext,
) -> int | None:
    """vLLM's lookups for a sliding-window group: where the last run of `window` hits ends."""
    run, deferred = 0, False
    for start in reversed(range(len(keys))):
        answer = lookup(keys[start], context)
        run = run + 1 if answer is LookupResult.HIT else 0
        deferred |= answer is LookupResult.RETRY
        if run == window:
            return None if deferred else start + window
    return None if deferred else run


def waiting(vllm: Scheduling, count: int = 6) -> Request:
    """A request that waits while all its chunks are fetched from the peer `a`."""
    request = vllm.ask(count, a=count)
    assert vllm.attempt(request) is None
    assert len(vllm.tier.fetches) == 1
    return request


def slow_engine(**facts: Any) -> Scheduling:
    """Computes one chunk per second and two per step. Its only peer holds nothing."""
    vllm = Scheduling(step_tokens=2 * CHUNK, **facts)
    vllm.tier.peers_hold(a=[])
    vllm.manager.prefill_rate.add(1000, 1000 / CHUNK)
    return vllm


def waiting_for_prefill(vllm: Scheduling, keys: Sequence[OffloadKey]) -> Request:
    """A request that waits because a peer is computing `keys`."""
    request = vllm.arrive("r", keys)
    assert vllm.attempt(request) is None
    vllm.tier.claims[0].held_by_peer = len(keys)
    assert vllm.attempt(request) is None
    return request


def assert_unused(pool: Pool) -> None:
    counts = pool.counts()
    assert (counts.pinned, counts.filling, counts.quarantined) == (0, 0, 0)


def assert_nothing_left(vllm: Scheduling) -> None:
    assert_unused(vllm.pool)
    assert not vllm.manager.has_pending_work()
