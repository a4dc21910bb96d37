"""Two things, measured in turns until their ratio is known well enough or time is up."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeVar

from scipy.stats import t  # type: ignore[import-untyped]

from benchmarks.figures import MIN_SAMPLES, figure

CONFIDENCE = 0.95
_T = TypeVar("_T")


class Interval(NamedTuple):
    """The mean of the pairs' ratios, and its confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def interval(samples: Sequence[float], reference: Sequence[float]) -> Interval:
    """The geometric mean of the pairs' ratios, and Student's interval of their logarithms."""
    logs = [math.log(one / other) for one, other in zip(samples, reference, strict=True)]
    middle = mean(logs)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


Run = Mapping[str, float]
"""Figures by name."""


Pair = tuple[Run, Run]
"""The two sides of a pair: with Xavier, and without."""


def until_known(
    pair: Callable[[int], Pair], *, until: float, watched: Mapping[str, float]
) -> list[Pair]:
    """Make pairs, each with its number: at least MIN_SAMPLES, and then until the ratio of each
    `watched` figure is known to plus or minus its value, or `time.monotonic()` reaches `until`."""
    pairs: list[Pair] = []
    while len(pairs) < MIN_SAMPLES or (
        time.monotonic() < until
        and any(ratio_of(pairs, name).half_width > width for name, width in watched.items())
    ):
        pairs.append(pair(len(pairs)))
    return pairs


def in_turns(run: Callable[[bool], _T]) -> Callable[[int], tuple[_T, _T]]:
    """Make pairs of `run(True)` and `run(False)`; the order alternates from pair to pair."""

    def pair(number: int) -> tuple[_T, _T]:
        if number % 2:
            off, on = run(False), run(True)
        else:
            on, off = run(True), run(False)
        return on, off

    return pair


def ratio_of(pairs: Sequence[Pair], name: str) -> Interval:
    return interval([on[name] for on, _ in pairs], [off[name] for _, off in pairs])


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Both sides of each figure, and the ratio with its bounds."""
    return {
        name: {
            "on": figure([on[name] for on, _ in pairs]),
            "off": figure([off[name] for _, off in pairs]),
            **ratio_of(pairs, name)._asdict(),
        }
        for name in pairs[0][0]
    }


def cells(found: Mapping[str, Any], scale: float = 1.0, digits: int = 1) -> list[str]:
    """Cells of a table: with Xavier, without, and the ratio."""
    on, off = (f"{found[side]['median'] * scale:.{digits}f}" for side in ("on", "off"))
    return [on, off, f"{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"]
