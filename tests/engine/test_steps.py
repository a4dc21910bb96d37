"""What vLLM schedules in a step is recognised, steps are timed correctly even if several are under
way, and a request's wait counts only while the engine is idle."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from tests.engine.scheduling import FETCH_TIMEOUT, Scheduling
from xinference_xavier.engine.costs import PrefillRate, StepCost
from xinference_xavier.engine.workload import (
    Step,
    Steps,
    drop_unchanged_requests,
    is_steady_decode,
    step_of,
)


class Cached(NamedTuple):
    """A request that goes on in a step."""

    computed: int
    answered: int = 1
    blocks: tuple[list[int]] | None = None  # new ones


def cached(**requests: Cached) -> CachedRequestData:
    return CachedRequestData(
        [*requests],
        set(),
        [],
        {},
        [request.blocks for request in requests.values()],
        num_computed_tokens=[request.computed for request in requests.values()],
        num_output_tokens=[request.answered for request in requests.values()],
    )


def test_prompt_tokens_of_a_step_and_their_mean_depth() -> None:
    step = SchedulerOutput.make_empty()
    assert step_of(step, 7.0) == Step(7.0, 0, {})
    step.scheduled_new_reqs = [
        NewRequestData(
            "new", [], [], None, None, block_ids=(), num_computed_tokens=1000, lora_request=None
        )
    ]
    step.scheduled_cached_reqs = cached(
        old=Cached(computed=4000, answered=0), answered=Cached(computed=9000, answered=7)
    )
    step.num_scheduled_tokens = {"new": 100, "old": 300, "answered": 1}
    step.total_num_scheduled_tokens = 401
    depth = (100 * 1050 + 300 * 4150) / 400
    assert step_of(step, 8.0) == Step(8.0, 401, {"new": 100, "old": 300}, 400, depth, 3, answered=7)


def test_a_step_that_only_decodes_has_no_prompt_tokens() -> None:
    """Even with many requests that speculate. Otherwise it would distort the prefill rate."""
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {f"request-{number}": 1 + 5 for number in range(300)}
    step.total_num_scheduled_tokens = 1800
    assert step_of(step, 7.0) == Step(7.0, 1800, {}, requests=300, answered=0)


def test_requests_that_go_on_within_their_blocks_are_left_out() -> None:
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = cached(
        grown=Cached(128, blocks=([7],)), quiet=Cached(100), resumed=Cached(0)
    )
    step.scheduled_cached_reqs.resumed_req_ids.add("resumed")
    step.num_scheduled_tokens = {"new": 9, "grown": 1, "quiet": 1, "resumed": 1}
    left = drop_unchanged_requests(step)
    assert left.scheduled_cached_reqs.req_ids == ["grown", "resumed"]
    assert left.scheduled_cached_reqs.new_block_ids == [([7],), None]
    assert left.num_scheduled_tokens.keys() == {"new", "grown", "resumed"}
    assert step.scheduled_cached_reqs.num_reqs == 3, "vLLM still needs its own"
    assert drop_unchanged_requests(left) is left
    step.kv_cache_block_copies = [None]  # type: ignore[list-item]  # it is not read
    assert drop_unchanged_requests(step) is step


def running() -> SchedulerOutput:
    """A step in which one request only goes on."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = cached(r=Cached(100))
    step.num_scheduled_tokens = {"r": 1}
    step.total_num_scheduled_tokens = 1
    return step


@pytest.mark.parametrize(
    "happens",
    [
        lambda step: step.scheduled_new_reqs.append("new"),
        lambda step: step.finished_req_ids.add("other"),
        lambda step: setattr(step, "preempted_req_ids", {"other"}),
        lambda step: step.scheduled_cached_reqs.resumed_req_ids.add("r"),
        lambda step: step.scheduled_cached_reqs.new_block_ids.append(([7],)),
        lambda step: setattr(step, "kv_cache_block_copies", ["copy"]),
    ],
    ids=["begins", "ends", "is preempted", "is resumed", "gets a block", "gets a copy"],
)
def test_a_step_is_a_steady_decode_unless_something_happens_to_a_request(
    happens: Callable[[SchedulerOutput], object],
) -> None:
    step = running()
    assert is_steady_decode(step)
    happens(step)
    assert not is_steady_decode(step)


# -- times -----------------------------------------------------------------------------------


def steps_of(cost: StepCost | None = None) -> Steps:
    return Steps({}, PrefillRate(), cost or StepCost())


def test_without_a_step_there_is_nothing_to_end() -> None:
    assert steps_of().end(1.0) is None


def test_a_step_is_timed_from_its_beginning() -> None:
    steps = steps_of()
    for began in (10.0, 20.0):
        step = Step(began, tokens=1, prompts={}, requests=1)
        steps.begin(step)
        assert steps.end(began + 2.0) == (step, 2.0)


def test_an_overlapping_step_is_timed_from_the_end_of_the_one_before() -> None:
    steps = steps_of()
    first, second = (Step(began, tokens=1, prompts={}, requests=1) for began in (10.0, 10.5))
    steps.begin(first)
    steps.begin(second)
    assert steps.end(12.0) == (first, 2.0)
    assert steps.end(12.25) == (second, 0.25)


def test_an_empty_step_does_not_count_as_computing() -> None:
    """vLLM begins such steps while it waits, and ends them in turn."""
    steps = steps_of()
    empty = Step(10.0, tokens=0, prompts={})
    prefill = Step(10.5, tokens=2000, prompts={"r": 2000}, prompt_tokens=2000, requests=1)
    steps.begin(empty)
    assert not steps.computing
    steps.begin(prefill)
    assert steps.computing
    assert steps.end(10.5) == (empty, 0.5)
    assert steps.computing
    assert steps.end(12.5) == (prefill, 2.0)
    assert not steps.computing


