"""What a request takes at a replica."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.routing.forecast import Chunks, Forecaster, Prompt, Terms, Typical, leading
from xinference_xavier.routing.known_replica import NO_STEP, Rates, Replica, Report, Step

SIZE = Chunks(128, 1 << 20)
RATES, STEP = Rates(0.001, 0.0, 0.01, 1e-9), Step(0.01, 0.001)


def terms(prompt: Prompt, run: int = 0, fetchable: int = 0, **report: object) -> Terms:
    told = Report(0.0, 0, 0.0, 0, rates=RATES, step=STEP)._replace(**report)  # type: ignore[arg-type]
    replica = Replica("r", "m-0", "r", told)
    replica.take(told, RATES)
    forecaster = Forecaster(prompt, fetchable, SIZE, Typical(RATES, NO_STEP), 0.0)
    return forecaster.at(replica, run, 0).terms


@given(st.lists(st.sets(st.integers(0, 5))), st.sets(st.integers(0, 5)))
def test_leading_sets_are_those_of_a_count_one_by_one(
    sets: list[set[int]], among: set[int]
) -> None:
    def bits(members: set[int]) -> int:
        return sum(1 << member for member in members)

    found = leading(map(bits, sets), bits(among))
    for member in among:
        lacks = (number for number, each in enumerate(sets) if member not in each)
        assert found[1 << member] == next(lacks, len(sets))
    assert len(found) == len(among)


def test_deep_tokens_take_longer_and_the_last_one_is_always_computed() -> None:
    deep = RATES._replace(depth_s=1e-6)
    assert terms(Prompt(1000), rates=deep).compute == pytest.approx(1.5)
    assert terms(Prompt(1024, [b""] * 8), run=8).compute == pytest.approx(0.001)


def test_what_a_peer_can_send_is_fetched_where_that_is_faster() -> None:
    prompt = Prompt(1280, [b""] * 10)
    found = terms(prompt, run=2, fetchable=8)
    assert found.fetch == pytest.approx(0.01 + 6 * (1 << 20) * 1e-9)
    assert found.compute == pytest.approx(0.256)
    slow = terms(prompt, run=2, fetchable=8, rates=RATES._replace(byte_s=1e-6))
    assert (slow.fetch, slow.compute) == (0.0, pytest.approx(1.024))


def test_who_finds_no_slot_or_no_blocks_waits_until_an_answer_ends() -> None:
    prompt = Prompt(100, answer=100.0)
    answer_s = 100 * (0.01 + 4 * 0.001)
    assert terms(prompt, requests=4, slots=4).backlog == pytest.approx(answer_s / 4)
    assert terms(prompt, requests=6, slots=4).backlog == pytest.approx(answer_s * 3 / 4)
    blocks = {"requests": 4, "free_tokens": 0, "kv_tokens": 1000}
    assert terms(prompt, **blocks).backlog == pytest.approx(answer_s * 200 / 1000)


def test_a_prefill_replica_has_room_again_as_soon_as_it_has_computed() -> None:
    full = {"requests": 4, "slots": 4, "free_tokens": 0, "kv_tokens": 1000, "prefill_s": 0.3}
    assert terms(Prompt(100, answer=100.0), role="prefill", **full).backlog == 0.3
