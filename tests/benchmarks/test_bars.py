"""The worst value of each bar counts, and by how much it missed the bar."""

from __future__ import annotations

import pytest

from benchmarks import bars
from benchmarks.__main__ import PARTS
from benchmarks.bars import Bar, Part, Values


@pytest.fixture(autouse=True)
def two_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(part: Part) -> Values:
        return {"one": part["one"], "two": part["two"]}

    speed = Bar("speed", 10.0, both, at_least=True)
    found = {"part": (speed, Bar("time", 4.0, both))}
    monkeypatch.setattr(bars, "BARS", found)


def test_the_worst_value_counts() -> None:
    speed, time = bars.judge("part", {"one": 9.0, "two": 3.0})
    assert (speed["of"], speed["value"], speed["met"]) == ("two", 3.0, False)
    assert (time["of"], time["value"], time["met"]) == ("one", 9.0, False)


def test_a_bar_that_is_just_reached_is_met() -> None:
    speed, time = bars.judge("part", {"one": 10.0, "two": 10.0})
    assert speed["met"]
    assert not time["met"]
    assert bars.judge("part", {"one": 4.0, "two": 4.0})[1]["met"]


def test_a_table_shows_by_how_much() -> None:
    shown = bars.markdown(bars.judge("part", {"one": 12.0, "two": 11.0}))
    assert "| speed ≥ 10 | 11 (two) | met |" in shown
    assert "| time ≤ 4 | 12 (one) | **missed**, 3.00 × |" in shown
    assert shown.endswith("|\n\n")


def test_a_part_without_bars_has_no_table() -> None:
    assert bars.markdown(bars.judge("another", {})) == ""


def test_every_bar_belongs_to_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert set(bars.BARS) <= set(PARTS)
