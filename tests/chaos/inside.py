"""The code that runs in a node's process; the server that forks the nodes imports it."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
from xinference_xavier.pool.region import Region
from xinference_xavier.pool.window import Window
from xinference_xavier.protocol.load import Load, Serving
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
        self.worker = Worker(self.region, self._folder / "wrong")
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
            window=Window(self.region),
        )
        self._disk = disk
        self.replica.start()
        self._show(settings.weights)
        self.scheduler.start()

    def _firmly_held(self) -> dict[str, int]:
        kept = self.replica.kept
        return {
            name: sum(self.pool.lookup(key) is not None for key in prefix.keys)
            for name, prefix in list(kept._prefixes.items())
            if name in kept._firm
        }

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
            "tasks": len(aio._running),
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
