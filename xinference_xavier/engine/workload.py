"""What the engine computes in each step, how long that takes, and what it still has to compute.

With asynchronous scheduling, CUDA's default, and with pipeline parallelism, vLLM schedules a step
while it still computes the one before. Steps end one by one, in the order in which they began. So a
step is timed from its beginning, or from the end of the step before it if that is later.

Most steps answer one token to each request, and nothing else happens. Where that is so, neither
vLLM's offloading scheduler nor we need to look at each request.

`Workload` is for routers: the scheduler thread writes, the replica's background thread reads, and
each reads or replaces one object at a time. Everything else belongs to the scheduler thread, except
that any thread may call `under_way`. Times are monotonic seconds.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from itertools import islice
from statistics import fmean
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from xinference_xavier.engine import compat
from xinference_xavier.engine.costs import CostModel, PrefillRate, StepCost
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.request import Request
from xinference_xavier.peers import IN_PLACE
from xinference_xavier.protocol.load import (
    MAX_KNOWN,
    MAX_PROMPT_KEYS,
    MAX_REPORTS,
    Load,
    RequestReport,
    is_prefill,
    reported_id,
)
from xinference_xavier.protocol.prefixes import MAX_PREFIXES, keeping_of, prefix_of
from xinference_xavier.protocol.tracker import pack_short
from xinference_xavier.replica.kept_prefixes import MAX_MARKS, ComputedPrefix, MarkedPrompt


class Step(NamedTuple):
    """A step of the engine, which computes `tokens` of `requests`. `prompt_tokens` of them belong
    to prompts, and have `depth` tokens before them on average.

    `prompts` are these tokens by request, without requests that were preempted meanwhile.
    `answered` are the tokens that the requests had answered before; None if each computes one. A
    step without tokens only carries messages to the workers.
    """

    began: float
    tokens: int
    prompts: dict[str, int]
    prompt_tokens: int = 0
    depth: float = 0.0
    requests: int = 0
    answered: int | None = None


class Steps:
    """The steps that compute `requests`, vLLM's unfinished ones; measures how fast prompts and
    answers are."""

    def __init__(
        self, requests: Mapping[str, Request], prefill_rate: PrefillRate, step_cost: StepCost
    ) -> None:
        self.prefill_rate = prefill_rate
        self.step_cost = step_cost
        self._requests = requests
        self._pending: deque[Step] = deque()
        self._computing = 0  # pending steps that compute anything
        self._ended = 0.0  # when the latest step ended
        self._computed = 0.0  # seconds in which any step was computed
        self._busy_since = 0.0
        self._answered: int | None = None  # before the latest ended step

    def __len__(self) -> int:
        """The number of pending steps."""
        return len(self._pending)

    @property
    def computing(self) -> bool:
        """True if a pending step computes anything."""
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
            self.prefill_rate.add(step.prompt_tokens, seconds, step.depth)
            for req_id, tokens in step.prompts.items():
                if (request := self._requests.get(req_id)) is not None:
                    request.missing -= tokens
        elif step.tokens:
            self.step_cost.add(step.requests, seconds, self._tokens_of(step))
        self._answered = step.answered
        return step, seconds

    def _tokens_of(self, step: Step) -> int | None:
        """The tokens that a step answers which only decodes; None if unknown.

        Requests that speculate keep some of their tokens. vLLM says how many they have when it
        schedules them again. That is of no use if requests have come or gone in between.
        """
        if step.answered is None:
            return step.tokens
        if self._answered is None:
            return None
        tokens = step.answered - self._answered
        return tokens if step.requests <= tokens <= step.tokens else None

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


MAX_DECODE_TOKENS = 16
"""Most tokens of a decoding request in one step: one, and the speculated ones."""


def is_steady_decode(step: SchedulerOutput) -> bool:
    """True if every request only appends to its current block, so the offloading scheduler has
    nothing to do, unless it was called earlier in this step. Not to call it saves 1.3 % of a step
    with 4 requests, 0.5 % with 32, measured as in `WorkerSide`."""
    cached = step.scheduled_cached_reqs
    return not (
        step.scheduled_new_reqs
        or step.finished_req_ids
        or step.preempted_req_ids
        or cached.resumed_req_ids
        or any(cached.new_block_ids)
        or compat.copies_blocks(step)
    )


def drop_unchanged_requests(step: SchedulerOutput) -> SchedulerOutput:
    """The step without the requests that stay within their blocks, as most do while they answer.

    A full block is followed by a new one, or by the end. So vLLM stores the same chunks, those that
    answers have filled a step later than otherwise. It saves 0.4 % of such a step with 4 requests,
    0.9 % with 32, measured as in `WorkerSide`.
    """
    cached = step.scheduled_cached_reqs
    changed = {
        req_id: blocks
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if blocks or req_id in cached.resumed_req_ids
    }
    if len(changed) == len(cached.req_ids) or compat.copies_blocks(step):
        return step
    unchanged = set(cached.req_ids) - changed.keys()
    without = copy(step)
    without.scheduled_cached_reqs = copy(cached)
    without.scheduled_cached_reqs.req_ids = list(changed)
    without.scheduled_cached_reqs.new_block_ids = list(changed.values())
    without.num_scheduled_tokens = {
        req_id: count
        for req_id, count in step.num_scheduled_tokens.items()
        if req_id not in unchanged
    }
    return without


def step_of(step: SchedulerOutput, began: float) -> Step:
    """A step as the scheduler planned it. Cheap for steps that only decode."""
    tokens = step.total_num_scheduled_tokens
    requests = len(step.num_scheduled_tokens)
    if tokens == requests:  # one each
        return Step(began, tokens, {}, requests=requests)
    prompts = {
        req_id: count
        for req_id, count in step.num_scheduled_tokens.items()
        if count > MAX_DECODE_TOKENS
    }
    answered = sum(step.scheduled_cached_reqs.num_output_tokens)
    depth = _depth_of(prompts, step)
    return Step(began, tokens, prompts, sum(prompts.values()), depth, requests, answered)


def _depth_of(prompts: dict[str, int], step: SchedulerOutput) -> float:
    """The mean number of tokens before each of these prompt tokens."""
    if not prompts:
        return 0.0
    cached = step.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    before |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    depths = sum((before.get(req_id, 0) + count / 2) * count for req_id, count in prompts.items())
    return depths / sum(prompts.values())


_OWN_ID = re.compile(r"(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?")
"""vLLM appends eight digits to a request's id, and puts a number before each of several answers."""


