"""The fetches that are under way, and the requests that wait for them.

Belongs to the scheduler thread. A fetch's rows stay pinned until nobody waits for them any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from xinference_xavier.engine.forecast import Forecast
from xinference_xavier.pool.pool import Pool
from xinference_xavier.transfer.fetch import Fetch, FetchState


class Fetches:
    def __init__(self, pool: Pool, forecast: Forecast, patience: float) -> None:
        """Rows wait for their request for `patience` seconds after the fetch's deadline."""
        self._pool = pool
        self._forecast = forecast
        self._patience = patience
        self._waiting: dict[Fetch, set[str]] = {}
        self._by_chunk: dict[bytes, Fetch] = {}

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def bringing(self, key: bytes) -> Fetch | None:
        """The fetch that brings `key`, or has just brought it."""
        fetch = self._by_chunk.get(key)
        return None if fetch is None or fetch.state is FetchState.ROLLED_BACK else fetch

    def bringing_run(self, keys: Iterable[bytes]) -> list[Fetch]:
        """The fetches that bring the first of `keys` and what follows it without a gap."""
        found: dict[Fetch, None] = {}
        for key in keys:
            fetch = self.bringing(key)
            if fetch is None:
                break
            found[fetch] = None
        return list(found)

    def pending(self) -> Iterator[Fetch]:
        """Those that are not over."""
        return (fetch for fetch in self if fetch.state is FetchState.PENDING)

    def by_donor(self) -> Counter[str]:
        """How many are not over."""
        return Counter(fetch.donor for fetch in self.pending())

    def add(self, fetch: Fetch) -> None:
        self._waiting[fetch] = set()
        self._by_chunk.update((row.key, fetch) for row in fetch.rows)

    def wait(self, req_id: str, fetch: Fetch) -> None:
        self._waiting[fetch].add(req_id)

    def stop_waiting(self, req_id: str) -> None:
        for waiting in self._waiting.values():
            waiting.discard(req_id)

    def reset(self) -> None:
        """Nobody waits for what is under way now, nor finds it."""
        self._by_chunk.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def settle(self, now: float) -> None:
        """Take note of ended fetches; let go of their rows when nobody waits for them any more."""
        for fetch, waiting in list(self._waiting.items()):
            if fetch.state is FetchState.PENDING:
                continue
            self._forecast.ended(fetch)
            for row in fetch.rows:
                if self._by_chunk.get(row.key) is fetch:
                    del self._by_chunk[row.key]
            # A waiting request comes for its rows at once, unless it finds no room: not for ever.
            if not waiting or now > fetch.deadline + self._patience:
                self._pool.unpin(fetch.committed)
                del self._waiting[fetch]
