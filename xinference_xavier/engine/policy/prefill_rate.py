"""How fast this engine computes prompts.

Belongs to the scheduler thread; any thread may read. Only steps with many prompt tokens count. The
rate is the sum of their tokens over the sum of their seconds: if vLLM reads a step's output late,
that step seems too long and the next one too short.

A token takes longer the deeper it is, because attention covers all tokens before it. A line through
the latest steps measures by how much.
"""

from __future__ import annotations

from xinference_xavier.engine.policy.linear_fit import LinearFit

_MIN_TOKENS = 256
_WEIGHT = 0.2  # of the newest step: about the last ten count


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0.0  # mean per step
        self._seconds = 0.0
        self._fit = LinearFit()  # seconds per token over depth

    def add(self, tokens: int, seconds: float, depth: float = 0.0) -> None:
        """Count a step of `tokens` prompt tokens, with `depth` tokens before each on average."""
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        weight = 1.0 if self.tokens_per_second is None else _WEIGHT
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self.tokens_per_second = self._tokens / self._seconds
        self._fit.add(depth, seconds / tokens)

    def seconds(self, first: int, last: int) -> float | None:
        """Predict how long it takes to compute a prompt's tokens from `first` up to `last`.

        None before the first measurement. Depth is ignored while all steps were about equally deep.
        """
        if (line := self.line()) is None:
            return None
        token_s, depth_s = line
        return (last - first) * (token_s + depth_s * (first + last) / 2)

    def line(self) -> tuple[float, float] | None:
        """Seconds that a prompt's first token takes, and how much longer a token takes for each
        before it. None before the first measurement."""
        if self.tokens_per_second is None:
            return None
        slope = self._fit.slope  # another thread may change it
        if not slope:
            return 1 / self.tokens_per_second, 0.0
        return self._fit.predict(0.0), slope
