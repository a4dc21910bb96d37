"""What a replica does with the result of a probe."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.replica.canary import Difference, ProbeResult
from xinference_xavier.replica.replica import take_result
from xinference_xavier.stats.schema import ComparisonStats

SKETCH = {"layer": ("float32", [1.0])}
FOUND = Difference("layer", 0.5)


class Recorded:
    """Canary, events and pool that only record their calls."""

    def __init__(self) -> None:
        self.stats = ComparisonStats()
        self.told: list[tuple[Any, ...]] = []

    def probed(self, *arguments: Any) -> None:
        self.told.append(("probed", *arguments))

    def distrust(self, *arguments: Any) -> None:
        self.told.append(("distrust", *arguments))

    def audit_failed(self, *arguments: Any) -> None:
        self.told.append(("audit failed", *arguments))

    def flush(self, donor: str | None) -> int:
        self.told.append(("flush", donor))
        return 0


def taken(result: ProbeResult) -> Recorded:
    recorded: Any = Recorded()
    take_result(result, recorded, recorded, recorded.flush)
    found: Recorded = recorded
    return found


def test_a_canary_is_compared_with_peers() -> None:
    recorded = taken(ProbeResult(b"key", SKETCH))
    assert recorded.told == [("probed", b"key", SKETCH)]
    assert recorded.stats.audits == 0


def test_an_audit_without_a_difference_is_counted() -> None:
    recorded = taken(ProbeResult(None, SKETCH, "peer"))
    assert recorded.told == []
    assert (recorded.stats.audits, recorded.stats.failed_audits) == (1, 0)


def test_a_probe_that_the_engine_did_not_compute_is_counted() -> None:
    recorded = taken(ProbeResult(None, {}, lost=True))
    assert recorded.told == []
    assert (recorded.stats.lost_probes, recorded.stats.audits) == (1, 0)


@pytest.mark.parametrize("donor", ["peer", None])
def test_after_a_difference_all_rows_from_that_donor_are_dropped(donor: str | None) -> None:
    recorded = taken(ProbeResult(None, SKETCH, donor, FOUND))
    distrusted = [("distrust", donor, FOUND)] if donor else []
    assert recorded.told == [("audit failed", donor, FOUND), *distrusted, ("flush", donor)]
    assert (recorded.stats.audits, recorded.stats.failed_audits) == (1, 1)
