"""A schedule is data: equal seeds give equal schedules, and it names only known faults."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from tests.chaos import engines_kinds
from tests.chaos.kinds import KINDS, TRACKER_KINDS, weights
from tests.chaos.schedule import (
    ADDED,
    HEAVY,
    LIGHT,
    REMOVALS,
    STEADY,
    TRACKER,
    Step,
    of_engines,
    of_replicas,
)

REPLICAS = ("a", "b", "c")
MANY = 200


def for_replicas(count: int, seed: int, only: list[str] | None = None) -> list[Step]:
    return list(islice(of_replicas(seed, REPLICAS, *weights(only)), count))


def for_engines(count: int, seed: int = 6) -> list[Step]:
    return list(islice(of_engines(seed), count))


@pytest.mark.parametrize(
    "schedule", [lambda seed: of_replicas(seed, REPLICAS, *weights()), of_engines]
)
def test_a_seed_makes_one_schedule_however_much_of_it_is_taken(
    schedule: Callable[[int], Iterator[Step]],
) -> None:
    assert list(islice(schedule(7), 500)) == list(islice(schedule(7), 1000))[:500]
    assert list(islice(schedule(7), 500)) != list(islice(schedule(8), 500))


class TestForReplicas:
    def test_every_kind_occurs_often_enough_in_a_full_run(self) -> None:
        kinds = Counter(step.kind for step in for_replicas(2000, seed=2))
        assert set(kinds) == KINDS.keys()
        assert min(kinds.values()) >= 10
        assert len(kinds) >= 30

    def test_steps_are_numbered_and_go_where_their_kind_belongs(self) -> None:
        steps = for_replicas(1000, seed=2)
        assert [step.number for step in steps] == list(range(1, 1001))
        for step in steps:
            assert (step.target == TRACKER) == (step.kind in TRACKER_KINDS)
            assert 0 <= step.strength <= 1
        assert {step.target for step in steps} == {TRACKER, *REPLICAS}

    def test_it_can_be_restricted_to_some_kinds(self) -> None:
        kinds = ["replica killed", "tracker moved"]
        assert {step.kind for step in for_replicas(200, seed=3, only=kinds)} == set(kinds)
        assert {step.kind for step in for_replicas(20, seed=3, only=kinds[1:])} == set(kinds[1:])
        assert {step.kind for step in for_replicas(20, seed=3, only=kinds[:1])} == set(kinds[:1])
        with pytest.raises(ValueError, match="no such kinds"):
            for_replicas(1, seed=3, only=["replica bored"])


class TestForEngines:
    def test_it_begins_with_all_faults_that_two_replicas_can_bear(self) -> None:
        *kinds, last = (step.kind for step in for_engines(len(LIGHT) + len(STEADY) + 1))
        assert sorted(kinds) == sorted([*LIGHT, *STEADY])
        assert last == ADDED

    def test_every_kind_occurs_and_is_known(self) -> None:
        kinds = {step.kind for step in for_engines(MANY)}
        assert kinds == {*LIGHT, *HEAVY, *STEADY, ADDED, *REMOVALS} == set(engines_kinds.KINDS)

    def test_no_more_than_three_replicas_are_wanted(self) -> None:
        wanted = 2
        for step in for_engines(MANY):
            wanted += (step.kind == ADDED) - (step.kind in REMOVALS)
            assert wanted in (2, 3)
