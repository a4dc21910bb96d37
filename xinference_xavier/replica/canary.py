"""What this engine computed for a comparison, and what follows from the tracker's verdict.

The namespace lists what two replicas must have in common. In case the list has a hole, rows move
only between replicas that compute the same. Each engine computes canaries at its start: one of a
chunk, and later a long one. Its replica hands their sketches to the tracker, which compares them
with those of the first in the namespace.

A replica that differs moves to the namespace of those that compute the same, which the tracker
names. One whose engine cannot compute a canary shares nothing, and says why.

Threading: the replica's background loop.
"""

import asyncio
from typing import NamedTuple

from xinference_xavier.peers import DISK, Peers
from xinference_xavier.protocol.sketches import Difference, Sketch, pack_canaries
from xinference_xavier.protocol.tracker import CanaryReport, Comparison, Verdict
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import EventReporter, Publisher
from xinference_xavier.runtime.aio import spawn
from xinference_xavier.stats.schema import ComparisonStats


class Computed(NamedTuple):
    """The engine has computed a canary. `name` is the same in all engines."""

    name: str
    sketch: Sketch


class Audited(NamedTuple):
    """The engine has computed again what came from `donor` (None: from this engine). `difference`
    is how it differs (None: not at all)."""

    donor: str | None
    difference: Difference | None


class Lost(NamedTuple):
    """The engine did not compute a probe in time."""


ProbeResult = Computed | Audited | Lost


class Canary:
    """`cannot` is why the engine computes none; empty if it does."""

    def __init__(
        self,
        peers: Peers,
        namespace: SharedNamespace,
        disk: Disk,
        publisher: Publisher,
        events: EventReporter,
        *,
        cannot: str = "",
    ) -> None:
        self.report = CanaryReport(cannot=cannot)
        """What the tracker is to compare."""
        self.changed = asyncio.Event()
        """Set when the report has more than when it was last sent."""
        self.stats = ComparisonStats()
        self._peers = peers
        self._namespace = namespace
        self._disk = disk
        self._publisher = publisher
        self._events = events
        self._sketches: dict[str, Sketch] = {}  # by the canary's name
        self._told: frozenset[str] = frozenset()  # replicas that the tracker found to differ

    # -- what the engine computes -------------------------------------------------------------

    def take(self, result: ProbeResult) -> None:
        """The engine has ended a probe."""
        match result:
            case Lost():
                self.stats.lost_probes += 1
            case Computed(name, sketch):
                self.computed(name, sketch)
                self._disk.probed(name.encode(), sketch)
            case Audited(donor, found):
                self.stats.audits += 1
                if found is not None:
                    self.stats.failed_audits += 1
                    self._audit_failed(donor, found)

    def computed(self, name: str, sketch: Sketch) -> None:
        self._sketches[name] = sketch
        self._pack()
        self.changed.set()

    def reset(self) -> None:
        """The engine's weights may have changed: forget what it computed."""
        self._sketches.clear()
        self.report = self.report._replace(audited=())
        self._pack()

    def _pack(self) -> None:
        self.report = self.report._replace(packed=pack_canaries(self._sketches))
        self.stats.canaries = len(self._sketches)

    def _audit_failed(self, donor: str | None, found: Difference) -> None:
        """Drop what was fetched from anywhere; all rows if they were our own. Share nothing until
        the tracker has parted us from the donor."""
        self._events.audit_failed(donor, found)
        if donor is None:
            self._publisher.forget(lambda _: True)
        elif donor == DISK:
            self._disk.distrust(found)
            self._publisher.forget_foreign()
        else:
            self._peers.set_compared(False)
            self.stats.compared = 0
            self._publisher.forget_foreign()
            self.report = self.report._replace(audited=(*self.report.audited, (donor, found)))
            self.changed.set()

    # -- what the tracker says ----------------------------------------------------------------

    def judged(self, namespace: str, report: CanaryReport, found: Comparison) -> None:
        """What the tracker found about our `report`."""
        if report is not self.report:  # a reset may have come in between
            return
        self._peers.set_compared(found.verdict is Verdict.COMPARED)
        self.stats.compared = len(self._peers.trusted)
        if found.namespace:
            spawn(self._leave(namespace, found))

    async def _leave(self, namespace: str, found: Comparison) -> None:
        if namespace == self._namespace.current:
            if found.difference is not None:
                self._events.differs(found.peer, found.difference)
                self._note(found.peer, found.difference)
            await self._namespace.part(namespace, found.namespace)

    def peers_changed(self) -> None:
        """The index has applied an update."""
        differing = self._peers.differing
        new, self._told = differing.keys() - self._told, frozenset(differing)
        for peer in new:
            if (found := differing[peer].difference) is not None:
                self._note(peer, found)
        self.stats.compared = len(self._peers.trusted)

    def _note(self, peer: str, found: Difference) -> None:
        """Called once for each peer that computes differently."""
        self.stats.differing += 1
        self.stats.peer, self.stats.layer = peer, found.layer
        self.stats.amount = min(found.amount, 1e9)  # JSON has no infinity
        self._publisher.forget_foreign()
