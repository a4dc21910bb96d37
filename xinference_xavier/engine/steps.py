"""What the engine computes in each step, and how long that takes.

With asynchronous scheduling, CUDA's default, and with pipeline parallelism, vLLM schedules a step
while it still computes the one before. Steps end one by one, in the order in which they began. So a
step is timed from its beginning, or from the end of the step before it if that is later.

Belongs to the scheduler thread. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Step(NamedTuple):
    """Of `tokens`, `prompt_tokens` belong to prompts, with `depth` others before each on average.

    A step without tokens computes nothing. It only carries messages to the workers.
    """

    began: float
    tokens: int
    prompt_tokens: int = 0
    depth: float = 0.0


class Steps:
    def __init__(self) -> None:
        self._pending: deque[Step] = deque()
        self._computing = 0  # pending steps that compute anything
        self._ended = 0.0  # when the latest step ended
        self._computed = 0.0  # seconds in which any step was computed
        self._busy_since = 0.0

    @property
    def computing(self) -> bool:
        """Whether a pending step computes anything."""
        return self._computing > 0

    def begin(self, step: Step) -> None:
        if step.tokens:
            if not self._computing:
                self._busy_since = step.began
            self._computing += 1
        self._pending.append(step)

    def end(self, now: float) -> tuple[Step, float] | None:
        """End the oldest step. Returns it with its duration in seconds; None without a step."""
        if not self._pending:
            return None
        step = self._pending.popleft()
        seconds = now - max(step.began, self._ended)
        self._ended = now
        if step.tokens:
            self._computing -= 1
            if not self._computing:
                self._computed += now - self._busy_since
        return step, seconds

    def idle_time(self, now: float) -> float:
        """A clock that stands still while the engine computes: a request would wait then anyway."""
        computed = self._computed + (now - self._busy_since if self._computing else 0.0)
        return now - computed
