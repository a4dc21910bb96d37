"""The sources of the simulated replica's rows: peers in memory, some on the same host, and a disk.

Nothing here runs by itself. The simulation says when a fetch goes on, so that a row may arrive at
any moment, in part, late or never, and a row that was given up may still be written. The disk is
real, with the loop that uses it and its transaction, and so is what lends rows and borrows them;
the simulation says when the loop goes on, and when a call to the disk or to a peer does.
"""

import asyncio
import random
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engine.scheduling import ScriptedTier
from tests.simulation.neighbours import CONSUMER, Actor, Lender, Neighbourhood, Window, garble
from xinference_xavier.engine import donors
from xinference_xavier.errors import GrantRefusedError
from xinference_xavier.peers import DISK
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Memory
from xinference_xavier.protocol.transfer import Grant, GrantRequest
from xinference_xavier.replica import disk as replica_disk
from xinference_xavier.replica import fetcher as replica_fetcher
from xinference_xavier.replica import neighbours as replica_neighbours
from xinference_xavier.replica.canary import Audited
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.fetcher import Fetch, Fetcher, FetchState
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import retrieve, spawn

PEERS = ("peer 1", "peer 2", "peer 3")
_FAILURES = ("not held", "timeout", "refused", "donor unreachable")


class Calls(Executor):
    """In place of threads: holds calls until `run_one`, unless they run `at_once`."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.at_once = False

    @property
    def waiting(self) -> int:
        return len(self._calls)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        if self.at_once:
            self.shutdown()
        return future

    def run_one(self) -> None:
        if not self._calls:
            return
        future, call = self._calls.popleft()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._calls:
            self.run_one()


class _Poll(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """Its time is the simulation's, and it runs in `go_on` only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._simulated = clock
        super().__init__(_Poll())

    def time(self) -> float:
        return self._simulated()

    def go_on(self) -> None:
        """Enough rounds for what a call that has ended sets off."""
        for _ in range(12):
            self.call_soon(self.stop)
            self.run_forever()


class Arriving:
    """A fetch on its way. `rows` are still to be written."""

    def __init__(self, fetch: Fetch, weights: int) -> None:
        self.fetch = fetch
        self.weights = weights
        self.rows = list(fetch.rows)


