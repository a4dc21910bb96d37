"""The state of a request from arrival to end, and vLLM's jobs for requests.

| phase     | a lookup of a chunk that the pool lacks  | left for                                  |
|-----------|------------------------------------------|-------------------------------------------|
| LOOKING   | plans a fetch, or waits for a peer       | FETCHING: fetches began                   |
|           |                                          | COMPUTING: no peer holds or computes it   |
|           |                                          | POOL_ONLY: reset, error, its own probe    |
| FETCHING  | RETRY until the fetches end              | LOOKING: they ended                       |
|           |                                          | POOL_ONLY: too many donors failed; reset  |
| COMPUTING | MISS, unless a peer holds it by now      | LOOKING: a later pass, or a peer holds it |
|           |                                          | POOL_ONLY: reset, error                   |
| POOL_ONLY | MISS                                     |                                           |

A request that waits for a peer stays LOOKING and has a `wait`, as it fetches what the peer has
computed meanwhile. Belongs to the scheduler thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import ReqContext

from xinference_xavier.engine.adapters import Look, salted
from xinference_xavier.engine.compat import key_positions
from xinference_xavier.engine.fetches import FetchPlan
from xinference_xavier.engine.keys import Layout
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.fetcher import Fetch, FetchState

if TYPE_CHECKING:
    from xinference_xavier.engine.probes import Probe
    from xinference_xavier.engine.waiting import Wait

MAX_DONORS = 3
"""Failed donors after which a request is computed."""


class Phase(Enum):
    """What a lookup of a chunk that the pool lacks does: see the module's docstring."""

    LOOKING = auto()
    FETCHING = auto()
    COMPUTING = auto()
    POOL_ONLY = auto()


@dataclass(eq=False, slots=True)
class Counted:
    """What statistics and routers have received of a request already."""

    prompt: bool = True  # its tokens, since it was last looked up
    reported: bool = False  # to routers
    declined: bool = False  # a fetch that does not pay


@dataclass(eq=False, slots=True)
class Attempt:
    """What the lookups of one pass have found out about a request."""

    is_planned: bool = False
    plan: FetchPlan | None = None  # if there is anything to fetch, or to probe
    deferred: set[bytes] = field(default_factory=set)  # the groups that defer it


