"""Fetched rows stay pinned for the requests that wait for them, and for nobody else."""

from unittest.mock import Mock

import pytest
from vllm.v1.kv_offload.base import LookupResult

from tests.engine.scheduling import (
    FETCH_TIMEOUT,
    Scheduling,
    assert_nothing_left,
    chunks,
    slow_engine,
    waiting,
    waiting_for_prefill,
)
from xinference_xavier.engine import request as request_module
from xinference_xavier.engine.request import MAX_DONORS, Request


class TestFetchedRows:
    def test_stay_while_vllm_has_no_blocks_for_their_request(self) -> None:
        vllm = Scheduling(slots=8)
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        for number in range(4):
            assert vllm.attempt(request) == 6  # a HIT that is not loaded
            vllm.fill(chunks(f"other {number}", 2))
        assert vllm.attempt(request) == 6

    def test_are_unpinned_after_a_time_limit_and_not_fetched_again(self) -> None:
        """They were evicted in the end; the request computes them instead."""
        vllm = Scheduling(slots=6)
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(request) == 6
        vllm.clock.now += 2 * FETCH_TIMEOUT + 0.01
        assert vllm.attempt(request) == 6
        assert_nothing_left(vllm)
        vllm.fill(chunks("other", 6))
        assert [vllm.attempt(request), vllm.attempt(request)] == [0, 0]
        assert len(vllm.tier.fetches) == 1
        assert_nothing_left(vllm)

    def test_are_not_evicted_by_another_request_s_fetch(self) -> None:
        """Many requests want far more than the pool holds. Each one fetches at most once; those
        without room compute."""
        vllm = Scheduling(slots=8)
        prompts = [chunks(f"prompt {number}", 4) for number in range(6)]
        vllm.tier.peers_hold(a=[key for keys in prompts for key in keys])
        crowd = [vllm.arrive(f"r{number}", keys) for number, keys in enumerate(prompts)]
        assert [vllm.scan(request) for request in crowd] == 6 * [None]
        vllm.end_step()
        assert [fetch.rows[0].key for fetch in vllm.tier.fetches] == [
            prompts[0][0], prompts[1][0],
        ]  # fmt: skip
        assert [vllm.scan(request) for request in crowd] == [None, None, 0, 0, 0, 0]
        vllm.end_step()
        for fetch in vllm.tier.fetches:
            vllm.tier.end(fetch)
        vllm.end_step()
        for request in crowd[2:]:  # computed meanwhile; there is no room to store them
            vllm.schedule(request, 0)
            assert vllm.begin_store(request, request.keys) == []
            vllm.finish(request)
        for request in crowd[:2]:
            assert vllm.scan(request) == 4
            vllm.load_and_finish(request, 4)
        assert len(vllm.tier.fetches) == 2
        assert_nothing_left(vllm)

    def test_are_unpinned_if_their_request_does_not_need_them(self, vllm: Scheduling) -> None:
        """vLLM's own prefix cache holds all of it meanwhile."""
        request = waiting(vllm)
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.scan(request, own_prefix=6) == 0
        vllm.schedule(request, 0, own_prefix=6)
        vllm.end_step()
        assert_nothing_left(vllm)

    def test_are_not_fetched_for_a_request_aborted_in_the_same_step(self, vllm: Scheduling) -> None:
        request = vllm.ask(6, a=6)
        vllm.scan(request)
        vllm.finish(request)
        vllm.end_step()
        assert vllm.tier.fetches == []

    def test_do_not_evict_the_prefix_they_continue(self) -> None:
        """The prefix is the oldest in the pool."""
        vllm = Scheduling(slots=8)
        vllm.fill(chunks("prompt", 4))
        vllm.fill(chunks("other", 4))
        request = vllm.ask(8, a=8)
        assert vllm.attempt(request) is None
        assert sorted(vllm.tier.evicted_keys) == sorted(chunks("other", 4))
        vllm.tier.end(vllm.tier.fetches[0])
        assert vllm.attempt(request) == 8


def test_requests_go_each_way_of_the_module_s_table_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = set[tuple[str, str]]()

    def record(request: Request, name: str, value: object) -> None:
        before = getattr(request, "phase", value)
        object.__setattr__(request, name, value)
        if name == "phase" and before is not value:
            seen.add((before.name, request.phase.name))

    monkeypatch.setattr(Request, "__setattr__", record, raising=False)
    fetches_and_computes_the_rest()
    has_no_donor_left()
    is_reset_while_it_fetches()
    is_reset_while_a_peer_computes_its_prefix()
    meets_an_error()
    assert seen == table()


def table() -> set[tuple[str, str]]:
    """Pairs of phases from the module's docstring."""
    pairs, phase = set[tuple[str, str]](), ""
    for line in (request_module.__doc__ or "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and line.startswith("| ") and cells[0] != "phase":
            phase = cells[0] or phase
            pairs |= {(phase, cells[2].partition(":")[0])} if cells[2] else set()
    return pairs


def fetches_and_computes_the_rest() -> None:
    vllm = Scheduling()
    request = vllm.ask(8, a=6)
    assert vllm.attempt(request) is None
    vllm.tier.end(vllm.tier.fetches[0])
    assert [vllm.attempt(request) for _ in range(2)] == [6, 6]


def has_no_donor_left() -> None:
    vllm = Scheduling()
    request = vllm.ask(6, a=6, b=6, c=6)
    while vllm.attempt(request) is None:
        vllm.tier.end(vllm.tier.fetches[-1], arrived=0)
    assert len(vllm.tier.fetches) == MAX_DONORS


def is_reset_while_it_fetches() -> None:
    vllm = Scheduling()
    request = waiting(vllm)
    vllm.manager.reset_cache()
    assert vllm.attempt(request) == 0


def is_reset_while_a_peer_computes_its_prefix() -> None:
    vllm = slow_engine()
    request = waiting_for_prefill(vllm, chunks("prompt", 6))
    vllm.manager.reset_cache()
    assert vllm.attempt(request) == 0


def meets_an_error() -> None:
    vllm = Scheduling()
    request = vllm.ask(6, a=0)
    assert vllm.scan(request) == 0
    vllm.tier.peers_hold(a=request.keys)
    vllm.manager.selection.plan = Mock(side_effect=RuntimeError)  # type: ignore[method-assign]
    assert vllm.manager.lookup(request.keys[1], request.context) is LookupResult.MISS
