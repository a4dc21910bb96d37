"""What a round says of the time to the first token and between tokens."""

from __future__ import annotations

import pytest

from benchmarks import roles
from benchmarks.figures import figure
from tests.benchmarks.parts import shown


def test_gaps_are_everybodys_and_first_tokens_those_of_long_prompts() -> None:
    long = [roles._Read(3.0, [0.1])]
    others = [roles._Read(0.1, [0.02, 0.5]), roles._Read(0.1, [0.02])]
    assert roles._Round(long, others, 6.0).figures() == {
        "first_s": 3.0,
        "gap_ms": pytest.approx(60.0),
        "gap_99_ms": pytest.approx(488.0),
        "longest_gap_ms": 500.0,
        "requests_per_s": 0.5,
    }


def test_the_page_compares_both() -> None:
    names = roles._Round([roles._Read(1.0, [1.0])], [], 1.0).figures()
    part = {
        "any": {name: figure([2.0] * 5) for name in names},
        "roles": {name: figure([1.0] * 5) for name in names},
        "roles/any": {name: figure([0.5] * 5) for name in names},
        "divided": 7,
    }
    text = shown(roles, part)
    assert "7 of the long ones were left to the prefill replica" in text
    assert (
        "| requests per second | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) | 0.50 (0.50–0.50) |" in text
    )
