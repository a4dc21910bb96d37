"""Two things measured in turns until their ratio is known well enough, or time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t  # type: ignore[import-untyped]

from benchmarks.figures import MIN_SAMPLES, figure

CONFIDENCE = 0.95
_RESAMPLED = 1000


class Interval(NamedTuple):
    """Where the mean of pairs' ratios lies."""

    ratio: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def interval(samples: Sequence[float], reference: Sequence[float]) -> Interval:
    """Student's, of the logarithms of the pairs' ratios: their geometric mean and its bounds."""
    logs = [math.log(one / other) for one, other in zip(samples, reference, strict=True)]
    middle = mean(logs)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def pooled(
    samples: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], percent: float
) -> Interval:
    """Of a percentile of all samples of one side and that of the other, where a run alone has too
    few for it. Bounds by drawing pairs anew (bootstrap)."""
    sides = [[np.asarray(run) for run in side] for side in (samples, reference)]
    draw = np.random.default_rng(0).integers

    def ratio(chosen: Iterable[int]) -> float:
        one, other = (np.percentile(np.concatenate([s[n] for n in chosen]), percent) for s in sides)
        return float(one / other)

    count = len(samples)
    drawn = [ratio(draw(count, size=count).tolist()) for _ in range(_RESAMPLED)]
    low, high = np.percentile(drawn, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(ratio(range(count)), float(low), float(high))


Run = Mapping[str, float]
"""Figures by their names."""
Pairs = Sequence[tuple[Run, Run]]


def alternate(
    run: Callable[[bool], Run], *, until: float, known: Callable[[Pairs], bool]
) -> list[tuple[Run, Run]]:
    """Pairs of `run(True)` and `run(False)`, which of the two first changing from pair to pair.

    At least MIN_SAMPLES, and then until they are enough for `known`, or `time.monotonic()` is
    `until`.
    """
    pairs: list[tuple[Run, Run]] = []
    while len(pairs) < MIN_SAMPLES or (time.monotonic() < until and not known(pairs)):
        if len(pairs) % 2:
            off, on = run(False), run(True)
        else:
            on, off = run(True), run(False)
        pairs.append((on, off))
    return pairs


def are_known(pairs: Pairs, names: Iterable[str], width: float) -> bool:
    """The ratio of each of these figures, to plus or minus `width`."""
    return all(ratio_of(pairs, name).half_width <= width for name in names)


def ratio_of(pairs: Pairs, name: str) -> Interval:
    return interval([on[name] for on, _ in pairs], [off[name] for _, off in pairs])


def summary(pairs: Pairs) -> dict[str, Any]:
    """Of each figure that both have: both of its sides, and the ratio with its bounds."""
    names = [name for name in pairs[0][0] if name in pairs[0][1]]
    return {
        name: {
            "on": figure([on[name] for on, _ in pairs]),
            "off": figure([off[name] for _, off in pairs]),
            **ratio_of(pairs, name)._asdict(),
        }
        for name in names
    }


def line(title: str, found: Mapping[str, Any], scale: float = 1.0, digits: int = 1) -> str:
    """Of a table: with Xavier, without, and the ratio."""
    on, off = (found[side]["median"] * scale for side in ("on", "off"))
    bounds = f"{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
    return f"| {title} | {on:.{digits}f} | {off:.{digits}f} | {bounds} |"
