"""How fast this engine computes prompts, measured as it does.

Belongs to the scheduler thread; `tokens_per_second` may be read by any. A step counts if it
computes many tokens of prompts; it lasts until the engine's next word.

A token takes longer the more there are before it, for attention looks at all of them: a line
through the last steps, the newer ones counting more, says by how much.
"""

from __future__ import annotations

from xinference_xavier.engine.trend import Trend

_MIN_TOKENS = 256
_WEIGHT = 0.2  # of the newest step: about the last ten count


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0
        self._depth = 0.0
        self._began = 0.0
        self._trend = Trend()  # of a token's seconds over its depth

    def step_begins(self, tokens: int, now: float, depth: float = 0.0) -> None:
        """`tokens` of prompts are about to be computed, which have `depth` others before them in
        the mean; `now` in monotonic seconds."""
        self.step_ends(now)
        self._tokens, self._depth, self._began = tokens, depth, now

    def step_ends(self, now: float) -> None:
        """Whatever step was under way is over; does nothing if none was."""
        tokens, self._tokens = self._tokens, 0
        seconds = now - self._began
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        rate = tokens / seconds
        before = self.tokens_per_second
        self.tokens_per_second = rate if before is None else before + _WEIGHT * (rate - before)
        self._trend.add(self._depth, seconds / tokens)

    def seconds(self, first: int, last: int) -> float | None:
        """That computing a prompt's tokens from `first` to `last` takes; None as long as nothing
        is known. While all steps were about equally deep, all tokens are taken for equal."""
        if self.tokens_per_second is None:
            return None
        slope = self._trend.slope
        if not slope:
            return (last - first) / self.tokens_per_second
        least = self._trend.y - slope * self._trend.x
        return least * (last - first) + slope * (last**2 - first**2) / 2
