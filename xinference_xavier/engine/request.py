"""The state of a request from arrival to end, and the fetches that requests wait for.

Belongs to the scheduler thread. A fetch's rows stay pinned until no request waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import ReqContext

from xinference_xavier.engine.adapters import Look, salted
from xinference_xavier.engine.compat import key_positions
from xinference_xavier.engine.costs import CostModel
from xinference_xavier.engine.waiting import Wait
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.tier import Fetch, FetchState

if TYPE_CHECKING:
    from xinference_xavier.engine.probes import Probe

GROUP = slice(-4, None)
"""The part of an offload key that is the number of its KV-cache group."""
MAX_DONORS = 3
"""That may fail a request before it is computed."""


@dataclass(eq=False, slots=True)
class Request:
    context: ReqContext
    prefix_tokens: int = 0  # at its start that vLLM has in its own cache
    reuses: bool = False  # blocks of vLLM's own cache, perhaps
    prompt_tokens: int = 0  # with answered ones before a preemption; 0 before its lookups
    missing: int = 0  # of them, still to compute
    reported: bool = False  # to routers
    fetches: list[Fetch] = field(default_factory=list)  # that it waits for, in order of their rows
    first: set[bytes] = field(default_factory=set)  # keys that get a RETRY: see `waits_for`
    counted: bool = True  # its prompt tokens, since it was last looked up
    computes_missing: bool = False  # what nobody holds, with no more to ask in this pass
    deadline: float | None = None  # of all its fetches
    pending_since: float = 0.0  # on the clock of `Steps.idle_time`
    given_up: bool = False  # no further fetches
    computes: bool = False  # chunks that it could have fetched
    failed: set[str] = field(default_factory=set)  # donors that it is not fetched from again
    fetched: set[bytes] = field(default_factory=set)  # keys that arrived from a peer for it
    trace_headers: Mapping[str, str] | None = None
    excluded: bool = False  # neither stores nor loads anything
    stale: bool = False  # vLLM may have computed its blocks with other weights
    adapter: Look | None = None
    probe: Probe | None = None  # that it computes
    asked: bool = False  # the tracker, whether a peer computes its prefix
    wait: Wait | None = None  # for that peer, even if it is over
    groups: dict[bytes, list[bytes]] | None = None  # see `DonorSelection.groups_of`

    @property
    def req_id(self) -> str:
        req_id: str = self.context.req_id
        return req_id

    @property
    def shares(self) -> bool:
        """Whether its rows may be stored and loaded: not while its adapter's content is unknown."""
        known = self.adapter is None or self.adapter.digest is not None
        return known and not self.excluded

    @property
    def stores(self) -> bool:
        """Whether its blocks may be stored: they must be its own weights' and its own adapter's."""
        replaced = self.adapter is not None and self.adapter.replaces
        return self.shares and not (self.stale or (replaced and self.reuses))

    def row_key(self, key: bytes) -> bytes:
        """The pool's key for vLLM's `key`. Call it only if the request `shares`."""
        digest = None if self.adapter is None else self.adapter.digest
        return key if digest is None else salted(key, digest)

    def row_keys(self) -> list[bytes]:
        """The pool's keys of the request's chunks, group by group; empty before its lookups."""
        keys = key_positions(self.context) if self.shares else {}
        return [*keys] if self.adapter is None else [self.row_key(key) for key in keys]

    def looked_up(self, prefix_tokens: int, reuses: bool, stale: bool) -> None:
        """vLLM is about to look the request up: in its own cache it has `prefix_tokens` of it, and
        perhaps a part of the next block. These may be `stale`; it has no others."""
        self.prefix_tokens = prefix_tokens
        self.reuses, self.stale = reuses, reuses and stale
        self.counted = self.computes_missing = False
        self.groups = None  # it may have more keys than at the last time

    @property
    def pending(self) -> Fetch | None:
        """The first fetch that has not ended. None if a fetch before it failed: chunks behind a gap
        are useless."""
        committed = FetchState.COMMITTED
        fetch = next((fetch for fetch in self.fetches if fetch.state is not committed), None)
        return fetch if fetch is not None and fetch.state is FetchState.PENDING else None

    def waits_for(self, fetches: list[Fetch]) -> None:
        """Wait for `fetches`, in the order of their rows. Until they end, the first chunk of each
        group in each of them gets a RETRY."""
        self.fetches = fetches
        for fetch in fetches:
            self.first |= self.first_of_each_group(row.key for row in fetch.rows)

    def first_of_each_group(self, keys: Iterable[bytes]) -> set[bytes]:
        """Of those that `groups` has."""
        first: dict[bytes, bytes] = {}
        for key in keys:
            first.setdefault(key[GROUP], key)
            if len(first) == len(self.groups or ()):
                break
        return set(first.values())

    def conclude(self) -> None:
        """Stop waiting: chunks that arrived are HITs. The others are MISSes unless another donor
        has them."""
        for fetch in self.fetches:
            self.fetched.update(row.key for row in fetch.committed)
            if fetch.state is not FetchState.COMMITTED:
                self.failed.add(fetch.source)
        self.given_up |= len(self.failed) >= MAX_DONORS
        self.fetches = []


