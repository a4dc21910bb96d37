"""Audits: an engine computes again the beginning of a prompt, of which rows were fetched or loaded,
and compares them.

An audit costs the engine a prompt, so there are few: at most one in `AUDIT_INTERVAL` seconds, for
one token of `AUDIT_SHARE` computed ones, while the engine has nothing else to do. The first chunk
is compared and, every other time, one at any depth.

Threading: `sample`, `next` and `asked` are for the replica's background thread,
everything else is for the scheduler thread, which samples nothing: it pins the rows until `sample`
has done so.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from xinference_xavier.engine.sketcher import Sketcher
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.sketches import Sketch, difference
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.canary import Audited

AUDIT_INTERVAL = 60.0
AUDIT_SHARE = 1000
"""At most one token is audited for this many computed ones."""

CanAudit = Callable[[int], bool]
"""Tells whether the engine has nothing else to do and has computed so many tokens."""


@dataclass(eq=False, slots=True)
class _Loaded:
    rows: list[Row]  # pinned until they are sampled
    sketch: Sketch = field(default_factory=dict)

    @property
    def donor(self) -> str | None:
        return self.rows[0].origin


@dataclass(eq=False, slots=True)
class Audit:
    """The chunks of a prompt that are to be compared, by where they end. `era` is when they were
    loaded, between two resets."""

    tokens: Sequence[int]
    chunks: dict[int, _Loaded]
    era: object

    @property
    def layers(self) -> dict[int, Set[str]]:
        """What was loaded of each chunk: of a window, only the last ones are."""
        return {end: loaded.sketch.keys() for end, loaded in self.chunks.items()}

    def result(self, sketches: Mapping[int, Sketch]) -> Audited:
        """The first chunk that differs from what the engine has computed now, or else the first."""
        results = []
        for end, loaded in sorted(self.chunks.items()):
            computed = {layer: sketches[end][layer] for layer in loaded.sketch}
            results.append(Audited(loaded.donor, difference(loaded.sketch, computed)))
        return next((result for result in results if result.difference), results[0])


class Audits:
    """`sketcher` samples rows of `pool`; a chunk has `chunk_tokens`, and an audit at most
    `max_tokens`."""

    def __init__(
        self,
        can_audit: CanAudit,
        sketcher: Sketcher,
        pool: Pool,
        *,
        chunk_tokens: int,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        choose: Callable[[Sequence[int]], int] = random.choice,
    ) -> None:
        self._can_audit = can_audit
        self._sketcher = sketcher
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._max_tokens = max_tokens
        self._clock = clock
        self._choose = choose
        self._loaded: deque[Audit] = deque()
        self._candidate: Audit | None = None
        self._tokens = 0  # audited
        self._deep = False  # whether the next audit may be
        self._next = self._next_candidate = clock() + AUDIT_INTERVAL

    # -- called by the background thread ------------------------------------------------------

    def sample(self) -> None:
        """Sample what was loaded, and free it."""
        while self._loaded:
            candidate = self._loaded.popleft()
            for loaded in candidate.chunks.values():
                try:
                    loaded.sketch = self._sketcher.sample(loaded.rows)
                finally:
                    self._pool.unpin(loaded.rows)
            if all(loaded.sketch for loaded in candidate.chunks.values()):
                self._candidate = candidate

    def next(self, now: float, era: object) -> Audit | None:
        """The audit that the engine can afford now, of rows that are not from before a reset."""
        candidate = self._candidate
        if candidate is None or candidate.era is not era or now < self._next:
            return None
        tokens = self._tokens + len(candidate.tokens)
        return candidate if self._can_audit(tokens * AUDIT_SHARE) else None

    def asked(self, audit: Audit, now: float) -> None:
        """The engine computes the audit."""
        self._candidate = None
        self._next = now + AUDIT_INTERVAL
        self._deep = not self._deep
        self._tokens += len(audit.tokens)

    # -- called by the scheduler thread -------------------------------------------------------

    def wanted(self) -> bool:
        """True if `loaded` would do anything. A candidate that the engine cannot afford yet gives
        way to another one, which may be shorter."""
        return self._clock() >= self._next_candidate

    def loaded(
        self, tokens: Sequence[int], rows: Iterable[Row], ends: Mapping[bytes, int], era: object
    ) -> None:
        """A request loads `rows` for its prompt's `tokens`, and perhaps for answered ones; `ends`
        says where its chunks end, by their keys without the group."""
        found: dict[int, list[Row]] = {}
        for row in rows:
            end = ends.get(row.key[: GROUP.start])
            if end is not None and end < min(self._max_tokens, len(tokens)):
                found.setdefault(end, []).append(row)
        if not found:
            return
        self._next_candidate = self._clock() + AUDIT_INTERVAL
        last = self._choose(sorted(found)) if self._deep else min(found)
        chosen = {min(found), last} if min(found) <= self._chunk_tokens else {last}
        chunks = {
            end: _Loaded(pinned)
            for end in chosen
            if (pinned := [row for row in found[end] if self._pool.pin_row(row)])
        }
        if chunks:
            # A drafter's row depends on the token behind it, too.
            self._loaded.append(Audit(list(tokens[: last + 1]), chunks, era))
