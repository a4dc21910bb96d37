"""The code that runs in a node's process; the server that forks the nodes imports it."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from tests.chaos import near
from tests.chaos.disk import obey_orders
from tests.chaos.mutations import Mutation, make_pool
from tests.chaos.names import Watch, chunked
from tests.chaos.node import Settings
from tests.chaos.scheduler import Scheduler
from tests.chaos.worker import Worker
from tests.chaos.workload import ROW_BYTES, row_content
from tests.engine.scheduling import chunks
from tests.harness.remote import PATIENCE
from tests.harness.replicas import CHUNK_TOKENS, KEY_BYTES, StillEngine
from xinference_xavier.config import XavierConfig
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import shared_keys
from xinference_xavier.pool.region import Region, serve_region
from xinference_xavier.pool.window import Window, WindowServer
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.replica import donor
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.replica import Replica
from xinference_xavier.runtime import aio

CANARY = "canary"


class View(StillEngine):
    """What the replica asks of `scheduler`, which says of its load only how long it may `drain`, in
    seconds."""

    def __init__(self, scheduler: Scheduler, drain: float) -> None:
        super().__init__()
        self.chunker = chunked
        self.stats = scheduler.manager.stats
        self.work_on_probes = scheduler.manager.probes.work
        self.finished = scheduler.manager.finished
        self.computed = scheduler.named
        serving = Serving(CHUNK_TOKENS, ROW_BYTES, drain=drain)
        self.load = lambda: Load(serving, 0, None, 0)


class Inside:
    """Each public method is a command."""

    def __init__(self, settings: Settings) -> None:
        self._incarnation = settings.incarnation
        self._folder = settings.folder
        self._mutation = settings.mutation
        config = XavierConfig(**settings.config)
        self.region = Region.create(settings.rows, ROW_BYTES)
        self.pool = make_pool(settings.rows, settings.mutation)
        assert config.disk is not None
        stores = Path(config.disk)
        obey_orders(stores)
        disk = Disk(stores, config.disk_bytes, config.model_uid, self.region, self.pool)
        tier = PeerTier(self.pool, Index(Peers(settings.incarnation)), disk)
        self._served = serve_region(self.region, settings.incarnation)
        self._windows = Window(self.region), Window(self.region)  # the engine's, the worker's
        if settings.takes_orders:
            self.take_orders()
        near.see_one_host(settings.incarnation)
        if settings.mutation is Mutation.LOAN:
            donor.math = SimpleNamespace(inf=0.0)  # type: ignore[attr-defined, assignment]
        self.worker = Worker(self._windows[1].array, self._folder / "wrong")
        self.scheduler = Scheduler(
            settings.incarnation,
            tier=tier,
            grants=lambda: len(self.replica.donor.grants),
            worker=self.worker,
            fetch_timeout=config.fetch_timeout,
            weights=settings.weights,
            seed=settings.seed,
            log=self._folder / "died",
            report=self._report,
        )
        self.watch = Watch(self._firmly_held)
        self._differing = 0  # peers that computed differently
        self.replica = Replica(
            config,
            engine=View(self.scheduler, config.drain),
            tier=tier,
            namespace="namespace",
            key_bytes=KEY_BYTES,
            window=self._windows[0],
        )
        self._disk = disk
        self.replica.start()
        self._show(settings.weights)
        self.scheduler.start()

    def take_orders(self) -> None:
        self._orders = WindowServer(self._windows[1], self._incarnation, 0, slice(None), None)

    def _firmly_held(self) -> dict[str, int]:
        kept = self.replica.kept
        return {
            name: sum(self._holds(key) for key in prefix.keys)
            for name, prefix in list(kept._prefixes.items())
            if name in kept._firm
        }

    def _holds(self, key: bytes) -> bool:
        row = self.pool.lookup(key)
        return row is not None and not row.is_lent

    def compute(self, number: str, text: str, count: int) -> None:
        self.scheduler.call(lambda: self.scheduler.compute(number, chunks(text, count)))

    def _report(self) -> None:
        """On the scheduler's thread. The replica's stats belong to its background loop."""
        differing = self.replica.canary.stats.differing
        if differing > self._differing:  # what they gave is dropped on purpose
            self._differing = differing
            self.watch.reset()
        else:
            self.watch.look()
        self.replica._thread.loop.call_soon_threadsafe(self._write_figures)

    def _write_figures(self) -> None:
        stats = self.scheduler.manager.stats()
        figures = vars(self.scheduler.figures) | {
            "died": self.scheduler.died,
            "in_flight": self.scheduler.in_flight,
            "waits": stats["waits"],
            "left_out": stats["fetch_decisions"]["left_out"],
            "computed": list(self.scheduler.computed),
            "lost_chunks": self.watch.lost,
            "wrong_bytes": self.worker.wrong_bytes,
            "epoch": self.replica.index.epoch,
            "enabled": self.replica.peers.enabled,
            "replacements": self.replica._client.publisher.replacements,
            "failures": self.replica._client.counts.failures,
            "is_up": self.replica._client.joined.is_set() and self.replica.process.ready,
            "namespace": self.replica.namespace.current if self.replica.tier.sharing else "",
            "mapped": [*self.replica.neighbours._mapped],
            "replica": self.replica.stats(),
        }
        fresh = self._folder / "figures.new"
        fresh.write_text(json.dumps(figures))
        fresh.rename(self._folder / "figures")

    def pause(self, paused: bool) -> None:
        self.scheduler.paused = paused

    def is_idle(self) -> bool:
        idle: bool = self.scheduler.call(self.scheduler.is_idle)
        return idle

    def flush(self) -> None:
        self.scheduler.call(self.scheduler.flush)

    def reset(self, weights: str, shown: str = "") -> None:
        """Compute with `weights` from now on, with the canary of the weights `shown`."""
        self.scheduler.call(lambda: self._reset(weights))
        self._show(shown or weights)

    def _reset(self, weights: str) -> None:
        """On the scheduler's thread, which watches, too."""
        self.watch.reset()
        self.scheduler.reset(weights)

    def _show(self, weights: str) -> None:
        """Show the canary that xinference's worker has an engine compute after a start or reset."""
        computed = "" if self._mutation is Mutation.CANARY else weights
        samples = row_content(CANARY.encode(), computed)[:32].astype(float).tolist()

        async def show() -> None:
            sketch = {"layer": ("float32", samples)}
            self.replica.canary.computed(CANARY, sketch)
            self._disk.probed(CANARY.encode(), sketch)

        self._in_background(show)

    def reset_while(self, serving: bool, weights: str, timeout: float) -> bool:
        """Reset while a grant or a fetch is live; return False if there was no such moment."""
        moment = self.scheduler.is_serving if serving else self.scheduler.is_fetching

        def reset() -> bool:
            self._reset(weights)
            return True

        happened = bool(self.scheduler.call_when(moment, reset, timeout))
        if happened:
            self._show(weights)
        return happened

    # -- rows of neighbours ---------------------------------------------------------------------

    def halt_load(self, lender: str, seconds: float) -> str:
        """Let the worker stand still before it loads rows of this neighbour, or of any. Returns
        whose rows; nothing if there is no such load within `seconds`."""
        mapped = {
            each.name: frozenset(range(each.first, each.first + each.rows))
            for each in [*self.replica.neighbours._mapped.values()]
            if lender in ("", each.name)
        }
        halt = self.worker.halt(frozenset().union(*mapped.values()))
        if halt is None:
            return ""
        self._halt = halt
        if not halt.begun.wait(seconds):
            self.go_on()
            return ""
        return next(name for name, slots in mapped.items() if not slots.isdisjoint(halt.loading))

    def go_on(self) -> None:
        self.worker.go_on(self._halt)

    def lends(self, borrower: str) -> int:
        """How many rows it lends to this neighbour."""
        records = {**self.replica.donor.grants._records}
        return sum(
            len(record.rows)
            for (consumer, _), record in records.items()
            if record.in_place and consumer == borrower
        )

    def _in_background(self, work: Callable[..., Any], *args: Any) -> Any:
        running = asyncio.run_coroutine_threadsafe(work(*args), self.replica._thread.loop)
        return running.result(PATIENCE)

    def audit(self) -> dict[str, Any]:
        """Everything that the replica holds, for a check at rest."""
        counts = self.pool.counts()
        process = psutil.Process()
        weights = self.scheduler.weights
        peers = self.replica.peers
        rows = [(key, self.pool.lookup(key)) for key in shared_keys(self.pool)]
        return {
            "filling": counts.filling,
            "pinned": counts.pinned,
            "quarantined": counts.quarantined,
            "grants": len(self.replica.donor.grants),
            "held": {key for key, row in rows if row is not None},
            "wrong_rows": sum(
                self.region.row(row.slot).tobytes() != row_content(key, weights).tobytes()
                for key, row in rows
                if row is not None
            ),
            "listed": {peer.name: set(peer.keys) for peer in [*peers.values()]},
            "peers": set(peers.members),
            "serving": set(peers.serving),
            "namespace": self.replica.namespace.current,
            "connected": self.replica._client.joined.is_set(),
            "lent": sum(row.is_lent for row in self.pool.rows()),
            "mapped": {*self.replica.neighbours._mapped},
            "tasks": len(aio._running) - len(self.replica.donor.lending.borrowers),
            "links": self._links(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "descriptors": process.num_fds(),
            "rss": process.memory_info().rss,
        }

    def _links(self) -> int:
        stats = self._in_background(self.replica.process.stats)
        return int(stats.get("links", 0))

    def region_inode(self) -> int:
        return os.fstat(self.region.fd).st_ino
