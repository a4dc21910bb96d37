"""What this engine computed for a comparison, and what follows from the tracker's verdict.

The namespace lists what two replicas must have in common. In case the list has a hole, rows move
only between replicas that compute the same. Each engine computes canaries at its start: one of a
chunk, and later a long one. Its replica hands their sketches to the tracker, which compares them
with those of the first in the namespace.

A replica that differs moves to the next namespace, where it is compared with whoever is there. So
replicas that compute alike find each other. One whose engine cannot compute a canary shares
nothing, and says why.

Threading: the replica's background loop.
"""

import asyncio
from typing import NamedTuple

from xinference_xavier.mirror import Mirror
from xinference_xavier.peers import DISK
from xinference_xavier.protocol.sketches import Difference, Sketch, pack_canaries
from xinference_xavier.protocol.tracker import CanaryReport, Comparison, Verdict
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.reports import EventReporter, Publisher
from xinference_xavier.runtime.aio import spawn
from xinference_xavier.stats.schema import ComparisonStats


class Computed(NamedTuple):
    """The engine has computed a canary, or some of its KV-cache groups. `name` is the same in all
    engines."""

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
        mirror: Mirror,
        namespace: SharedNamespace,
        disk: Disk,
        publisher: Publisher,
        events: EventReporter,
        *,
        cannot: str = "",
    ) -> None:
        self.cannot = cannot
        self.changed = asyncio.Event()
        """Set when there is more to compare than in the latest report."""
        self.stats = ComparisonStats()
        self._mirror = mirror
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
        self._sketches[name] = {**self._sketches.get(name, {}), **sketch}
        self.stats.canaries = len(self._sketches)
        self.changed.set()

    def reset(self) -> None:
        """The engine's weights may have changed: forget what it computed."""
        self._sketches.clear()
        self.stats.canaries = 0

    def _audit_failed(self, donor: str | None, found: Difference) -> None:
        """Fetch no more from there, and drop what was fetched from anywhere; all rows if they were
        our own."""
        self._events.audit_failed(donor, found)
        if donor is None:
            self._publisher.forget(lambda _: True)
        elif donor == DISK:
            self._disk.distrust(found)
            self._publisher.forget_foreign()
        else:
            self._mirror.distrust(donor)
            self.stats.compared = len(self._mirror.trusted)
            self._note(donor, found)

    # -- what the tracker says ----------------------------------------------------------------

    def report(self) -> CanaryReport:
        """What the tracker is to compare."""
        self.changed.clear()
        return CanaryReport(pack_canaries(self._sketches), self.cannot)

    def judged(self, namespace: str, report: CanaryReport, found: Comparison) -> None:
        """What the tracker found about our `report`."""
        if report.packed != pack_canaries(self._sketches):  # a reset came in between
            return
        self._mirror.set_compared(found.verdict is Verdict.COMPARED)
        self.stats.compared = len(self._mirror.trusted)
        if found.difference is not None:
            spawn(self._leave(namespace, found.peer, found.difference))

    async def _leave(self, namespace: str, peer: str, found: Difference) -> None:
        if namespace == self._namespace.current:
            self._events.differs(peer, found)
            self._note(peer, found)
            await self._namespace.part(namespace)

    def mirror_changed(self) -> None:
        """The mirror has applied an update."""
        differing = self._mirror.differing
        new, self._told = differing.keys() - self._told, frozenset(differing)
        for peer in new:
            if (found := differing[peer].difference) is not None:
                self._note(peer, found)
        self.stats.compared = len(self._mirror.trusted)

    def _note(self, peer: str, found: Difference) -> None:
        """Called once for each peer that computes differently."""
        self.stats.differing += 1
        self.stats.peer, self.stats.layer = peer, found.layer
        self.stats.amount = min(found.amount, 1e9)  # JSON has no infinity
        self._publisher.forget_foreign()