class Fetches:
    """The fetches under way, and the requests that wait for each."""

    def __init__(self, pool: Pool, cost_model: CostModel, patience: float) -> None:
        """Rows stay pinned for their requests until `patience` seconds after the deadline."""
        self._pool = pool
        self._cost_model = cost_model
        self._patience = patience
        self._waiting: dict[Fetch, set[str]] = {}
        self.by_chunk: dict[bytes, Fetch] = {}
        """The fetch that brings a chunk, has just brought it, or has just failed to."""

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def bringing(self, key: bytes) -> Fetch | None:
        """The fetch that brings `key`, or has just brought it."""
        fetch = self.by_chunk.get(key)
        return None if fetch is None or fetch.state is FetchState.ROLLED_BACK else fetch

    def bringing_run(self, keys: Iterable[bytes]) -> list[Fetch]:
        """The fetches that bring the leading `keys`, up to the first gap."""
        found: dict[Fetch, None] = {}
        for key in keys:
            fetch = self.bringing(key)
            if fetch is None:
                break
            found[fetch] = None
        return list(found)

    def pending(self) -> Iterator[Fetch]:
        """The fetches that have not ended."""
        return (fetch for fetch in self if fetch.state is FetchState.PENDING)

    def by_source(self) -> Counter[str]:
        """The number of pending fetches per source."""
        return Counter(fetch.source for fetch in self.pending())

    def add(self, fetch: Fetch, is_probe: bool = False) -> None:
        """Requests find the fetch, unless it is a probe."""
        self._waiting[fetch] = set()
        if not is_probe:
            self.by_chunk.update(dict.fromkeys([row.key for row in fetch.rows], fetch))

    def wait(self, req_id: str, fetch: Fetch) -> None:
        self._waiting[fetch].add(req_id)

    def stop_waiting(self, req_id: str) -> None:
        for waiting in self._waiting.values():
            waiting.discard(req_id)

    def reset(self) -> None:
        """Requests neither wait for the pending fetches any more nor find them."""
        self.by_chunk.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def settle(self, now: float) -> None:
        """Learn from ended fetches, and unpin their rows once no request waits for them."""
        for fetch, waiting in list(self._waiting.items()):
            if fetch.state is FetchState.PENDING:
                continue
            self._cost_model.ended(fetch, now)
            for row in fetch.rows:
                if self.by_chunk.get(row.key) is fetch:
                    del self.by_chunk[row.key]
            # A waiting request takes its rows at once, unless vLLM has no blocks for it.
            if not waiting or now > fetch.deadline + self._patience:
                self._pool.unpin(fetch.committed)
                del self._waiting[fetch]
