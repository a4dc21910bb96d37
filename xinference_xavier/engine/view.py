"""What the replica asks of its engine, on its background thread. See `replica.Engine`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xinference_xavier.engine.probes import Probe, Probes
from xinference_xavier.engine.request import Request
from xinference_xavier.engine.sketches import Sketcher
from xinference_xavier.engine.workload import Workload
from xinference_xavier.pool.pool import Row
from xinference_xavier.protocol.load import Load, ScheduledPrompt
from xinference_xavier.replica.canary import ProbeResult, Sketch
from xinference_xavier.replica.inspect import Chunker
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, MarkedPrompt
from xinference_xavier.replica.warm_join import MAX_REQUESTS
from xinference_xavier.stats.schema import Hits


class EngineView:
    """Spec and connector fill in what the manager does not know."""

    def __init__(
        self, stats: Callable[[], dict[str, Any]], requests: Mapping[str, Request], hits: Hits
    ) -> None:
        self.stats = stats
        self.requests = requests
        self._hits = hits
        self._finished: deque[Sequence[bytes]] = deque(maxlen=MAX_REQUESTS)
        self.chunker: Chunker | None = None
        self.sketcher: Sketcher | None = None
        self.probes: Probes | None = None
        self.workload: Workload | None = None

    def can_audit(self, tokens: int) -> bool:
        """Whether the engine is idle and has computed at least `tokens` prompt tokens."""
        return not self.requests and self._hits.computed >= tokens

    @property
    def comparable(self) -> bool:
        return self.sketcher is not None

    def sketch(self, key: bytes) -> Sketch | None:
        return None if self.sketcher is None else self.sketcher.sketch(key)

    def probe(self, salt: str) -> Probe | None:
        """Called by the scheduler thread: see `Probes`."""
        return None if self.probes is None else self.probes.of(salt)

    def probe_ended(self, probe: Probe) -> None:
        """Called by the scheduler thread: see `Probes`."""
        if self.probes is not None:
            self.probes.ended(probe)

    def reset(self) -> None:
        """Called by the scheduler thread."""
        if self.probes is not None:
            self.probes.reset()

    def wants_audit(self) -> bool:
        """Called by the scheduler thread: see `Probes`."""
        return self.probes is not None and self.probes.wants_audit()

    def loaded(self, tokens: Sequence[int], rows: Sequence[Row], ends: Mapping[bytes, int]) -> None:
        """Called by the scheduler thread: see `Probes`."""
        if self.probes is not None:
            self.probes.loaded(tokens, rows, ends)

    def stored(self, probe: Probe, rows: Sequence[Row], ends: Mapping[bytes, int]) -> None:
        """Called by the scheduler thread: see `Probes`."""
        if self.probes is not None:
            self.probes.stored(probe, rows, ends)

    def scheduled(self, req_id: str, prompt: int, have: int) -> None:
        """Called by the scheduler thread: see `Workload`."""
        if self.workload is not None:
            self.workload.scheduled(req_id, prompt, have)

    def finished(self, prompt: Sequence[bytes]) -> None:
        """Called by the scheduler thread: a request with these chunks has ended."""
        self._finished.append(prompt)

    def take_finished(self) -> list[Sequence[bytes]]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def work_on_probes(self) -> list[ProbeResult]:
        return [] if self.probes is None else self.probes.work()

    def load(self) -> Load | None:
        return None if self.workload is None else self.workload.load()

    def take_prompts(self) -> tuple[ScheduledPrompt, ...]:
        return () if self.workload is None else self.workload.take_prompts()

    def take_computed(self) -> tuple[ComputedPrefix, ...]:
        return () if self.workload is None else self.workload.take_computed()

    def take_marked(self) -> tuple[MarkedPrompt, ...]:
        return () if self.workload is None else self.workload.take_marked()