class Device:
    """vLLM over a device that computes one step at a time. Up to `depth` steps are begun at once,
    each `launch` seconds after the one before."""

    def __init__(self, depth: int, launch: float) -> None:
        self.rate = PrefillRate()
        self.now = 0.0
        self._depth = depth
        self._launch = launch
        self._steps = Steps({}, self.rate, StepCost())
        self._ends: deque[float] = deque()
        self._free = 0.0

    def compute(self, seconds: Sequence[tuple[int, float]]) -> None:
        """Compute steps, given as (prompt tokens, seconds)."""
        for tokens, takes in seconds:
            self._steps.begin(Step(self.now, max(tokens, 1), {}, tokens, requests=1))
            self._free = max(self.now + self._launch, self._free) + takes
            self._ends.append(self._free)
            self.now += self._launch
            if len(self._ends) == self._depth:
                self._wait_for_one()
        while self._ends:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        self.now = max(self.now, self._ends.popleft())
        self._steps.end(self.now)


@pytest.mark.parametrize("launch", [0.010, 0.001], ids=["one process", "several"])
@pytest.mark.parametrize("prefills", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_prefill_rate_is_right_however_many_steps_overlap(
    depth: int, prefills: int, launch: float
) -> None:
    """Timed from the end of the step before, it would be up to 250 times too high."""
    device = Device(depth, launch)
    for _ in range(10):
        device.compute([(8192, 0.25)] * prefills + [(0, 0.01)] * 5)
        device.now += 0.5
    assert device.rate.tokens_per_second == pytest.approx(8192 / 0.25, rel=0.05)


def test_steps_with_prompts_do_not_count_as_those_that_only_decode() -> None:
    cost = StepCost()
    steps = steps_of(cost)
    for began, step in enumerate(
        [
            Step(0.0, tokens=0, prompts={}),
            Step(1.0, tokens=301, prompts={"r": 300}, prompt_tokens=300, requests=2),
            Step(2.0, tokens=2, prompts={}, requests=2),
        ]
    ):
        steps.begin(step)
        steps.end(began + 0.25 if step.prompts else began + 0.5)
    assert cost.line() == (0.5, 0.0)


def test_with_speculation_a_token_costs_less_than_its_step() -> None:
    """Two requests compute four tokens each in a step, and keep two or three of them."""
    cost = StepCost()
    steps = steps_of(cost)
    had = 7
    for number in range(400):
        steps.begin(Step(number * 0.1, tokens=8, prompts={}, requests=2, answered=had))
        steps.end((number + 1) * 0.1)
        had += 4 + number % 3
    assert cost.line() == (pytest.approx(0.1 / 2.5, rel=0.02), 0.0)


def test_tokens_are_not_counted_where_requests_come_or_go_or_stop_to_speculate() -> None:
    cost = StepCost()
    steps = steps_of(cost)
    for number, had in enumerate([7, 900, 40, 41, 50, None] * 100):
        tokens = 2 if had is None else 8
        steps.begin(Step(number * 0.1, tokens, prompts={}, requests=2, answered=had))
        steps.end((number + 1) * 0.1)
    assert cost.line() == (pytest.approx(0.1), 0.0)


def test_tokens_of_a_preempted_request_took_their_time_as_well() -> None:
    rate = PrefillRate()
    steps = Steps({}, rate, StepCost())
    steps.begin(Step(10.0, 1000, {"r": 600, "s": 400}, 1000, requests=2))
    steps.preempted("r")
    steps.end(11.0)
    assert rate.tokens_per_second == 1000.0


# -- a request's wait ------------------------------------------------------------------------


def test_idle_steps_count() -> None:
    steps = steps_of()
    since = steps.idle_time(10.0)
    for now in (10.0, 10.1, 10.2):
        steps.begin(Step(now, tokens=0, prompts={}))
    assert steps.idle_time(10.3) - since == pytest.approx(0.3)


def test_steps_that_compute_do_not_count() -> None:
    steps = steps_of()
    since = steps.idle_time(10.0)
    steps.begin(Step(10.0, tokens=512, prompts={"r": 512}, prompt_tokens=512, requests=1))
    steps.begin(Step(10.1, tokens=0, prompts={}))
    steps.begin(Step(10.2, tokens=1, prompts={}, requests=1))
    assert steps.idle_time(12.0) == since
    for end in (14.0, 14.0, 15.0):
        steps.end(end)
    assert steps.idle_time(15.0) == since
    assert steps.idle_time(16.0) == since + 1.0


def test_a_request_s_wait_lasts_from_its_first_retry_to_its_decision() -> None:
    vllm = Scheduling()
    request = vllm.ask(6, a=6)
    vllm.clock.now += 3.0  # between its arrival and its first lookup
    assert vllm.attempt(request) is None
    vllm.begin_step(100)
    vllm.clock.now += 1.0  # the engine computes for others
    vllm.manager.steps.end(vllm.clock())
    vllm.clock.now += FETCH_TIMEOUT - 1.0
    assert vllm.attempt(request) == 0
    vllm.clock.now += 3.0  # vLLM has no blocks for it yet
    assert vllm.attempt(request) == 0
    assert vllm.manager.stats()["longest_scheduling_wait_s"] == pytest.approx(FETCH_TIMEOUT - 1.0)
