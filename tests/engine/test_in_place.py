"""What a neighbour holds is loaded from where it lies: no row of the own pool is taken for it."""

import pytest
from vllm.v1.kv_offload.base import OffloadKey

from tests.engine.scheduling import (
    CHUNK,
    Request,
    Scheduling,
    assert_nothing_left,
    chunks,
    waiting,
)
from xinference_xavier.engine.fetches import Fetch
from xinference_xavier.pool.pool import Row, RowState

SLOTS = 8
FIRST = 100
"""The slot number of the neighbour's row 0."""


class Engine(Scheduling):
    """Its peer `a` is a neighbour, which lends rows 7, 6 and so on."""

    def __init__(self) -> None:
        super().__init__(slots=SLOTS)

    def ask(self, count: int, req_id: str = "r", **held: int) -> Request:
        request = super().ask(count, req_id, **held)
        self.tier.peers.map("a", FIRST)
        return request

    def lend(self, fetch: Fetch, rows: int | None = None) -> None:
        for number, row in enumerate(fetch.rows):
            row.slot = FIRST + 7 - number
        self.tier.end(fetch, rows)


@pytest.fixture
def vllm() -> Engine:
    return Engine()


def lent(vllm: Engine, count: int = 6) -> tuple[Request, list[Row]]:
    request = waiting(vllm, count)
    fetch = vllm.tier.fetches[0]
    vllm.lend(fetch)
    assert vllm.attempt(request) == count
    return request, fetch.rows


def are_returned(rows: list[Row]) -> bool:
    return not any(row.pins for row in rows)


def test_chunks_are_loaded_from_the_neighbours_slots(vllm: Engine) -> None:
    request, _ = lent(vllm)
    assert vllm.schedule(request, 6) == [107, 106, 105, 104, 103, 102]


def test_the_own_pool_keeps_what_it_has(vllm: Engine) -> None:
    vllm.fill(own := chunks("own", SLOTS))
    request, rows = lent(vllm)
    vllm.load_and_finish(request, 6)
    assert [vllm.pool.lookup(key) is not None for key in own] == [True] * SLOTS
    assert vllm.pool.counts() == (SLOTS, SLOTS, 0, 0, 0)
    assert are_returned(rows)


def test_rows_are_lent_until_the_load_has_ended(vllm: Engine) -> None:
    request, rows = lent(vllm)
    vllm.schedule(request, 6)
    vllm.end_step()
    assert not are_returned(rows), "vLLM's workers read them"
    vllm.finish(request)
    assert not are_returned(rows), "even if nobody wants to know any more"
    vllm.loaded(request, 6)
    assert are_returned(rows)
    assert_nothing_left(vllm)
    vllm.pool.check_integrity()


def test_rows_are_lent_to_every_request_that_finds_them(vllm: Engine) -> None:
    request, rows = lent(vllm)
    vllm.schedule(request, 6)
    second = vllm.arrive("second", request.keys)
    assert vllm.attempt(second) == 6
    assert len(vllm.tier.fetches) == 1
    vllm.schedule(second, 6)
    vllm.loaded(request, 6)
    assert not are_returned(rows)
    vllm.loaded(second, 6)
    assert are_returned(rows)


def test_what_was_returned_is_lent_anew(vllm: Engine) -> None:
    request, _ = lent(vllm)
    vllm.load_and_finish(request, 6)
    assert vllm.pool.lookup(request.keys[0]) is None
    assert vllm.attempt(vllm.arrive("again", request.keys)) is None
    assert len(vllm.tier.fetches) == 2


def test_after_a_reset_rows_are_lent_until_no_job_from_before_is_under_way(vllm: Engine) -> None:
    request, rows = lent(vllm)
    vllm.schedule(request, 6)
    vllm.manager.reset_cache()
    assert vllm.pool.lookup(request.keys[0]) is None
    vllm.end_step()
    assert not are_returned(rows)
    vllm.manager.on_reset_flushed()
    assert are_returned(rows)
    vllm.pool.check_integrity()


def test_what_is_not_lent_is_computed(vllm: Engine) -> None:
    request = waiting(vllm)
    fetch = vllm.tier.fetches[0]
    vllm.lend(fetch, 2)
    vllm.tier.peers_hold(a=request.keys[:2])
    assert vllm.attempt(request) == 2
    vllm.load_and_finish(request, 2)
    vllm.end_step()
    assert {row.state for row in fetch.rows} == {RowState.FREE}
    assert_nothing_left(vllm)


def test_what_a_neighbour_holds_is_not_stored(vllm: Engine) -> None:
    """A host needs a chunk once."""
    request = vllm.ask(6, a=4)
    assert vllm.begin_store(request, request.keys) == request.keys[4:]


def test_what_any_other_peer_holds_is_stored(vllm: Engine) -> None:
    request = vllm.ask(6, a=0, far=4)
    assert vllm.begin_store(request, request.keys) == request.keys


def test_a_neighbour_that_nothing_can_be_fetched_from_has_nothing(vllm: Engine) -> None:
    """It computes something else, or is switched off."""
    request = vllm.ask(6, a=4)
    vllm.tier.peers.set_compared(False)
    assert vllm.begin_store(request, request.keys) == request.keys


def test_a_neighbour_is_asked_first_and_alone(vllm: Engine) -> None:
    """Whatever others take: it need not move anything."""
    learn(vllm, "far", seconds=0.001)
    learn(vllm, "a", seconds=0.002)
    keys: list[OffloadKey] = chunks("other", 6)
    vllm.tier.peers_hold(a=keys, far=keys, disk=keys)
    assert vllm.attempt(vllm.arrive("other", keys)) is None
    assert [(fetch.source, fetch.in_place) for fetch in vllm.tier.fetches[-1:]] == [("a", True)]
    assert len(vllm.tier.fetches[-1].rows) == 6


@pytest.mark.parametrize(("adaptive", "hits"), [(True, None), (False, 0)])
def test_a_single_chunk_is_lent_unless_a_number_forbids_it(
    vllm: Engine, adaptive: bool, hits: int | None
) -> None:
    vllm.manager.selection.adaptive = adaptive
    assert vllm.attempt(vllm.ask(1, a=1)) == hits


def learn(vllm: Engine, peer: str, seconds: float) -> None:
    for number in range(3):
        keys = chunks(f"{peer} {number}", 4)
        vllm.tier.peers_hold(**{"a": [], "far": [], peer: keys})
        vllm.tier.peers.map("a", FIRST)
        vllm.fetch_and_finish(vllm.arrive(f"{peer} {number}", keys), seconds)


def test_vllm_counts_them_as_tokens_from_a_peer(vllm: Engine) -> None:
    request, _ = lent(vllm)
    vllm.schedule(request, 6)
    assert vllm.manager.stats()["hits"]["remote"] == 6 * CHUNK
