"""Loads and steps with the connector are compared with those without it."""

from typing import Any

import pytest

from benchmarks import bars, no_hits, pairs, served
from benchmarks.steps import Step
from tests.harness.engines import Asked, Load

LOAD = Load(2.0, [Asked(0.1 * n, (0.1 * n, 0.1 * n + 0.02), 0) for n in range(1, 5)])
STEP = Step(True, 4, 4, 5.2e-3)
STEPS = no_hits.of_steps([[STEP, STEP._replace(connector=False, seconds=5.0e-3)]] * 5)


def test_steps_are_compared_within_each_load() -> None:
    assert STEPS["cost_ms"]["samples"] == pytest.approx([0.2] * 5)
    assert STEPS["per_s"]["ratio"] == pytest.approx(5.0 / 5.2)
    assert STEPS["counted"] == 10


def test_a_load_becomes_rates_and_percentiles() -> None:
    found = no_hits.of_load(LOAD, 3.0)
    assert found["requests_per_s"] == 2.0
    assert found["first_p50_s"] == pytest.approx(0.25)
    assert found["gap_p99_s"] == pytest.approx(0.02)
    assert found["cpu_s"] == pytest.approx(3.0 / 4 / 0.5)


def test_a_prompt_that_was_known_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="was known"):
        no_hits.of_load(Load(1.0, [Asked(0.1, (0.1,), 128)]), 1.0)


def test_both_sides_are_shown_and_judged() -> None:
    load = no_hits.of_load(LOAD, 3.0)
    part = {"pairs": 5, "compared": pairs.summary([(load, load)] * 5), "steps": STEPS}
    text = no_hits.markdown(part)
    assert "| requests per second | 2.00 | 2.00 | 1.000 (1.000–1.000) |" in text
    assert "| ms | 5.200 (5.200–5.200) | 5.000 (5.000–5.000) | 0.200 " in text
    judged = {bar["what"]: bar["met"] for bar in bars.judge("no_hits", part)}
    assert judged == {
        "throughput ÷ that without a connector": True,
        "steps a second ÷ those without a connector": False,
        "half of the steps' confidence interval": True,
        "p99 time between tokens ÷ that without a connector": True,
    }


def test_every_data_set_that_is_served_is_shown() -> None:
    side = {"median": 1.0}
    figures: dict[str, Any] = {"on": side, "off": side, "ratio": 1.0, "low": 0.9, "high": 1.1}
    found = {"pairs": 5, "compared": dict.fromkeys(served._FIGURES, figures)}
    text = served.markdown({"datasets": dict.fromkeys(served.DATASETS, found)})
    assert text.count("`random`, 5 pairs") == text.count("`prefix_repetition`, 5 pairs") == 5
