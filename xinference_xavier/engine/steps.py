"""What the engine computes in each step, and how long that takes.

With asynchronous scheduling, CUDA's default, and with pipeline parallelism, vLLM schedules a step
while it still computes the one before. Steps end one by one, in the order in which they began. So a
step is timed from its beginning, or from the end of the step before it if that is later.

Belongs to the scheduler thread; any thread may call `under_way`. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import Request


class Step(NamedTuple):
    """Of `tokens`, `prompt_tokens` belong to prompts, with `depth` others before each on average.

    `prompts` has how many of them by request, without those that were preempted meanwhile. A step
    without tokens computes nothing. It only carries messages to the workers.
    """

    began: float
    tokens: int
    prompts: dict[str, int]
    prompt_tokens: int = 0
    depth: float = 0.0


class Steps:
    """Of `requests`, which are those that vLLM has. They tell how fast prompts are computed."""

    def __init__(self, requests: Mapping[str, Request], prefill_rate: PrefillRate) -> None:
        self._requests = requests
        self._prefill_rate = prefill_rate
        self._pending: deque[Step] = deque()
        self._computing = 0  # pending steps that compute anything
        self._ended = 0.0  # when the latest step ended
        self._computed = 0.0  # seconds in which any step was computed
        self._busy_since = 0.0

    def __len__(self) -> int:
        """The number of pending steps."""
        return len(self._pending)

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
        """vLLM received the output of the oldest step: what it computed is not missing any more.
        Returns it with its duration in seconds; None without a step."""
        if not self._pending:
            return None
        step = self._pending.popleft()
        seconds = now - max(step.began, self._ended)
        self._ended = now
        if step.tokens:
            self._computing -= 1
            if not self._computing:
                self._computed += now - self._busy_since
        if step.prompt_tokens:
            self._prefill_rate.add(step.prompt_tokens, seconds, step.depth)
            for req_id, tokens in step.prompts.items():
                if (request := self._requests.get(req_id)) is not None:
                    request.missing -= tokens
        return step, seconds

    def preempted(self, req_id: str) -> None:
        """What the pending steps compute for the request is lost."""
        for step in self._pending:
            step.prompts.pop(req_id, None)

    def under_way(self) -> tuple[Step, float] | None:
        """The step that is being computed, and since when."""
        try:
            step = self._pending[0]
        except IndexError:
            return None
        return step, max(step.began, self._ended)

    def idle_time(self, now: float) -> float:
        """A clock that stands still while the engine computes: a request would wait then anyway."""
        computed = self._computed + (now - self._busy_since if self._computing else 0.0)
        return now - computed
