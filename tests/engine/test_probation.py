"""Generated chunks are on probation until another request needs them."""

from collections.abc import Mapping

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.vllm_scheduler import MakeEngine, slide_one_layer
from xinference_xavier.engine.compat import key_positions


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("forgets", [False, True], ids=["in vLLM's own cache", "in the pool"])
def test_until_another_request_needs_them(
    make_engine: MakeEngine, cache_config: KVCacheConfig, forgets: bool, window: int | None
) -> None:
    """A request that was preempted loads its own again, which does not count."""
    if window is not None:
        slide_one_layer(cache_config, window)
    engine = make_engine()
    prompts = {"a": [*range(300, 430)], "b": [*range(600, 720)]}  # a chunk has 128 tokens
    ends: dict[str, Mapping[OffloadKey, int]] = {}
    for name, prompt in prompts.items():
        engine.ask(name, prompt, tokens=150)
        ends[name] = key_positions(engine.own.manager.requests[name].context)

    def chunks(name: str, probation: bool) -> list[int]:
        """The ends of the request's chunks, of all groups."""
        rows = (row for row in engine.own.pool.rows() if row.probation == probation)
        return sorted({ends[name][row.key] for row in rows if row.key in ends[name]})

    preempted: set[str] = set()
    while engine.scheduler.has_requests():
        preempted |= engine.step().preempted_req_ids or set()
    assert preempted == ({"b"} if window is None else set())
    assert [chunks(name, False) for name in prompts] == [[128], []]
    assert [chunks(name, True) for name in prompts] == [[256], [128, 256]]
    if forgets:
        engine.forget()
    engine.ask("next turn", [*prompts["b"], *[7] * 20], tokens=2)
    engine.run()
    assert [chunks(name, True) for name in prompts] == [[256], [256]]
