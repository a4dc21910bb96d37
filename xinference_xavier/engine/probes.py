"""Prompts that this engine computes only for a comparison.

The first is the canary, equal in all engines of a model: see `replica.canary`. The others are
audits: the first chunk of a prompt, whose rows were fetched or loaded, computed again. xinference's
worker takes them from `next` and gives them to the model as requests of their own. Their salts are
secrets of this process, as clients choose salts, too. Their rows are sampled and dropped.

Threading: `next` and `take_results` are for the replica's background thread, everything else is
for the scheduler thread.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from xinference_xavier.engine.sketches import Sketcher
from xinference_xavier.pool.pool import Row
from xinference_xavier.replica.canary import Probe, ProbeResult, Sketch, difference

CANARY = b"canary"
"""What peers call the canary's chunk: its own key depends on the salt."""
AUDIT_INTERVAL = 60.0
AUDIT_SHARE = 1000
"""At most one token is audited for this many computed ones."""
_EXCLUSIVE = 3  # special tokens are at the ends of most vocabularies


class _Audit:
    def __init__(self, tokens: Sequence[int], donor: str | None, sketch: Sketch) -> None:
        self.tokens = tokens
        self.donor = donor
        self.sketch = sketch


class Probes:
    """`sketcher` samples rows; a chunk has `chunk_tokens`. Without `audits` there is only the
    canary. `can_audit(tokens)` tells whether the engine has nothing else to do and has computed
    enough."""

    def __init__(
        self,
        sketcher: Sketcher,
        *,
        chunk_tokens: int,
        vocabulary: int,
        audits: bool,
        can_audit: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sketcher = sketcher
        self._chunk_tokens = chunk_tokens
        self._audits = audits
        self._can_audit = can_audit
        self._clock = clock
        self._first = Probe(_canary(chunk_tokens, vocabulary), _salt())
        self._canary: Probe | None = self._first  # None once it was computed
        self._candidate: _Audit | None = None
        self._running: dict[str, _Audit] = {}  # by salt
        self._next_audit = clock() + AUDIT_INTERVAL
        self._audited = 0  # tokens
        self._results: deque[ProbeResult] = deque(maxlen=100)

    # -- called by the background thread ------------------------------------------------------

    def next(self) -> Probe | None:
        """The prompt to compute now, if any. The canary is repeated until it has been computed."""
        if self._canary is not None:
            return self._canary
        candidate, now = self._candidate, self._clock()
        tokens = self._audited + self._chunk_tokens
        if candidate is None or now < self._next_audit or not self._can_audit(tokens * AUDIT_SHARE):
            return None
        self._candidate, self._audited = None, tokens
        self._next_audit = now + AUDIT_INTERVAL
        probe = Probe([*candidate.tokens, candidate.tokens[0]], _salt())
        self._running = {probe.salt: candidate}
        return probe

    def take_results(self) -> list[ProbeResult]:
        return [self._results.popleft() for _ in range(len(self._results))]

    # -- called by the scheduler thread -------------------------------------------------------

    def has(self, salt: str) -> bool:
        """Whether it is a probe's."""
        return salt == self._first.salt or salt in self._running

    def reset(self) -> None:
        """The engine's weights may have changed: compute the canary again, and audit nothing from
        before."""
        self._canary = self._first
        self._candidate = None
        self._running = {}

    def loaded(self, tokens: Sequence[int], row: Row) -> None:
        """A request loads `row`, the first chunk of its `tokens`."""
        if not self._audits or self._candidate is not None or self._clock() < self._next_audit:
            return
        sketch = self._sketcher.sample([row])
        if sketch:
            self._candidate = _Audit(list(tokens[: self._chunk_tokens]), row.origin, sketch)

    def stored(self, salt: str, rows: Sequence[Row]) -> None:
        """Rows of a probe are complete: all, or those of some groups."""
        sketch = self._sketcher.sample(rows)
        if not sketch:
            return
        audit = self._running.get(salt)
        if audit is None:
            if salt == self._first.salt:  # else it is an audit that a reset ended
                self._canary = None
                self._results.append(ProbeResult(CANARY, sketch))
            return
        if not sketch.keys() & audit.sketch.keys():  # rows of another KV-cache group
            return
        del self._running[salt]
        found = difference(audit.sketch, sketch)
        self._results.append(ProbeResult(None, sketch, audit.donor, found))


def _salt() -> str:
    return f"xavier-probe-{secrets.token_hex(16)}"


def _canary(chunk_tokens: int, vocabulary: int) -> list[int]:
    """One chunk, and one token more, because vLLM stores what it has computed a step before."""
    first = vocabulary // _EXCLUSIVE
    return [first + place * 31 % max(1, first) for place in range(chunk_tokens + 1)]
