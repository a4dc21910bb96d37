"""A failed request is explained only by the absence of its replica."""

import math
from typing import Any, cast

from tests.chaos.engines_fleet import Replica
from tests.chaos.engines_traffic import Failure


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
