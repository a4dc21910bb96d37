"""Peers of the simulated replica, in memory: what they hold and how their rows arrive.

Nothing here runs by itself. The simulation says when a fetch goes on, so that a row may arrive at
any moment, in part, late or never, and a row that was given up may still be written.
"""

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tests.engine.scheduling import ScriptedTier
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.replica.fetcher import Fetch, FetchState

PEERS = ("peer 1", "peer 2", "peer 3")
_FAILURES = ("not held", "timeout", "refused", "donor unreachable")


class Arriving:
    """A fetch on its way. `rows` are still to be written."""

    def __init__(self, fetch: Fetch, weights: int) -> None:
        self.fetch = fetch
        self.weights = weights
        self.rows = list(fetch.rows)


class Peers(ScriptedTier):
    """`write(row, weights)` puts a chunk as a peer with these weights holds it into the row's slot.

    `weights` are those that the peers have now.
    """

    def __init__(
        self,
        pool: Pool,
        region: Region,
        rng: random.Random,
        *,
        clock: Callable[[], float],
        write: Callable[[Row, int], None],
        stored: Callable[[Sequence[Row]], None],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(pool, "own")
        self._region = region
        self._rng = rng
        self._clock = clock
        self._write = write
        self._stored = stored
        self._log = log
        self.arriving: list[Arriving] = []
        self.weights = 0
        self.holdings: dict[str, set[bytes]] = {name: set() for name in PEERS}
        self.joining: list[tuple[Row, int]] = []  # reserved in the background, with the weights

    # -- called by the scheduler thread -------------------------------------------------------

    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        fetch = super().submit_load(source, rows, deadline)
        self._log(f"fetch of {len(rows)} rows from {source}: {[row.slot for row in rows]}")
        if fetch is not None:
            fetch.began = self._clock()
            self.arriving.append(Arriving(fetch, self.weights))
        return fetch

    def on_stored(self, rows: Sequence[Row]) -> None:
        super().on_stored(rows)
        self._stored(rows)

    def reset(self) -> None:
        """Nothing is shared until the peers have the new weights, too: see `follow`."""
        super().reset()
        self.is_ready = False
        self.holdings = {name: set() for name in PEERS}
        self.peers_hold(**self.holdings)

    # -- done by the simulation ---------------------------------------------------------------

    def follow(self, weights: int) -> None:
        """The peers have these weights, and hold nothing yet."""
        self.weights = weights
        self.is_ready = True

    def change_holdings(self, peer: str, keys: Iterable[bytes], add: bool) -> None:
        held = self.holdings[peer]
        self.holdings[peer] = held | set(keys) if add else held - set(keys)
        self.peers_hold(**self.holdings)

    def go_on(self, now: float) -> None:
        """One of the fetches makes progress, whatever that is."""
        if not self.arriving:
            return
        each = self._rng.choice(self.arriving)
        fetch, rng = each.fetch, self._rng
        if fetch.state is not FetchState.PENDING:  # given up, but its rows are still written
            if each.rows and rng.random() < 0.6:
                self._garble(each.rows.pop())
            else:
                self.drain(fetch)
                self.arriving.remove(each)
            return
        if now >= fetch.deadline or rng.random() < 0.03:
            self._log(f"given up: {fetch.source} {[row.slot for row in fetch.rows]}")
            self._end_with("timeout", now, fetch)
            self.abandon(fetch)
            return
        if each.rows and rng.random() < 0.8:
            row = each.rows[0]
            if rng.random() < 0.2:  # half of it
                self._garble(row)
            else:
                self._write(each.rows.pop(0), each.weights)
            return
        if each.rows and rng.random() < 0.5:
            return
        arrived = len(fetch.rows) - len(each.rows)
        self._log(f"arrived: {arrived} of {len(fetch.rows)} from {fetch.source}")
        self._end_with(rng.choice(_FAILURES) if each.rows else None, now, fetch)
        self.end(fetch, arrived, fetch.seconds)
        self.arriving.remove(each)

    def _end_with(self, reason: str | None, now: float, fetch: Fetch) -> None:
        fetch.reason = reason
        fetch.seconds = max(0.001, now - fetch.began)

    def _garble(self, row: Row) -> None:
        noise = np.frombuffer(self._rng.randbytes(self._region.row_bytes), dtype=np.uint8)
        self._region.array[row.slot] = noise

    def join(self, keys: Iterable[bytes]) -> None:
        """Reserve free rows for what peers hold, as a replica does that has just joined."""
        rows = self.pool.reserve(keys, redundant=None).rows
        self.joining += [(row, self.weights) for row in rows]
        for row in rows:
            self._garble(row)

    def go_on_joining(self) -> None:
        if not self.joining:
            return
        row, weights = self.joining.pop(0)
        if self._rng.random() < 0.2 or weights != self.weights or not self.is_ready:
            self.pool.abort(row)
            return
        self._write(row, weights)
        if not self.pool.commit(row, checksum=1):  # there was a reset
            self.pool.abort(row)

    @property
    def is_at_rest(self) -> bool:
        return not self.arriving and not self.joining
