"""Figures with their spread, and pairs of them that were measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

MIN_SAMPLES = 5


def figure(samples: Sequence[float]) -> dict[str, Any]:
    """JSON-able: the median, the least, the most, and all of them."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are fewer than {MIN_SAMPLES}")
    return {
        "median": median(samples),
        "least": min(samples),
        "most": max(samples),
        "samples": list(samples),
    }


def ratio(samples: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Of samples that were taken in turns with their reference, one by one: what slowed the machine
    down for a while slowed both."""
    return figure([one / other for one, other in zip(samples, reference, strict=True)])


def shown(value: dict[str, Any], digits: int = 2) -> str:
    """`median (least–most)`, for a table."""
    return f"{value['median']:.{digits}f} ({value['least']:.{digits}f}–{value['most']:.{digits}f})"
