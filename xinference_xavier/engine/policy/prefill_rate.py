"""How fast this engine computes prompts, measured as it does.

Belongs to the scheduler thread; `tokens_per_second` may be read by any. Steps that compute many
tokens of prompts count, all their tokens over all their seconds: what one step seems to take too
long, because vLLM looked late for its output, the next one seems to take too short.

A token takes longer the more there are before it, for attention looks at all of them: a line
through the last steps, the newer ones counting more, says by how much.
"""

from __future__ import annotations

from xinference_xavier.engine.policy.linear_fit import LinearFit

_MIN_TOKENS = 256
_WEIGHT = 0.2  # of the newest step: about the last ten count


class PrefillRate:
    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self._tokens = 0.0  # of a step, in the mean
        self._seconds = 0.0
        self._trend = LinearFit()  # of a token's seconds over its depth

    def add(self, tokens: int, seconds: float, depth: float = 0.0) -> None:
        """A step computed so many tokens of prompts, which have `depth` others before them in the
        mean."""
        if tokens < _MIN_TOKENS or seconds <= 0:
            return
        weight = 1.0 if self.tokens_per_second is None else _WEIGHT
        self._tokens += weight * (tokens - self._tokens)
        self._seconds += weight * (seconds - self._seconds)
        self.tokens_per_second = self._tokens / self._seconds
        self._trend.add(depth, seconds / tokens)

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
