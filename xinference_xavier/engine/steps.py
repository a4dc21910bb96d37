"""What the engine computes, step by step, and how long each step takes.

With asynchronous scheduling, CUDA's default, and with pipeline parallelism, vLLM schedules a step
while the one before it is still being computed. Steps end in the order in which they began, and
one by one: a step took as long as from its beginning, or from the end of the step before it if that
was later, to its own end.

Belongs to the scheduler thread. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Step(NamedTuple):
    began: float
    tokens: int
    """That it computes; a step of none only tells the workers something."""
    prompt_tokens: int = 0
    """Of these."""
    depth: float = 0.0
    """Tokens before each of the prompts' tokens, in the mean."""


class Steps:
    def __init__(self) -> None:
        self._begun: deque[Step] = deque()  # and not ended
        self._computing = 0  # of these, those that compute anything
        self._ended = 0.0  # when the last one did
        self._computed = 0.0  # seconds in which any step was computed
        self._busy_since = 0.0

    @property
    def computing(self) -> bool:
        """Whether a step that computes anything is under way."""
        return self._computing > 0

    def begin(self, step: Step) -> None:
        if step.tokens:
            if not self._computing:
                self._busy_since = step.began
            self._computing += 1
        self._begun.append(step)

    def end(self, now: float) -> tuple[Step, float] | None:
        """The oldest step is over: that step and the seconds it took; None if none was begun."""
        if not self._begun:
            return None
        step = self._begun.popleft()
        seconds = now - max(step.began, self._ended)
        self._ended = now
        if step.tokens:
            self._computing -= 1
            if not self._computing:
                self._computed += now - self._busy_since
        return step, seconds

    def idle_time(self, now: float) -> float:
        """A clock that stands still while the engine computes. A request that waits meanwhile would
        have waited for the engine anyway."""
        computed = self._computed + (now - self._busy_since if self._computing else 0.0)
        return now - computed
