"""A report passes only if nothing is wrong, and has the fields of `build/chaos-report.json`."""

import json
from collections import Counter

import pytest

from tests.chaos.__main__ import shortest_failing
from tests.chaos.report import Leaks, Report


def finding(**figures: object) -> Report:
    return Report(7, 1.0, **figures)  # type: ignore[arg-type]


def test_a_report_in_which_nothing_is_wrong_passes() -> None:
    fine = finding(
        failed_requests=3, failed_requests_on_killed_replica=3, longest_scheduling_wait_s=1.99
    )
    assert fine.failures() == []


@pytest.mark.parametrize(
    ("figures", "named"),
    [
        ({"wrong_bytes": 1}, "1 wrong bytes"),
        ({"failed_requests": 4, "failed_requests_on_killed_replica": 3}, "1 requests failed"),
        ({"longest_scheduling_wait_s": 2.01}, "2.01 s"),
        ({"leaks": Leaks(grants=2)}, "2 grants"),
        ({"problems": ["something odd"]}, "something odd"),
    ],
)
def test_whatever_is_wrong_is_a_named_failure(figures: dict[str, object], named: str) -> None:
    (failure,) = finding(**figures).failures()
    assert named in failure


def test_the_bars_of_a_full_run() -> None:
    kinds = [f"kind {number}" for number in range(15)]
    enough = finding(faults=Counter(dict.fromkeys(kinds, 67)))
    assert enough.missed_bars() == []
    assert len(finding(faults=Counter(dict.fromkeys(kinds, 66))).missed_bars()) == 1
    assert len(finding(faults=Counter(dict.fromkeys(kinds[1:], 99))).missed_bars()) == 1


def test_a_report_is_json_with_each_figure() -> None:
    report = json.loads(finding(faults=Counter(b=1, a=2), leaks=Leaks(filling=1)).to_json())
    assert report["seed"] == 7
    assert report["faults"] == {"a": 2, "b": 1}
    assert report["leaks"]["filling"] == 1
    assert set(report) == {
        *("seed", "faults", "operations", "requests", "failed_requests", "wrong_bytes"),
        *("failed_requests_on_killed_replica", "rollbacks", "longest_scheduling_wait_s"),
        *("deadline_s", "leaks"),
    }


def test_the_shortest_failing_prefix_is_found_by_bisection() -> None:
    tried: list[int] = []

    def fails(steps: int) -> bool:
        tried.append(steps)
        return steps >= 11

    assert shortest_failing(40, fails) == 11
    assert len(tried) <= 6
    assert shortest_failing(1, fails) == 1
