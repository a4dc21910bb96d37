"""How fast this engine computes prompts, measured as it does.

Belongs to the scheduler thread; `tokens_per_second` may be read by any. A step counts if it
computes many tokens at once, as only prefill does; it lasts until the engine's next word.
"""

from __future__ import annotations

_MIN_TOKENS = 256
_WEIGHT = 0.2  # of the newest step: about the last ten count


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0
        self._began = 0.0

    def step_begins(self, tokens: int, now: float) -> None:
        """`tokens` are about to be computed; `now` in monotonic seconds."""
        self.step_ends(now)
        self._tokens, self._began = tokens, now

    def step_ends(self, now: float) -> None:
        """Whatever step was under way is over; does nothing if none was."""
        tokens, self._tokens = self._tokens, 0
        seconds = now - self._began
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate = tokens / seconds
        before = self.tokens_per_second
        self.tokens_per_second = rate if before is None else before + _WEIGHT * (rate - before)
