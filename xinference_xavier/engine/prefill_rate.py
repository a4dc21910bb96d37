"""How fast this engine computes prompts, measured as it does.

Belongs to the scheduler thread; `tokens_per_second` may be read by any. A step counts if it
computes many tokens at once, as only prefill does; it lasts until the engine's next word.

A token takes longer the more there are before it, for attention looks at all of them: a line
through the last steps, the newer ones counting more, says by how much.
"""

from __future__ import annotations

_MIN_TOKENS = 256
_WEIGHT = 0.2  # of the newest step: about the last ten count
_SAME_DEPTH = 0.05  # variance of depths, in squares of their mean


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0
        self._depth = 0.0
        self._began = 0.0
        self._count = 0
        self._mean_depth = 0.0
        self._mean_seconds = 0.0  # for a token
        self._variance = 0.0  # of the depths
        self._covariance = 0.0

    def step_begins(self, tokens: int, now: float, depth: float = 0.0) -> None:
        """`tokens` are about to be computed, which have `depth` others before them in the mean;
        `now` in monotonic seconds."""
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
        self._learn(self._depth, seconds / tokens)

    def _learn(self, depth: float, seconds: float) -> None:
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        deeper, longer = depth - self._mean_depth, seconds - self._mean_seconds
        self._mean_depth += weight * deeper
        self._mean_seconds += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * deeper**2)
        self._covariance = (1 - weight) * (self._covariance + weight * deeper * longer)

    def seconds(self, first: int, last: int) -> float | None:
        """That computing a prompt's tokens from `first` to `last` takes; None as long as nothing
        is known. While all steps were about equally deep, all tokens are taken for equal."""
        if self.tokens_per_second is None:
            return None
        if self._variance <= _SAME_DEPTH * self._mean_depth**2 or self._covariance <= 0:
            return (last - first) / self.tokens_per_second
        most = self._mean_seconds / self._mean_depth
        slope = min(self._covariance / self._variance, most)
        least = self._mean_seconds - slope * self._mean_depth
        return least * (last - first) + slope * (last**2 - first**2) / 2
