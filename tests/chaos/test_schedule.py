"""A schedule is data: equal seeds give equal schedules, and it names only known faults."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.chaos.schedule import REPLICA_KINDS, TRACKER, TRACKER_KINDS, Step, schedule

REPLICAS = ("a", "b", "c")


def first(count: int, seed: int, only: list[str] | None = None) -> list[Step]:
    return list(itertools.islice(schedule(seed, REPLICAS, only), count))


def test_a_seed_makes_one_schedule_however_much_of_it_is_taken() -> None:
    assert first(500, seed=7) == first(1000, seed=7)[:500]
    assert first(500, seed=7) != first(500, seed=8)


def test_every_kind_occurs_often_enough_in_a_full_run() -> None:
    kinds = Counter(step.kind for step in first(2000, seed=1))
    assert set(kinds) == REPLICA_KINDS.keys() | TRACKER_KINDS.keys()
    assert min(kinds.values()) >= 10
    assert len(kinds) >= 30


def test_steps_are_numbered_and_go_where_their_kind_belongs() -> None:
    steps = first(1000, seed=2)
    assert [step.number for step in steps] == list(range(1, 1001))
    for step in steps:
        assert (step.target == TRACKER) == (step.kind in TRACKER_KINDS)
        assert 0 <= step.strength <= 1
    assert {step.target for step in steps} == {TRACKER, *REPLICAS}


def test_a_schedule_can_be_restricted_to_some_kinds() -> None:
    kinds = ["replica killed", "tracker moved"]
    assert {step.kind for step in first(200, seed=3, only=kinds)} == set(kinds)
    assert {step.kind for step in first(20, seed=3, only=kinds[1:])} == set(kinds[1:])
    assert {step.kind for step in first(20, seed=3, only=kinds[:1])} == set(kinds[:1])
    with pytest.raises(ValueError, match="no such kinds"):
        first(1, seed=3, only=["replica bored"])
