"""What this engine has to compute, for routers.

The scheduler thread writes, the replica's background thread reads: each reads or replaces one
object at a time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean

from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.donor_selection import DonorSelection
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import Request
from xinference_xavier.protocol.load import (
    MAX_KNOWN,
    MAX_PROMPTS,
    Load,
    ScheduledPrompt,
    Serving,
    reported_id,
)
from xinference_xavier.protocol.tracker import SHORT_KEY, pack

_OWN_ID = re.compile(r"(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?")
"""vLLM appends eight digits to a request's id, and puts a number before each of several answers."""


_OVERHEAD, _SPEED = 0.01, 1e9
"""Seconds of a fetch and bytes per second, before the first measurement."""


class Workload:
    """`requests` are those that vLLM's scheduler has looked at. `free_tokens` returns for how many
    there are free KV blocks."""

    def __init__(
        self,
        serving: Serving,
        requests: Mapping[str, Request],
        prefill_rate: PrefillRate,
        cost_model: CostModel,
        selection: DonorSelection,
    ) -> None:
        self.free_tokens: Callable[[], int | None] = lambda: None
        self._serving = serving
        self._requests = requests
        self._prefill_rate = prefill_rate
        self._cost_model = cost_model
        self._selection = selection
        self._prompts: deque[ScheduledPrompt] = deque(maxlen=MAX_PROMPTS)

    # -- called by the scheduler thread ------------------------------------------------------

    def found(self, req_id: str, tokens: int, have: int) -> None:
        """vLLM has the first `have` of the request's tokens, or loads them."""
        request = self._requests[req_id]
        request.prompt_tokens, request.missing = tokens, tokens - have

    def scheduled(self, req_id: str, tokens: int, have: int) -> None:
        """Like `found`, when the request is scheduled for the first time."""
        self.found(req_id, tokens, have)
        request = self._requests[req_id]
        if request.probe is None and request.shares:
            keys = pack(key[-SHORT_KEY:] for key in self._selection.main_keys(request))
            self._prompts.append(ScheduledPrompt(_own_id(req_id), tokens, keys))

    def computes(self, prompts: Mapping[str, int]) -> None:
        """A step computes so many prompt tokens of these requests."""
        for req_id, tokens in prompts.items():
            if (request := self._requests.get(req_id)) is not None:
                request.missing = max(0, request.missing - tokens)

    # -- called by the replica's thread ------------------------------------------------------

    def load(self) -> Load:
        known = [*self._requests.items()]
        missing = [(each.prompt_tokens, each.missing) for _, each in known if each.missing]
        seconds = (self._prefill_rate.seconds(total - rest, total) for total, rest in missing)
        measured = self._prefill_rate.tokens_per_second is not None
        return Load(
            self._serving,
            prefill_tokens=sum(rest for _, rest in missing),
            prefill_s=sum(each for each in seconds if each is not None) if measured else None,
            requests=len(known),
            known=tuple(_own_id(req_id) for req_id, _ in known[:MAX_KNOWN]),
            rates=self._rates(),
            free_tokens=self.free_tokens(),
        )

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
        taken = []
        while self._prompts:
            taken.append(self._prompts.popleft())
        return tuple(taken)


def _own_id(req_id: str) -> str:
    match = _OWN_ID.fullmatch(req_id)
    return reported_id(match[1] if match else req_id)
