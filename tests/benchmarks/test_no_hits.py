"""What is compared is what both have; what is ours alone is told beside it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from benchmarks import no_hits, served
from benchmarks.engines import Asked, Load
from benchmarks.steps import Step
from benchmarks.threads import seconds_by_name
from tests.benchmarks.parts import shown

LOAD = Load(2.0, [Asked(0.1 * n, (0.1 * n, 0.1 * n + 0.02), 0) for n in range(1, 5)])
SERVED = no_hits.Served(LOAD, 3.0, {"MainThread": 8.0, "xavier-copy": 1.0}, 0.5)


STEP = Step(True, 4, 4, 5.2e-3, 1e-4, 5e-3, 4e-3, 1e-4, 0.0, 0.0)
STEPS = no_hits.of_steps(
    [[STEP, STEP._replace(connector=False, whole=5.0e-3)]] * 5,
    [[STEP._replace(ours=3e-5, vllms=6e-5)]] * 5,
)


def test_steps_are_compared_within_each_load() -> None:
    whole = STEPS["parts"]["whole"]
    assert whole["cost"]["samples"] == pytest.approx([0.2] * 5)
    assert STEPS["parts"]["update"]["cost"]["median"] == 0.0
    assert (STEPS["ours"]["median"], STEPS["vllms"]["median"]) == pytest.approx((0.03, 0.06))
    assert STEPS["per_s"]["ratio"] == pytest.approx(5.0 / 5.2)
    assert STEPS["counted"] == 10


def test_loads_become_rates_and_percentiles_of_all() -> None:
    slow = SERVED._replace(load=Load(6.0, [Asked(0.9, (0.9, 1.0), 0)] * 4))
    found = no_hits.of_loads([SERVED, slow])
    assert found["requests_per_s"] == 1.0
    assert found["first_p50_s"] == pytest.approx(0.65)
    assert found["gap_p99_s"] == pytest.approx(0.1)
    assert found["cpu_s"] == pytest.approx(6.0 / 8 / 0.5)


def test_a_prompt_that_was_known_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="was known"):
        no_hits.of_loads([SERVED._replace(load=Load(1.0, [Asked(0.1, (0.1,), 128)]))])


def test_only_our_threads_count_as_ours() -> None:
    found = no_hits.ours([SERVED, SERVED])
    assert found == {"transfer_s": 0.25, "xavier-copy": 0.5}


def test_threads_are_found_by_their_names() -> None:
    """The clock of the kernel ticks a hundred times a second."""
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name="xavier-test", daemon=True)
    thread.start()
    try:
        while seconds_by_name()["xavier-test"] < 0.02:
            pass
    finally:
        end.set()
        thread.join()
    assert "xavier-test" not in seconds_by_name()


def test_the_page_compares_and_tells_what_is_ours() -> None:
    off = no_hits.of_loads([SERVED])
    on = {**off, "xavier-copy": 0.001, "transfer_s": 0.002}
    part = no_hits.summary([(on, off)] * 5) | {"steps": STEPS}
    assert set(part["ours_s"]) == {"xavier-copy", "transfer_s"}
    text = shown(no_hits, part)
    assert "| requests per second | 2.00 | 2.00 | 1.000 (1.000–1.000) |" in text
    assert "| thread `xavier-copy` | 1.00 " in text
    assert "| the whole step | 5.200 (5.200–5.200) | 5.000 (5.000–5.000) | 0.200 " in text
    assert "| ms that a step costs ≤ 0.25 | 0.2 | met |" in text
    assert "| steps a second ÷ those without a connector ≥ 0.99 | 0.962 | **missed**" in text
    assert "So it makes 0.962 times (0.962–0.962) as many steps a second as without." in text


def test_the_page_of_what_is_served_has_every_data_set() -> None:
    side = {"median": 1.0}
    figures: dict[str, Any] = {"on": side, "off": side, "ratio": 1.0, "low": 0.9, "high": 1.1}
    found = {"pairs": 5, "compared": dict.fromkeys(served._FIGURES, figures)}
    text = shown(served, {"datasets": dict.fromkeys(served.DATASETS, found)})
    assert text.count("`random`, 5 pairs") == text.count("`prefix_repetition`, 5 pairs") == 5
