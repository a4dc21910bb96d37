"""A request's state from arrival to end, and the fetches that requests wait for.

Belongs to the scheduler thread. The rows of a fetch stay pinned until no request waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.kv_offload.base import ReqContext

from xinference_xavier.engine.compat import known_keys
from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.prefill_wait import Wait
from xinference_xavier.pool.pool import Pool
from xinference_xavier.tiers.base import Fetch, FetchState

GROUP = slice(-4, None)
"""The part of an offload key that numbers its KV-cache group."""


class Request:
    __slots__ = (
        "asked",
        "computes",
        "context",
        "deadline",
        "fetched",
        "fetches",
        "first",
        "given_up",
        "pending_since",
        "trace_headers",
        "wait",
        "wanted",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.wanted: list[bytes] = []  # this pass's RETRYs, to be fetched
        self.fetches: list[Fetch] = []  # pending for this request, in the order of their rows
        self.first: set[bytes] = set()  # the first chunk of each group in each fetch
        self.deadline: float | None = None  # of all its fetches together
        self.pending_since = 0.0  # on the clock of `Steps.idle_time`
        self.given_up = False  # it fetches nothing more
        self.computes = False  # it computes chunks that it could have fetched
        self.fetched: set[bytes] = set()  # keys that arrived from a peer for this request
        self.trace_headers: Mapping[str, str] | None = None
        self.asked = False  # whether a peer computes its prefix
        self.wait: Wait | None = None  # for that peer; kept when it is over

    @property
    def req_id(self) -> str:
        req_id: str = self.context.req_id
        return req_id

    def group_of(self, key: bytes) -> list[bytes]:
        """The keys of its chunks in the KV-cache group of `key`, in order."""
        return [other for other in known_keys(self.context) if other[GROUP] == key[GROUP]]

    @property
    def pending(self) -> Fetch | None:
        """The first fetch that has not ended; None if a fetch before it failed, since chunks after
        a gap are useless."""
        committed = FetchState.COMMITTED
        fetch = next((fetch for fetch in self.fetches if fetch.state is not committed), None)
        return fetch if fetch is not None and fetch.state is FetchState.PENDING else None

    def waits_for(self, fetches: list[Fetch]) -> None:
        """Wait for `fetches`, which are in the order of their rows. Until they end, only the keys
        in `first` get a RETRY."""
        self.fetches = fetches
        self.first = _first_of_each_group(self.wanted).union(
            *(_first_of_each_group(row.key for row in fetch.rows) for fetch in fetches)
        )

    def conclude(self) -> None:
        """Stop waiting: chunks that arrived are HITs, all others are MISSes."""
        for fetch in self.fetches:
            self.fetched.update(row.key for row in fetch.committed)
            self.given_up |= fetch.state is not FetchState.COMMITTED
        self.fetches = []


def _first_of_each_group(keys: Iterable[bytes]) -> set[bytes]:
    first: dict[bytes, bytes] = {}
    for key in keys:
        first.setdefault(key[GROUP], key)
    return set(first.values())


class Fetches:
    """The fetches under way, and the requests that wait for each."""

    def __init__(self, pool: Pool, cost_model: CostModel, patience: float) -> None:
        """Rows stay pinned for their request until `patience` seconds after the deadline."""
        self._pool = pool
        self._cost_model = cost_model
        self._patience = patience
        self._waiting: dict[Fetch, set[str]] = {}
        self._by_chunk: dict[bytes, Fetch] = {}

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def bringing(self, key: bytes) -> Fetch | None:
        """The fetch that is bringing `key` or has just brought it."""
        fetch = self._by_chunk.get(key)
        return None if fetch is None or fetch.state is FetchState.ROLLED_BACK else fetch

    def bringing_run(self, keys: Iterable[bytes]) -> list[Fetch]:
        """The fetches that are bringing the leading `keys`, without a gap."""
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
        """How many fetches are pending."""
        return Counter(fetch.source for fetch in self.pending())

    def add(self, fetch: Fetch) -> None:
        self._waiting[fetch] = set()
        self._by_chunk.update((row.key, fetch) for row in fetch.rows)

    def wait(self, req_id: str, fetch: Fetch) -> None:
        self._waiting[fetch].add(req_id)

    def stop_waiting(self, req_id: str) -> None:
        for waiting in self._waiting.values():
            waiting.discard(req_id)

    def reset(self) -> None:
        """No request waits for a pending fetch any more, and none finds it."""
        self._by_chunk.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def settle(self, now: float) -> None:
        """Learn from ended fetches, and unpin their rows once no request waits for them."""
        for fetch, waiting in list(self._waiting.items()):
            if fetch.state is FetchState.PENDING:
                continue
            self._cost_model.ended(fetch)
            for row in fetch.rows:
                if self._by_chunk.get(row.key) is fetch:
                    del self._by_chunk[row.key]
            # A waiting request comes for its rows at once, unless vLLM has no blocks for it.
            if not waiting or now > fetch.deadline + self._patience:
                self._pool.unpin(fetch.committed)
                del self._waiting[fetch]
