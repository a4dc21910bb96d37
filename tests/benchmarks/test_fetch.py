"""A fetch by each transport is compared with the least time that moving its bytes takes."""

from __future__ import annotations

import pytest

from benchmarks import fetch
from benchmarks.figures import MIN_SAMPLES

pytestmark = pytest.mark.process


def test_every_fetch_is_compared_with_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "ROWS", {1: (2, 3)})
    monkeypatch.setattr(fetch, "ROUNDS", MIN_SAMPLES)
    part = fetch.measure()
    found = [(size["transport"], size["row_bytes"], size["rows"]) for size in part["sizes"]]
    assert found == [(name, 1 << 20, rows) for name in ("gloo", "shared_memory") for rows in (2, 3)]
    for size in part["sizes"]:
        samples = zip(
            *(size[name]["samples"] for name in ("fetch_ms", "floor_ms", "ratio")), strict=True
        )
        for whole, floor, ratio in samples:
            assert floor > 0
            assert ratio == pytest.approx(whole / (floor + fetch.ALLOWED_MS))
    lines = fetch.markdown(part).splitlines()
    assert lines[-1].startswith("| shared memory | 3 × 1 MiB | ")
    assert lines[-1].count("|") == lines[-3].count("|")
