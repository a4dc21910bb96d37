"""What a round says of the time to the first token and between tokens."""

from __future__ import annotations

import pytest

from benchmarks import roles
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


def test_without_long_prompts_first_tokens_are_those_of_short_ones() -> None:
    short = roles._Round([], [roles._Read(0.1, [0.02])], 1.0)
    assert short.figures()["first_s"] == 0.1


def test_the_page_compares_both() -> None:
    names = roles._Round([roles._Read(1.0, [1.0])], [], 1.0).figures()
    found = roles._compare([dict.fromkeys(names, 2.0)] * 5, [dict.fromkeys(names, 1.0)] * 5)
    text = shown(roles, {"long": found, "short": found, "divided": 7})
    assert "7 requests were left to the prefill replica" in text
    for load in ("long", "short"):
        row = "requests per second | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) | 0.50 (0.50–0.50) |"
        assert f"| {load} | {row}" in text