class Retention:
    """How long vLLM's own prefix cache keeps what it holds: the time in which as many tokens are
    written as fit into it, since it evicts what was used longest ago.

    The scheduler thread counts, the replica's thread reads.
    """

    INTERVAL, LONGEST = 2.0, 600.0  # seconds

    def __init__(self, capacity: int) -> None:
        """`capacity` is in tokens; 0 without a prefix cache."""
        self._capacity = capacity
        self._written = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=int(self.LONGEST / self.INTERVAL))

    def wrote(self, tokens: int) -> None:
        self._written += tokens

    def seconds(self, now: float) -> float:
        """The time that it keeps them, at most `LONGEST`. Call it every few seconds."""
        written = self._written
        if not self._marks or now - self._marks[-1][0] >= self.INTERVAL:
            self._marks.append((now, written))
        evicted = written - self._capacity
        since = next((at for at, mark in reversed(self._marks) if mark <= evicted), None)
        return self.LONGEST if since is None else min(self.LONGEST, now - since)


_OVERHEAD, _SPEED = 0.01, 1e9
"""Seconds of a fetch and bytes per second, before the first measurement."""


class Workload:
    """`requests` are those that vLLM has, and `steps` what it computes of them. `clock` returns
    monotonic seconds."""

    def __init__(
        self,
        facts: SchedulerFacts,
        requests: Mapping[str, Request],
        steps: Steps,
        cost_model: CostModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free_tokens = facts.kv_tokens
        self.retention = Retention(facts.cached_tokens)
        self._facts = facts
        self._requests = requests
        self._steps = steps
        self._cost_model = cost_model
        self._clock = clock
        self.prompts: deque[RequestReport] = deque(maxlen=MAX_REPORTS)
        self.answers: deque[RequestReport] = deque(maxlen=MAX_REPORTS)
        self.computed: deque[ComputedPrefix] = deque(maxlen=MAX_PREFIXES)
        self.marked: deque[MarkedPrompt] = deque(maxlen=MAX_MARKS)

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
        loaded, request.missing = request.missing, request.prompt_tokens - have
        self.retention.wrote(max(0, loaded - request.missing))
        if request.counted.reported or request.probe is not None or not request.shares:
            return
        request.counted.reported = True
        name = own_id(req_id)
        if (prefix := prefix_of(name)) is not None:
            every = tuple(dict.fromkeys(request.row_keys()))
            self.computed.append(ComputedPrefix(prefix, prompt, every))
        elif (keeping := keeping_of(name)) is not None:
            self.marked.append(MarkedPrompt(keeping, tuple(dict.fromkeys(request.row_keys()))))
        if name.isprintable():
            keys = request.main_keys()[:MAX_PROMPT_KEYS]
            short = pack_short(keys)
            self.prompts.append(RequestReport(name, prompt, short))

    def answered(self, req_id: str, tokens: int) -> None:
        """The request has ended with an answer of so many tokens."""
        name = own_id(req_id)
        if self._requests[req_id].probe is None and is_for_client(name) and name.isprintable():
            self.answers.append(RequestReport(name, 0, b"", tokens))

    def blocks_freed(self, free_tokens: int) -> None:
        """After a step, there are free KV blocks for so many tokens."""
        self._free_tokens = free_tokens

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
        names = (own_id(req_id) for req_id, _ in known)
        return Load(
            self._facts.serving,
            prefill_tokens=sum(rest for _, rest in missing),
            prefill_s=self._seconds(missing),
            requests=len(all_),
            decoding=sum(each.missing <= MAX_DECODE_TOKENS for _, each in known),
            known=tuple(islice(filter(str.isprintable, names), MAX_KNOWN)),
            rates=self._rates(),
            step=self._steps.step_cost.line(),
            free_tokens=self._free_tokens,
            kv_tokens=self._facts.kv_tokens,
            retention_s=self.retention.seconds(self._clock()),
        )

    def _seconds(self, missing: list[tuple[int, int]]) -> float | None:
        rate = self._steps.prefill_rate
        speed = rate.tokens_per_second
        if speed is None:
            return None
        seconds = (rate.seconds(total - rest, total) for total, rest in missing)
        passed = 0.0
        if (computing := self._steps.under_way()) is not None:
            step, since = computing
            passed = min(self._clock() - since, step.prompt_tokens / speed)
        return max(0.0, sum(each or 0.0 for each in seconds) - passed)

    def _rates(self) -> tuple[float, float, float, float] | None:
        line = self._steps.prefill_rate.line()
        if line is None:
            return None
        found = self._cost_model.rates().values()
        rates = [each for each in found if each["transport"] != IN_PLACE]  # costs what a hit costs
        overheads = [max(0.0, rate["overhead_s"]) for rate in rates]
        speeds = [1 / rate["bytes_per_s"] for rate in rates if rate["bytes_per_s"]]
        return *line, fmean(overheads or [_OVERHEAD]), fmean(speeds or [1 / _SPEED])


def own_id(req_id: str) -> str:
    """The id without what vLLM has added. A tracker takes it if it is printable, because clients
    choose ids."""
    match = _OWN_ID.fullmatch(req_id)
    return reported_id(match[1] if match else req_id)


def is_for_client(name: str) -> bool:
    """False for what we request ourselves: the prompt of a request that another replica answers,
    and a named prefix."""
    return not is_prefill(name) and prefix_of(name) is None
