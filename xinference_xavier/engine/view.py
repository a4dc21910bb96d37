"""What the replica asks of its engine, on its background thread. See `replica.Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.sketches import Sketcher
from xinference_xavier.protocol.load import Load, ScheduledPrompt
from xinference_xavier.replica.canary import ProbeResult, Sketch
from xinference_xavier.replica.inspect import Chunker
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, MarkedPrompt


@dataclass(frozen=True)
class EngineView:
    manager: XavierManager
    sketcher: Sketcher
    chunker: Chunker
    comparable: bool = True

    def stats(self) -> dict[str, Any]:
        return self.manager.stats()

    def sketch(self, key: bytes) -> Sketch | None:
        return self.sketcher.sketch(key)

    def work_on_probes(self) -> list[ProbeResult]:
        return self.manager.probes.work()

    def load(self) -> Load:
        return self.manager.workload.load()

    def take_finished(self) -> list[Sequence[bytes]]:
        return self.manager.take_finished()

    def take_prompts(self) -> tuple[ScheduledPrompt, ...]:
        return self.manager.workload.take_prompts()

    def take_computed(self) -> tuple[ComputedPrefix, ...]:
        return self.manager.workload.take_computed()

    def take_marked(self) -> tuple[MarkedPrompt, ...]:
        return self.manager.workload.take_marked()
