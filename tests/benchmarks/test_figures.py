"""A figure is a median with its spread; comparisons are made turn by turn."""

from __future__ import annotations

import pytest

from benchmarks.figures import figure, ratio, shown


def test_a_figure_is_the_median_with_least_and_most() -> None:
    found = figure([3, 1, 2, 5, 4])
    assert (found["median"], found["least"], found["most"]) == (3, 1, 5)
    assert found["samples"] == [3, 1, 2, 5, 4]
    assert shown(found, 1) == "3.0 (1.0–5.0)"


def test_too_few_samples_are_no_figure() -> None:
    with pytest.raises(ValueError, match="4 samples"):
        figure([1, 2, 3, 4])


def test_ratios_are_taken_turn_by_turn_and_not_of_the_medians() -> None:
    assert ratio([1, 2, 3, 4, 50], [2, 4, 6, 8, 100])["samples"] == [0.5] * 5
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5])
