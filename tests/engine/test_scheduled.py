"""Steps in which all requests only go on are recognised, and prompts are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from xinference_xavier.engine.workload import Step, goes_on, step_of, without_quiet


def test_prompt_tokens_of_a_step_and_their_mean_depth() -> None:
    step = SchedulerOutput.make_empty()
    assert step_of(step, 7.0) == Step(7.0, 0, {})
    step.scheduled_new_reqs = [
        NewRequestData(
            "new", [], [], None, None, block_ids=(), num_computed_tokens=1000, lora_request=None
        )
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        ["old", "answered"],
        set(),
        [],
        {},
        [None, None],
        num_computed_tokens=[4000, 9000],
        num_output_tokens=[0, 7],
    )
    step.num_scheduled_tokens = {"new": 100, "old": 300, "answered": 1}
    step.total_num_scheduled_tokens = 401
    depth = (100 * 1050 + 300 * 4150) / 400
    assert step_of(step, 8.0) == Step(8.0, 401, {"new": 100, "old": 300}, 400, depth)


def test_a_step_that_only_decodes_has_no_prompt_tokens() -> None:
    """Even with many requests that speculate. Otherwise it would distort the prefill rate."""
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {f"request-{number}": 1 + 5 for number in range(300)}
    step.total_num_scheduled_tokens = 1800
    assert step_of(step, 7.0) == Step(7.0, 1800, {})


def test_requests_that_go_on_within_their_blocks_are_left_out() -> None:
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        ["grown", "quiet", "resumed"],
        {"resumed"},
        [],
        {},
        [([7],), None, None],
        num_computed_tokens=[128, 100, 0],
        num_output_tokens=[1, 1, 1],
    )
    step.num_scheduled_tokens = {"new": 9, "grown": 1, "quiet": 1, "resumed": 1}
    left = without_quiet(step)
    assert left.scheduled_cached_reqs.req_ids == ["grown", "resumed"]
    assert left.scheduled_cached_reqs.new_block_ids == [([7],), None]
    assert left.num_scheduled_tokens.keys() == {"new", "grown", "resumed"}
    assert step.scheduled_cached_reqs.num_reqs == 3, "vLLM still needs its own"
    assert without_quiet(left) is left
    step.kv_cache_block_copies = [None]  # type: ignore[list-item]  # it is not read
    assert without_quiet(step) is step


def running() -> SchedulerOutput:
    """A step in which one request only goes on."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        ["r"], set(), [], {}, [None], num_computed_tokens=[100], num_output_tokens=[1]
    )
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
def test_a_step_goes_on_unless_something_happens_to_a_request(
    happens: Callable[[SchedulerOutput], object],
) -> None:
    step = running()
    assert goes_on(step)
    happens(step)
    assert not goes_on(step)
