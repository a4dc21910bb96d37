"""What vLLM's scheduler says of a step.

Most steps answer one token to each request, and nothing else happens. Where that is so, neither
vLLM's offloading scheduler nor we need to look at each request.

Belongs to the scheduler thread.
"""

from copy import copy

from vllm.v1.core.sched.output import SchedulerOutput

from xinference_xavier.engine import compat
from xinference_xavier.engine.steps import Step

MAX_DECODE_TOKENS = 16
"""Of one request in a step: one token, and the speculated ones."""


def goes_on(step: SchedulerOutput) -> bool:
    """Whether all requests only go on within their blocks, so that vLLM's scheduler would find
    nothing to do, unless it was asked something before."""
    cached = step.scheduled_cached_reqs
    return not (
        step.scheduled_new_reqs
        or step.finished_req_ids
        or step.preempted_req_ids
        or cached.resumed_req_ids
        or any(cached.new_block_ids)
        or compat.copies_blocks(step)
    )


def without_quiet(step: SchedulerOutput) -> SchedulerOutput:
    """The step without the requests that go on within their blocks, as most do while they answer.

    A full block is followed by a new one, or by the end. So vLLM stores the same chunks, those that
    answers have filled a step later than otherwise.
    """
    cached = step.scheduled_cached_reqs
    loud = {
        req_id: blocks
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True)
        if blocks or req_id in cached.resumed_req_ids
    }
    if len(loud) == len(cached.req_ids) or compat.copies_blocks(step):
        return step
    quiet = set(cached.req_ids) - loud.keys()
    without = copy(step)
    without.scheduled_cached_reqs = copy(cached)
    without.scheduled_cached_reqs.req_ids = list(loud)
    without.scheduled_cached_reqs.new_block_ids = list(loud.values())
    without.num_scheduled_tokens = {
        req_id: count for req_id, count in step.num_scheduled_tokens.items() if req_id not in quiet
    }
    return without


def step_of(step: SchedulerOutput, began: float) -> Step:
    """Cheap for steps that only decode."""
    tokens = step.total_num_scheduled_tokens
    if tokens == len(step.num_scheduled_tokens):  # one each
        return Step(began, tokens, {})
    prompts = {
        req_id: count
        for req_id, count in step.num_scheduled_tokens.items()
        if count > MAX_DECODE_TOKENS
    }
    return Step(began, tokens, prompts, sum(prompts.values()), _depth_of(prompts, step))


def _depth_of(prompts: dict[str, int], step: SchedulerOutput) -> float:
    """The mean number of tokens before each of these prompt tokens."""
    if not prompts:
        return 0.0
    cached = step.scheduled_cached_reqs
    before = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    before |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    depths = sum((before.get(req_id, 0) + count / 2) * count for req_id, count in prompts.items())
    return depths / sum(prompts.values())
