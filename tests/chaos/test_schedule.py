"""A schedule is data: equal seeds give equal schedules, and it names only known faults."""

from collections import Counter
from itertools import islice

import pytest

from tests.chaos.kinds import KINDS, TRACKER_KINDS, weights
from tests.chaos.schedule import TRACKER, Step, schedule

REPLICAS = ("a", "b", "c")


def steps(count: int, seed: int, only: list[str] | None = None) -> list[Step]:
    return list(islice(schedule(seed, REPLICAS, *weights(only)), count))


def test_a_seed_makes_one_schedule_however_much_of_it_is_taken() -> None:
    assert steps(500, 7) == steps(1000, 7)[:500]
    assert steps(500, 7) != steps(500, 8)


def test_every_kind_occurs_often_enough_in_a_full_run() -> None:
    kinds = Counter(step.kind for step in steps(2000, seed=2))
    assert set(kinds) == KINDS.keys()
    assert min(kinds.values()) >= 10


def test_steps_are_numbered_and_go_where_their_kind_belongs() -> None:
    found = steps(1000, seed=2)
    assert [step.number for step in found] == list(range(1, 1001))
    for step in found:
        assert (step.target == TRACKER) == (step.kind in TRACKER_KINDS)
        assert 0 <= step.strength <= 1
    assert {step.target for step in found} == {TRACKER, *REPLICAS}


def test_it_can_be_restricted_to_some_kinds() -> None:
    kinds = ["replica killed", "tracker moved"]
    assert {step.kind for step in steps(200, seed=3, only=kinds)} == set(kinds)
    assert {step.kind for step in steps(20, seed=3, only=kinds[1:])} == set(kinds[1:])
    assert {step.kind for step in steps(20, seed=3, only=kinds[:1])} == set(kinds[:1])
    with pytest.raises(ValueError, match="no such kinds"):
        steps(1, seed=3, only=["replica bored"])
