"""What a replica asks of its engine, on the background thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from xinference_xavier.replica.canary import ProbeResult, Sketch
from xinference_xavier.replica.inspect import Chunker
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, MarkedPrompt
from xinference_xavier.replica.reports import Source
from xinference_xavier.replica.warm_join import Prompt


class Engine(Source, Protocol):
    @property
    def chunker(self) -> Chunker: ...

    @property
    def comparable(self) -> bool:
        """Whether it can `sketch`. If not, as in tests, all peers are trusted."""

    def stats(self) -> dict[str, Any]:
        """JSON-able."""

    def sketch(self, key: bytes) -> Sketch | None:
        """Samples of a chunk that it computed and still has."""

    def work_on_probes(self) -> list[ProbeResult]:
        """Go on with what it computes for comparisons. Returns the results since the last call."""

    def take_computed(self) -> tuple[ComputedPrefix, ...]:
        """The prefixes that it was given since the last call."""

    def take_marked(self) -> tuple[MarkedPrompt, ...]:
        """The prompts that it was given since the last call and that are to be kept."""

    def take_finished(self) -> Sequence[Prompt]:
        """The prompts of the requests that ended since the last call."""
