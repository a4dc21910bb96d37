"""Figures with their spread, ratios of figures that were measured in turns, and tables of them."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

MIN_SAMPLES = 5


def figure(samples: Sequence[float]) -> dict[str, Any]:
    """The median, the least, the most, and all samples; JSON-able."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples are fewer than {MIN_SAMPLES}")
    return {
        "median": median(samples),
        "least": min(samples),
        "most": max(samples),
        "samples": list(samples),
    }


def ratio(samples: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Ratios of samples and their reference, one by one. They were taken in turns, so whatever
    slowed the machine down for a while slowed both."""
    return figure([one / other for one, other in zip(samples, reference, strict=True)])


def shown(value: dict[str, Any], digits: int = 2) -> str:
    """`median (least–most)`, for a table."""
    return f"{value['median']:.{digits}f} ({value['least']:.{digits}f}–{value['most']:.{digits}f})"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
