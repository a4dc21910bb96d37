"""The schedule of the part with vLLM, and which failed requests are explained."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, cast

from tests.chaos.engines_fleet import Replica
from tests.chaos.engines_kinds import KINDS
from tests.chaos.engines_schedule import ADDED, HEAVY, LIGHT, REMOVED, STEADY, schedule
from tests.chaos.engines_traffic import Failure

MANY = 200


def test_it_follows_from_the_seed() -> None:
    assert list(islice(schedule(1), MANY)) == list(islice(schedule(1), MANY))
    assert list(islice(schedule(1), MANY)) != list(islice(schedule(2), MANY))


def test_it_begins_with_all_faults_that_two_replicas_can_bear() -> None:
    kinds = [step.kind for step in islice(schedule(7), len(LIGHT) + len(STEADY) + 1)]
    assert sorted(kinds[:-1]) == sorted([*LIGHT, *STEADY])
    assert kinds[-1] == ADDED


def test_every_kind_occurs_and_is_known() -> None:
    kinds = {step.kind for step in islice(schedule(7), MANY)}
    assert kinds == {*LIGHT, *HEAVY, *STEADY, ADDED, REMOVED} == set(KINDS)


def test_no_more_than_three_replicas_are_wanted() -> None:
    wanted = 2
    for step in islice(schedule(7), MANY):
        wanted += (step.kind == ADDED) - (step.kind == REMOVED)
        assert wanted in (2, 3)


def test_only_a_failure_while_its_replica_was_killed_is_explained() -> None:
    replica = Replica("r", "i", cast(Any, None), None, 0)
    replica.absences = [(10.0, 20.0), (30.0, math.inf)]

    def is_explained(began: float, ended: float) -> bool:
        return Failure(replica, began, ended, "").is_explained

    assert is_explained(9.0, 11.0)
    assert is_explained(15.0, 16.0)
    assert is_explained(31.0, 32.0)
    assert not is_explained(8.0, 9.0)
    assert not is_explained(21.0, 29.0)