@dataclass(eq=False, slots=True)
class Request:
    context: ReqContext
    layout: Layout
    phase: Phase = Phase.LOOKING
    prefix_tokens: int = 0  # at its start that vLLM has in its own cache
    reuses: bool = False  # blocks of vLLM's own cache, perhaps
    prompt_tokens: int = 0  # with answered ones before a preemption; 0 before its lookups
    missing: int = 0  # of them, still to compute
    answer_start: float = math.inf  # in tokens; known once it is scheduled
    source: str = ""  # of most of the prompt; empty before it is counted
    fetches: list[Fetch] = field(default_factory=list)  # while FETCHING, in order of their rows
    awaited: set[Fetch] = field(default_factory=set)  # what they bring stays until it is scheduled
    storing: dict[bytes, Row] = field(default_factory=dict)  # by vLLM's key: its workers write them
    loading: list[Row] = field(default_factory=list)  # its workers read them; pinned
    retry_keys: set[bytes] = field(default_factory=set)  # the chunks that defer the request
    deadline: float | None = None  # of all its fetches
    pending_since: float = 0.0  # on the clock of `Steps.idle_time`
    failed: set[str] = field(default_factory=set)  # donors that it is not fetched from again
    fetched: dict[bytes, str] = field(default_factory=dict)  # source of each key fetched for it
    salt: str | None = None  # vLLM's `cache_salt`
    excluded: bool = False  # neither stores nor loads anything
    stale: bool = False  # vLLM may have computed its blocks with other weights
    adapter: Look | None = None
    digest: bytes | None = None  # of the adapter, as last seen; its files may change at any time
    probe: Probe | None = None  # that it computes
    claim_asked: bool = False  # the tracker, whether a peer computes its prefix
    wait: Wait | None = None  # for that peer, even if it is over
    attempt: Attempt | None = None  # in this pass, since its first missing chunk
    counted: Counted = field(default_factory=Counted)
    _groups: dict[bytes, list[bytes]] | None = None

    @property
    def req_id(self) -> str:
        req_id: str = self.context.req_id
        return req_id

    # -- what it may share, and under which keys -----------------------------------------------

    @property
    def shares(self) -> bool:
        """True if its rows are stored and loaded. False while its adapter's content is unknown."""
        return (self.adapter is None or self.digest is not None) and not self.excluded

    @property
    def stores(self) -> bool:
        """True if its blocks are stored. They must come from its own weights and adapter."""
        replaced = self.adapter is not None and self.adapter.replaces
        return self.shares and not (self.stale or (replaced and self.reuses))

    def see_adapter(self) -> None:
        """Go by what is known of the adapter now. What a pass has found is loaded under the same
        keys."""
        self.digest = None if self.adapter is None else self.adapter.digest

    def row_key(self, key: bytes) -> bytes:
        """The pool's key for vLLM's `key`. Call it only if the request `shares`."""
        return key if self.digest is None else salted(key, self.digest)

    def row_keys(self) -> list[bytes]:
        """The pool's keys of the request's chunks, group by group; empty before its lookups."""
        keys = key_positions(self.context) if self.shares else {}
        return [*keys] if self.adapter is None else [self.row_key(key) for key in keys]

    def groups(self) -> dict[bytes, list[bytes]]:
        """The pool's keys of the request's whole chunks in order, by the number of their group."""
        if self._groups is None:
            groups = self.layout.whole_chunks(key_positions(self.context))
            if self.adapter is not None:
                groups = {each: [*map(self.row_key, keys)] for each, keys in groups.items()}
            self._groups = groups
        return self._groups

    def main_keys(self) -> list[bytes]:
        """The keys of the group with the highest rank."""
        return self.groups().get(self.layout.main, [])

    def ends(self) -> dict[bytes, int]:
        """How many tokens there are up to the end of each chunk of the group with the highest rank,
        by its key without the group."""
        keys = self.main_keys()
        size = self.layout.group(keys[0]).chunk_tokens if keys else 0
        return {key[: GROUP.start]: number * size for number, key in enumerate(keys, 1)}

    def first_of_each_group(self, keys: Iterable[bytes]) -> set[bytes]:
        """The first of `keys` in each of the request's groups."""
        first: dict[bytes, bytes] = {}
        for key in keys:
            first.setdefault(key[GROUP], key)
            if len(first) == len(self._groups or ()):
                break
        return set(first.values())

    # -- phases ------------------------------------------------------------------------------

    def looked_up(self, prefix_tokens: int, reuses: bool, stale: bool) -> None:
        """vLLM is about to look the request up: in its own cache it has `prefix_tokens` of it, and
        perhaps a part of the next block. These may be `stale`; it has no others."""
        self.prefix_tokens = prefix_tokens
        self.reuses, self.stale = reuses, reuses and stale
        self.counted.prompt = False
        self._groups = None  # it may have more keys than at the last time
        self.resume_lookup()

    def resume_lookup(self) -> None:
        """There may be something to fetch after all."""
        if self.phase is Phase.COMPUTING:
            self.phase = Phase.LOOKING

    def mark_computing(self) -> None:
        """No peer holds or computes what is missing: the rest of this pass is MISS."""
        if self.phase is Phase.LOOKING:
            self.phase = Phase.COMPUTING

    def wait_for(self, fetches: list[Fetch]) -> None:
        """Wait for `fetches`, in the order of their rows. Until they end, the first chunk of each
        group in each of them gets a RETRY."""
        self.phase, self.fetches = Phase.FETCHING, fetches
        self.awaited.update(fetches)
        for fetch in fetches:
            self.retry_keys |= self.first_of_each_group(row.key for row in fetch.rows)

    def is_deferred(self, key: bytes) -> bool:
        """True if a chunk of the key's group got a RETRY in this pass."""
        return self.attempt is not None and key[GROUP] in self.attempt.deferred

    def has_time(self, now: float) -> bool:
        """True if it may still wait for fetches."""
        return self.deadline is None or now < self.deadline

    @property
    def pending(self) -> Fetch | None:
        """The first fetch that has not ended. None if a fetch before it failed: chunks behind a gap
        are useless."""
        committed = FetchState.COMMITTED
        fetch = next((fetch for fetch in self.fetches if fetch.state is not committed), None)
        return fetch if fetch is not None and fetch.state is FetchState.PENDING else None

    def conclude(self) -> None:
        """Stop waiting for fetches: chunks that arrived are HITs. The others are MISSes unless
        another donor has them."""
        for fetch in self.fetches:
            self.fetched |= {row.key: fetch.source for row in fetch.committed}
            if fetch.state is not FetchState.COMMITTED:
                self.failed.add(fetch.source)
        self.fetches = []
        if self.phase is Phase.FETCHING:
            self.phase = Phase.POOL_ONLY if len(self.failed) >= MAX_DONORS else Phase.LOOKING

    def stop_fetching(self) -> None:
        """Compute whatever the pool lacks, from now on."""
        self.phase = Phase.POOL_ONLY

    def reset(self) -> None:
        """The chunks that it waits for are void: it computes instead."""
        self.stale = True
        if self.fetches or self.wait is not None:
            self.stop_fetching()
        self.fetches = []
        self.awaited.clear()


