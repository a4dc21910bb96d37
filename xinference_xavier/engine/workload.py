"""What this engine has to compute, for routers.

The scheduler thread writes, the replica's background thread reads: each reads or replaces one
object at a time.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from statistics import fmean

from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.donor_selection import DonorSelection
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import Request
from xinference_xavier.engine.scheduled import MAX_DECODE_TOKENS
from xinference_xavier.engine.steps import Steps
from xinference_xavier.protocol.load import (
    MAX_KNOWN,
    MAX_PROMPT_KEYS,
    MAX_PROMPTS,
    Load,
    ScheduledPrompt,
    Serving,
    reported_id,
)
from xinference_xavier.protocol.prefixes import MAX_PREFIXES, keeping_of, prefix_of
from xinference_xavier.protocol.tracker import SHORT_KEY, pack
from xinference_xavier.replica.kept_prefixes import MAX_MARKS, ComputedPrefix, MarkedPrompt

_OWN_ID = re.compile(r"(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?")
"""vLLM appends eight digits to a request's id, and puts a number before each of several answers."""


_OVERHEAD, _SPEED = 0.01, 1e9
"""Seconds of a fetch and bytes per second, before the first measurement."""


class Workload:
    """`requests` are those that vLLM has, and `steps` what it computes of them. `free_tokens`
    returns for how many tokens there are free KV blocks. `clock` returns monotonic seconds."""

    def __init__(
        self,
        serving: Serving,
        requests: Mapping[str, Request],
        steps: Steps,
        prefill_rate: PrefillRate,
        cost_model: CostModel,
        selection: DonorSelection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.free_tokens: Callable[[], int | None] = lambda: None
        self._serving = serving
        self._requests = requests
        self._steps = steps
        self._prefill_rate = prefill_rate
        self._cost_model = cost_model
        self._selection = selection
        self._clock = clock
        self._prompts: deque[ScheduledPrompt] = deque(maxlen=MAX_PROMPTS)
        self._computed: deque[ComputedPrefix] = deque(maxlen=MAX_PREFIXES)
        self._marked: deque[MarkedPrompt] = deque(maxlen=MAX_MARKS)

    # -- called by the scheduler thread ------------------------------------------------------

    def found(self, req_id: str, tokens: int, have: int) -> None:
        """vLLM's scheduler looks at a request of so many tokens, answered ones included. It has the
        first `have` of them."""
        request = self._requests[req_id]
        request.prompt_tokens, request.missing = tokens, tokens - have
        self._steps.preempted(req_id)  # if it has been computed before

    def scheduled(self, req_id: str, prompt: int, have: int) -> None:
        """The request, whose prompt has so many tokens, is scheduled. vLLM has the first `have` of
        its tokens, or loads them."""
        request = self._requests[req_id]
        request.missing = request.prompt_tokens - have
        if request.reported or request.probe is not None or not request.shares:
            return
        request.reported = True
        name = _own_id(req_id)
        if (prefix := prefix_of(name)) is not None:
            every = tuple(dict.fromkeys(request.row_keys()))
            self._computed.append(ComputedPrefix(prefix, prompt, every))
        elif (keeping := keeping_of(name)) is not None:
            self._marked.append(MarkedPrompt(keeping, tuple(dict.fromkeys(request.row_keys()))))
        if name.isprintable():
            keys = self._selection.main_keys(request)[:MAX_PROMPT_KEYS]
            short = pack(key[-SHORT_KEY:] for key in keys)
            self._prompts.append(ScheduledPrompt(name, prompt, short))

    # -- called by the replica's thread ------------------------------------------------------

    def load(self) -> Load:
        all_ = [*self._requests.items()]
        # Of others vLLM does not know yet how much it has.
        known = [(req_id, each) for req_id, each in all_ if each.prompt_tokens]
        # A prompt's last tokens cannot be told from an answer's.
        missing = [
            (each.prompt_tokens, each.missing)
            for _, each in known
            if each.missing > MAX_DECODE_TOKENS
            and not (each.wait is not None and each.wait.leaves_it_to_peer)
        ]
        names = (_own_id(req_id) for req_id, _ in known)
        return Load(
            self._serving,
            prefill_tokens=sum(rest for _, rest in missing),
            prefill_s=self._seconds(missing),
            requests=len(all_),
            known=tuple(islice(filter(str.isprintable, names), MAX_KNOWN)),
            rates=self._rates(),
            free_tokens=self.free_tokens(),
        )

    def _seconds(self, missing: list[tuple[int, int]]) -> float | None:
        speed = self._prefill_rate.tokens_per_second
        if speed is None:
            return None
        seconds = (self._prefill_rate.seconds(total - rest, total) for total, rest in missing)
        passed = 0.0
        if (computing := self._steps.under_way()) is not None:
            step, since = computing
            passed = min(self._clock() - since, step.prompt_tokens / speed)
        return max(0.0, sum(each or 0.0 for each in seconds) - passed)

    def _rates(self) -> tuple[float, float, float, float] | None:
        line = self._prefill_rate.line()
        if line is None:
            return None
        rates = [*self._cost_model.report()["rates"].values()]
        overheads = [max(0.0, rate["overhead_s"]) for rate in rates]
        speeds = [1 / rate["bytes_per_s"] for rate in rates if rate["bytes_per_s"]]
        return *line, fmean(overheads or [_OVERHEAD]), fmean(speeds or [1 / _SPEED])

    def take_prompts(self) -> tuple[ScheduledPrompt, ...]:
        """Those that were scheduled since the last call."""
        return tuple(self._prompts.popleft() for _ in range(len(self._prompts)))

    def take_computed(self) -> tuple[ComputedPrefix, ...]:
        """The prefixes that were scheduled since the last call."""
        return tuple(self._computed.popleft() for _ in range(len(self._computed)))

    def take_marked(self) -> tuple[MarkedPrompt, ...]:
        """The prompts to keep that were scheduled since the last call."""
        return tuple(self._marked.popleft() for _ in range(len(self._marked)))


def _own_id(req_id: str) -> str:
    """A tracker takes it if it is printable: clients choose ids."""
    match = _OWN_ID.fullmatch(req_id)
    return reported_id(match[1] if match else req_id)
