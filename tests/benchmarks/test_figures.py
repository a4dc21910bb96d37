"""A figure is a median with its spread; comparisons are made turn by turn, until they are known
well enough; and the worst value of a bar counts."""

import math
import time

import pytest

from benchmarks import bars, pairs
from benchmarks.__main__ import PARTS
from benchmarks.bars import Bar, Part, Values
from benchmarks.figures import MIN_SAMPLES, figure, ratio, shown


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


def test_the_interval_is_from_students_t() -> None:
    """Five ratios: 2.776 standard errors lie on either side of the geometric mean."""
    ratios = [1.00, 1.02, 0.98, 1.01, 0.99]
    found = pairs.interval([ratio * 3 for ratio in ratios], [3] * 5)
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / 5
    error = math.sqrt(sum((log - mean) ** 2 for log in logs) / 4 / 5)
    assert found.ratio == pytest.approx(math.exp(mean))
    assert found.low == pytest.approx(math.exp(mean - 2.7764 * error), rel=1e-4)
    assert found.high == pytest.approx(math.exp(mean + 2.7764 * error), rel=1e-4)


def test_it_goes_on_until_the_ratio_is_known() -> None:
    """After the eighth pair the interval is narrow enough for the first time."""
    count = 0

    def run(on: bool) -> pairs.Run:
        nonlocal count
        count += 1
        return {"rate": 1.0 + (0.05 if on and count <= 2 else 0.0)}

    made = pairs.until_known(pairs.in_turns(run), until=math.inf, watched={"rate": 0.015})
    assert pairs.ratio_of(made, "rate").half_width <= 0.015
    assert pairs.ratio_of(made[:-1], "rate").half_width > 0.015
    assert len(made) > MIN_SAMPLES


def test_the_least_number_of_pairs_is_measured_even_if_time_is_up() -> None:
    order: list[bool] = []

    def run(on: bool) -> pairs.Run:
        order.append(on)
        return {"rate": float(len(order))}

    over = time.monotonic() - 1
    made = pairs.until_known(pairs.in_turns(run), until=over, watched={"rate": 0.0})
    assert len(made) == MIN_SAMPLES
    assert order[:4] == [True, False, False, True]
    assert [(on["rate"], off["rate"]) for on, off in made[:2]] == [(1, 2), (4, 3)]


def test_the_worst_value_counts_and_a_bar_that_is_just_reached_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def both(part: Part) -> Values:
        return {"one": part["one"], "two": part["two"]}

    found = (Bar("speed", 10.0, both, at_least=True), Bar("time", 4.0, both))
    monkeypatch.setattr(bars, "BARS", {"part": found})
    speed, time = bars.judge("part", {"one": 9.0, "two": 3.0})
    assert (speed["of"], speed["value"], speed["met"]) == ("two", 3.0, False)
    assert (time["of"], time["value"], time["met"]) == ("one", 9.0, False)
    assert bars.judge("part", {"one": 10.0, "two": 10.0})[0]["met"]
    assert bars.judge("part", {"one": 4.0, "two": 4.0})[1]["met"]


def test_every_bar_belongs_to_a_part() -> None:
    assert set(bars.BARS) <= set(PARTS)