class Peers(ScriptedTier):
    """`write(row, key, weights)` puts a chunk into a row as a peer with these weights holds it.

    `weights` are those that the peers have now. A peer that starts is on this host with the
    probability `nearby`, and has a pool of `lent` slots.
    """

    def __init__(
        self,
        pool: Pool,
        window: Window,
        rng: random.Random,
        patch: pytest.MonkeyPatch,
        *,
        folder: Path,
        has_disk: bool,
        saves_all: bool,
        nearby: float,
        lent: int,
        clock: Callable[[], float],
        write: Callable[[Memory, bytes, int], None],
        stored: Callable[[Sequence[Row]], None],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(pool, CONSUMER)
        self._region = region = window.own
        self._nearby, self._lent = nearby, lent
        self._rng = rng
        self._clock = clock
        self._write = write
        self._stored = stored
        self._log = log
        self.arriving: list[Arriving] = []
        self.weights = 0
        self.holdings: dict[str, set[bytes]] = {name: set() for name in PEERS}
        self.joining: list[tuple[Row, int]] = []  # reserved in the background, with the weights

        now: Any = SimpleNamespace(monotonic=clock, time=time.time, time_ns=time.time_ns)
        for module in (replica_disk, replica_fetcher, replica_neighbours):
            patch.setattr(module, "time", now)
        for module in (donors, replica_fetcher):
            patch.setattr(module, "random", rng)
        patch.setattr(replica_disk, "DaemonThreads", self.make_calls)
        patch.setattr(replica_fetcher, "in_thread", self._in_thread)
        patch.setattr(replica_fetcher, "xoscar", SimpleNamespace(actor_ref=self._actor))
        self.calls: list[Calls] = []
        self._threads = self.make_calls()
        self._asked: list[Calls] = []  # peers
        self.lenders: dict[str, Lender] = {}
        self.neighbours = Neighbourhood(window, self.peers, self._connect)
        self.loop = Loop(clock)
        self.folder = folder
        self.disk = NoDisk()
        if has_disk:
            self.disk = Disk(
                folder, 1 << 30, "model", region, pool, saves_all=saves_all, by_name=()
            )
        self.namespace = SharedNamespace(CONSUMER, self.index, self.disk)
        publisher = Mock()
        self.differing: list[Audited] = []  # rows that changed while they were lent
        canary: Any = SimpleNamespace(take=self.differing.append)
        self._fetcher = Fetcher(
            pool=pool,
            row_bytes=region.row_bytes,
            process=Mock(),
            neighbours=self.neighbours,
            namespace=self.namespace,
            index=self.index,
            disk=self.disk,
            publisher=publisher,
            events=Mock(),
            canary=canary,
        )
        self.loop.create_task(self.disk.run(publisher))

    def make_calls(self, *_: object) -> Calls:
        self.calls.append(Calls())
        return self.calls[-1]

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.disk.close()
        self.loop.go_on()
        self.loop.close()
        for lender in self.lenders.values():
            lender.close()

    # -- called by the scheduler thread -------------------------------------------------------

    @property
    def sharing(self) -> bool:
        return self.namespace.resets_done

    @property
    def reaches_peers(self) -> bool:
        return self.is_ready and self.namespace.resets_done

    def submit_load(self, source: str, rows: list[Row], deadline: float) -> Fetch | None:
        fetch = super().submit_load(source, rows, deadline)
        self._log(f"fetch of {len(rows)} rows from {source}: {[row.slot for row in rows]}")
        if fetch is not None:
            fetch.began = self._clock()
            if source == DISK or fetch.in_place:
                self.loop.call_soon(self._fetcher.start, fetch)
            else:
                self.arriving.append(Arriving(fetch, self.weights))
        return fetch

    def on_stored(self, rows: Sequence[Row]) -> None:
        super().on_stored(rows)
        self._stored(rows)

    def reset(self) -> None:
        """Nothing is shared until the peers have the new weights, too: see `follow`."""
        self.namespace.announce_reset()
        super().reset()
        self.loop.call_soon(self.disk.reset)
        self.loop.call_soon(lambda: spawn(self.namespace.isolate()))
        self.is_ready = False
        self.holdings = {name: set() for name in PEERS}
        self.peers_hold(**self.holdings)

    # -- done by the simulation ---------------------------------------------------------------

    def follow(self, weights: int) -> None:
        """The peers have these weights, and hold nothing yet."""
        self.weights = weights
        self.is_ready = True
        for lender in self.lenders.values():
            lender.reset()
        resets = self.namespace.announced
        self.loop.call_soon(lambda: spawn(self._rejoin(str(weights), resets)))

    async def _rejoin(self, version: str, resets: int) -> None:
        if await self.namespace.rejoin(version, resets):
            self.index.members.set_compared(True)
            self.peers_hold(**self.holdings)

    def compute_canary(self, weights: int) -> None:
        """The engine computes what tells weights apart."""
        if self.namespace.resets_done:
            self.disk.probed(b"canary", {"layer": ("float32", [1.0, float(weights)])})

    def hold(self, peer: str, keys: set[bytes]) -> None:
        self.holdings[peer] = keys
        self.peers_hold(**self.holdings)

    def go_on(self, now: float) -> None:
        """One of the fetches makes progress, whatever that is."""
        asked = [calls for calls in self._asked if calls.waiting]
        if asked and (not self.arriving or self._rng.random() < 0.5):
            self._rng.choice(asked).run_one()
            self.loop.go_on()
            return
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
                self._fill(each.rows.pop(0), each.weights)
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
        garble(self._region.row(row.slot), self._rng)

    def _fill(self, row: Row, weights: int) -> None:
        self._write(self._region.row(row.slot), row.key, weights)

    def join(self, keys: Iterable[bytes]) -> None:
        """Reserve free rows for what peers hold, as a replica does that has just joined."""
        rows = self.pool.reserve(keys, redundant=None).rows
        self.joining += [(row, self.weights) for row in rows]
        for row in rows:
            row.origin = row.replicated_from = PEERS[0]
            self._garble(row)

    def go_on_joining(self) -> None:
        if not self.joining:
            return
        row, weights = self.joining.pop(0)
        if self._rng.random() < 0.2 or weights != self.weights or not self.is_ready:
            self.pool.abort(row)
            return
        self._fill(row, weights)
        if not self.pool.commit(row, checksum=1):  # there was a reset
            self.pool.abort(row)

    # -- peers on this host -------------------------------------------------------------------

    def go_on_lending(self) -> None:
        """A neighbour stores something else, or the replica looks who is one."""
        if self.lenders and self._rng.random() < 0.5:
            self._any_lender().go_on(self._clock())
        else:
            self.loop.call_soon(lambda: spawn(self.neighbours.look()))
            self.loop.go_on()

    def upset(self) -> None:
        """A neighbour's process ends, or its pool is flushed or reset."""
        if self.lenders:
            lender = self._any_lender()
            what = self._rng.choice(("end", "flush", "reset"))
            self._log(f"a neighbour: {what}")
            match what:
                case "end":
                    lender.has_ended = True
                case "flush":
                    lender.flush()
                case "reset":
                    lender.reset()

    def _any_lender(self) -> Lender:
        return self.lenders[self._rng.choice(sorted(self.lenders))]

    @property
    def granted(self) -> int:
        return sum(each.grants.granted_rows for each in self.lenders.values() if not each.has_ended)

    def _connect(self, name: str) -> Lender:
        if self._rng.random() >= self._nearby:
            raise ConnectionRefusedError("it is on another host")
        self._log(f"{name} is a neighbour")  # once more with the same name, unlike real ones
        lender = Lender(self._lent, self._region.row_bytes, self._rng)
        self.lenders[name] = lender
        return lender

    async def _actor(self, address: str, uid: str) -> Actor:
        """A peer gets a question even if nobody waits for the answer any more, but not one that was
        for a process of the same name before it."""
        name = next(name for name in PEERS if uid == replica_uid(name))
        questions, releases = Calls(), Calls()
        self._asked += [questions, releases]

        async def ask(calls: Calls, work: Callable[..., Any], *args: object) -> Any:
            answering = self.loop.run_in_executor(calls, work, self.lenders.get(name), *args)
            answering.add_done_callback(retrieve)
            return await asyncio.shield(answering)

        return Actor(
            partial(ask, questions, partial(self._grant, name)),
            partial(ask, releases, self._release),
        )

    def _grant(self, name: str, lender: Lender | None, request: GrantRequest) -> Grant:
        if self._rng.random() < 0.05:
            raise ConnectionResetError("the connection is lost")
        if lender is None:
            raise GrantRefusedError("donor gone")

        def write(row: Memory, key: bytes) -> None:
            self._write(row, key, self.weights)

        return lender.grant(request, self.holdings[name], write, self._clock())

    @staticmethod
    def _release(lender: Lender | None, number: int) -> None:
        if lender is not None:
            lender.release(number)

    async def _in_thread(self, work: Callable[..., Any], *args: object) -> Any:
        return await self.loop.run_in_executor(self._threads, work, *args)

    def answer(self) -> None:
        """Whoever was asked answers now: what is answered too late is asked again."""
        for calls in self._asked:
            calls.shutdown()
        self.loop.go_on()

    def is_at_rest(self) -> bool:
        self.loop.go_on()
        in_flight = self.arriving or self.joining or self._fetcher.counts.in_flight
        return not (in_flight or any(calls.waiting for calls in [*self.calls, *self._asked]))