class Jobs:
    """Rows that vLLM's workers are writing (stores) or reading (loads).

    After a reset vLLM no longer reports the jobs under way, so their rows stay in quarantine until
    a later job ends, as jobs of one direction end in order, or until a step that began with a flush
    of all jobs has ended.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._requests: dict[Request, None] = {}  # with jobs under way, perhaps after their end
        self._void: set[Row] = set()  # of the stores
        self._stale_stores: list[Row] = []
        self._stale_loads: list[Row] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def begin_store(self, request: Request, rows: Collection[tuple[bytes, Row]]) -> None:
        """`rows` come with vLLM's keys."""
        request.storing.update(rows)
        if rows:
            self._requests[request] = None

    def void_store(self, req_id: str, keys: Collection[bytes]) -> None:
        """These rows do not get their chunks' bytes."""
        for request in self._requests:
            if request.req_id == req_id:
                self._void.update(request.storing[key] for key in keys if key in request.storing)

    def take_store(self, request: Request, keys: Iterable[bytes]) -> list[Row]:
        """Like `end_store`, for rows that no lookup may find: they are quarantined until the caller
        aborts them."""
        rows = self.end_store(request, keys, True)
        self._pool.quarantine(*rows)
        return rows

    def end_store(self, request: Request, keys: Iterable[bytes], success: bool) -> list[Row]:
        """The rows that got their chunks' bytes, for the caller to commit. The others are free."""
        self.free_stale()
        rows = [request.storing.pop(key) for key in keys]
        self._job_ended(request)
        void = self._void.intersection(rows) if success else {*rows}
        self._void -= void
        self._pool.abort(*(row for row in rows if row in void))
        return [row for row in rows if row not in void]

    def begin_load(self, request: Request, rows: list[Row]) -> None:
        """`rows` must be pinned."""
        request.loading = rows
        self._requests[request] = None

    def end_load(self, request: Request) -> None:
        self.free_stale()
        self._pool.unpin(request.loading)
        request.loading = []
        self._job_ended(request)

    def _job_ended(self, request: Request) -> None:
        if not (request.storing or request.loading):
            self._requests.pop(request, None)

    def reset(self) -> None:
        """vLLM will not report the jobs under way."""
        for request in self._requests:
            self._stale_stores += request.storing.values()
            self._stale_loads += request.loading
            request.storing, request.loading = {}, []
        self._requests.clear()
        self._void.clear()

    def free_stale(self) -> None:
        """No job from before the last reset is under way any more."""
        self._pool.abort(*self._stale_stores)
        self._pool.unpin(self._stale_loads)
        self._stale_stores, self._stale_loads = [], []
