"""Part `no_hits`: what sharing costs when there is nothing to share.

Two vLLM engines, one with Xavier and one without, serve the same kind of load in turns: prompts
that share nothing, several at once, with answers of several lengths, so that some are begun while
others are told. Runs are short, since how fast this machine is changes by the minute; they are
paired and repeated until throughput and the slowest gaps between tokens can be compared to a
hundredth, or time is over. The one with Xavier stores all that it computes, as it would in service,
and drops the oldest for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from statistics import quantiles
from typing import Any

import psutil

from benchmarks import pairs
from benchmarks.engines import DTYPE, Fleet, Kind, Load, Prompts
from benchmarks.figures import figure, shown

TITLE = "Nothing to share"
PROMPT_TOKENS = 500
ANSWER_TOKENS = (20, 44, 28, 36)
"""In turn."""
REQUESTS = 8
"""Of a run."""
AT_ONCE = 4
SECONDS = 1200.0
"""For all pairs."""
WIDTH = 0.01
QUICK = {"SECONDS": 60.0}
_ON, _OFF = "on", "off"
_THREADS = "xavier-"  # what the names of ours begin with


def measure() -> dict[str, Any]:
    prompts = Prompts()
    gaps = Gaps()
    with Fleet({_ON: Kind(), _OFF: Kind(None)}) as fleet:
        transfer = psutil.Process(fleet.replicas()[_ON]["stats"]["transfer_pid"])

        def run(on: bool) -> pairs.Run:
            engine = fleet[_ON if on else _OFF]
            given = [prompts.fresh(PROMPT_TOKENS) for _ in range(REQUESTS)]
            before = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            answers = list(itertools.islice(itertools.cycle(ANSWER_TOKENS), REQUESTS))
            load: Load = engine.do("serve", given, answers, AT_ONCE)
            after = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            found = of_load(load)
            gaps.add(on, load)
            tokens = PROMPT_TOKENS * REQUESTS
            found["cpu_s"] = per_thousand(after[0] - before[0], tokens)
            if on:
                found["transfer_s"] = per_thousand(after[2] - before[2], tokens)
                found |= of_threads(before[1], after[1], tokens)
            return found

        for on in (True, False):  # what is made at the first request
            run(on)
        gaps.clear()
        found = pairs.alternate(
            run,
            until=time.monotonic() + SECONDS,
            known=lambda made: (
                pairs.are_known(made, ["requests_per_s"], WIDTH)
                and gaps.slowest().half_width <= WIDTH
            ),
        )
    return summary(found, gaps.slowest())


class Gaps:
    """Between tokens, in seconds, of all runs: one alone has too few to tell how long one in a
    hundred is."""

    def __init__(self) -> None:
        self._sides: dict[bool, list[list[float]]] = {True: [], False: []}

    def add(self, on: bool, load: Load) -> None:
        self._sides[on].append(_gaps(load))

    def clear(self) -> None:
        for side in self._sides.values():
            side.clear()

    def slowest(self) -> pairs.Interval:
        """With Xavier, as a ratio to without."""
        return pairs.pooled(self._sides[True], self._sides[False], 99)


def _gaps(load: Load) -> list[float]:
    return [gap for asked in load.asked for gap in asked.gaps]


def of_load(load: Load) -> dict[str, float]:
    """Raises RuntimeError if a prompt was not computed anew."""
    if any(asked.cached for asked in load.asked):
        raise RuntimeError("a prompt that nobody can know was known")
    first = [asked.first for asked in load.asked]
    gaps = _gaps(load)
    return {
        "requests_per_s": len(load.asked) / load.seconds,
        "first_p50_s": _percentile(first, 50),
        "first_p99_s": _percentile(first, 99),
        "gap_p50_s": _percentile(gaps, 50),
        "gap_p99_s": _percentile(gaps, 99),
    }


def of_threads(
    before: Mapping[str, float], after: Mapping[str, float], tokens: int
) -> dict[str, float]:
    return {
        name: per_thousand(seconds - before.get(name, 0.0), tokens)
        for name, seconds in after.items()
        if name.startswith(_THREADS)
    }


def per_thousand(seconds: float, tokens: int) -> float:
    return seconds / tokens * 1000


def _percentile(samples: list[float], percent: int) -> float:
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def summary(found: pairs.Pairs, slowest: pairs.Interval) -> dict[str, Any]:
    """`slowest`: the ratio of the slowest gaps of all runs."""
    names = [name for name in found[0][0] if name not in found[0][1]]
    compared = pairs.summary(found)
    compared["gap_p99_s"] |= slowest._asdict()
    return {
        "pairs": len(found),
        "compared": compared,
        "ours_s": {name: figure([on[name] for on, _ in found]) for name in names},
    }


_LINES = {
    "requests_per_s": ("requests per second", 1.0, 2),
    "first_p50_s": ("first token, median, ms", 1e3, 1),
    "first_p99_s": ("first token, 99 of 100, ms", 1e3, 1),
    "gap_p50_s": ("between tokens, median, ms", 1e3, 2),
    "gap_p99_s": ("between tokens, 99 of 100, ms", 1e3, 2),
    "cpu_s": ("CPU ms per 1,000 prompt tokens, all processes", 1e3, 1),
}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"{REQUESTS} requests of {PROMPT_TOKENS} tokens that share nothing, {AT_ONCE} at once, "
        f"{', '.join(map(str, ANSWER_TOKENS))} tokens answered in turn, at the engine ({DTYPE}); "
        f"{part['pairs']} pairs of runs in turns with Xavier and without. Ratios are geometric "
        "means over the pairs, that of 99 of 100 gaps between tokens is of all gaps of all runs; "
        "in brackets their 95 % confidence interval.",
        "",
        "| | with Xavier | vLLM alone | ratio |",
        "|---|---|---|---|",
    ]
    for name, (title, scale, digits) in _LINES.items():
        lines.append(pairs.line(title, part["compared"][name], scale, digits))
    lines += [
        "",
        "Ours of that, CPU ms per 1,000 prompt tokens; part `scheduler` has what vLLM's own "
        "thread spends on us:",
        "",
        "| thread or process | CPU ms |",
        "|---|---|",
    ]
    for name, value in part["ours_s"].items():
        per = figure([seconds * 1e3 for seconds in value["samples"]])
        title = "transfer process" if name == "transfer_s" else f"thread `{name}`"
        lines.append(f"| {title} | {shown(per)} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    plot_ratios(part["compared"], {name: words[0] for name, words in _LINES.items()}, axes)


def plot_ratios(compared: Mapping[str, Any], titles: Mapping[str, str], axes: Any) -> None:
    shown_here = [name for name in titles if name in compared]
    middle = [compared[name]["ratio"] for name in shown_here]
    below = [compared[name]["ratio"] - compared[name]["low"] for name in shown_here]
    above = [compared[name]["high"] - compared[name]["ratio"] for name in shown_here]
    labels = [titles[name].removesuffix(", ms") for name in shown_here]
    axes.errorbar(middle, labels, xerr=[below, above], marker="o", capsize=3, linestyle="")
    axes.axvline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel("with Xavier ÷ vLLM alone, 95 % confidence")
