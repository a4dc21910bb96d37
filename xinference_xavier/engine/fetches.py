"""The fetches under way.

Belongs to the scheduler thread. A fetch's rows stay pinned until no request waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xinference_xavier.engine.costs import CostModel
from xinference_xavier.engine.evictor import Evictor
from xinference_xavier.peers import Source
from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica.fetcher import Fetch, FetchState
from xinference_xavier.replica.peer_tier import PeerTier

if TYPE_CHECKING:
    from xinference_xavier.engine.request import Request


class FetchPlan(NamedTuple):
    """`keys` in the order of their tokens, to be divided equally among `donors`, the best first.

    Without donors, other fetches bring all of them. The request does not wait for a trial.
    """

    donors: list[Source]
    keys: list[bytes]
    prefill_seconds: float | None  # that the fetch saves; None if unknown
    is_trial: bool = False

    @property
    def in_place(self) -> bool:
        """True if the donor is a neighbour: then it is the only one."""
        return bool(self.donors) and self.donors[0].is_neighbour


class Fetches:
    def __init__(
        self,
        pool: Pool,
        tier: PeerTier,
        requests: Mapping[str, Request],
        evictor: Evictor,
        cost_model: CostModel,
        timeout: float,
        clock: Callable[[], float],
    ) -> None:
        """A request waits `timeout` seconds for its fetches, and their rows stay pinned for it as
        long after the deadline."""
        self.timeout = timeout
        self._pool = pool
        self._tier = tier
        self._requests = requests
        self._evictor = evictor
        self._cost_model = cost_model
        self._clock = clock
        self._pinning: dict[Fetch, None] = {}  # under way, or with rows that requests wait for
        self.by_chunk: dict[bytes, Fetch] = {}
        """The fetch that brings a chunk, has just brought it, or has just failed to."""

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._pinning)

    def __len__(self) -> int:
        return len(self._pinning)

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

    def can_bring(self, key: bytes) -> bool:
        """True if the chunk is on its way, or a source holds it."""
        is_held = self._tier.ready and self._tier.holders(key)
        return bool(is_held) or self.bringing(key) is not None

    def by_source(self) -> Counter[str]:
        """The number of pending fetches per source."""
        return Counter(fetch.source for fetch in self if fetch.state is FetchState.PENDING)

    def begin(
        self, plan: FetchPlan, prefix: Sequence[bytes], deadline: float | None
    ) -> list[Fetch]:
        """One fetch from each donor. What is copied takes room in the pool, as far as there is any
        without evicting the `prefix`. Requests find them, unless they are trials."""
        now = self._clock()
        latest = now + self.timeout if deadline is None else deadline
        if plan.in_place:
            rows = self._pool.borrow(plan.keys)
        else:
            rows = self._evictor.reserve(plan.keys, prefix).rows
        parts = min(len(plan.donors), len(rows))
        begun: list[Fetch] = []
        handed_over = 0
        try:
            for part, donor in enumerate(plan.donors[:parts]):
                share = rows[handed_over : len(rows) * (part + 1) // parts]
                for row in share:
                    row.origin = row.replicated_from = donor.name
                limit = min(latest, now + donor.patience(len(share), now))
                handed_over += len(share)
                fetch = self._tier.submit_load(donor.name, share, limit)
                if fetch is not None:
                    self._pinning[fetch] = None
                    if not plan.is_trial:
                        self.by_chunk.update(dict.fromkeys([row.key for row in share], fetch))
                    self._cost_model.begun(fetch, donor, plan.prefill_seconds, now)
                    begun.append(fetch)
        finally:
            self._pool.abort(*rows[handed_over:])
        self._cost_model.decisions.fetched += bool(begun) and not plan.is_trial
        return begun

    def release_ended(self) -> None:
        """Learn from ended fetches, and unpin their rows once no request waits for them."""
        now = self._clock()
        ended = [each for each in self if each.state is not FetchState.PENDING]
        if not ended:
            return
        awaited = set[Fetch]().union(*(each.awaited for each in self._requests.values()))
        for fetch in ended:
            self._cost_model.ended(fetch, now)
            for row in fetch.rows:
                if self.by_chunk.get(row.key) is fetch:
                    del self.by_chunk[row.key]
            # A waiting request takes its rows at once, unless vLLM has no blocks for it.
            if fetch not in awaited or now > fetch.deadline + self.timeout:
                self._pool.unpin(fetch.committed)
                del self._pinning[fetch]
