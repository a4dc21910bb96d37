"""Part `no_hits`: what sharing costs when there is nothing to share.

Two vLLM engines, one with Xavier and one without, serve the same kind of load in turns: prompts
that share nothing, several at once. Runs are paired and repeated until throughput and the slowest
gaps between tokens can be compared to a hundredth, or time is over. The one with Xavier stores all
that it computes, as it would in service, and drops the oldest for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

import psutil

from benchmarks import pairs
from benchmarks.engines import DTYPE, Fleet, Kind, Load, Prompts
from benchmarks.figures import figure, shown

TITLE = "Nothing to share"
PROMPT_TOKENS = 500
ANSWER_TOKENS = 32
REQUESTS = 24
"""Of a run."""
AT_ONCE = 4
SECONDS = 300.0
"""For all pairs."""
WIDTH = 0.01
QUICK = {"SECONDS": 60.0, "REQUESTS": 8}
_ON, _OFF = "on", "off"
_THREADS = "xavier-"  # what the names of ours begin with


def measure() -> dict[str, Any]:
    prompts = Prompts()
    with Fleet({_ON: Kind(), _OFF: Kind(None)}) as fleet:
        transfer = psutil.Process(fleet.replicas()[_ON]["stats"]["transfer_pid"])

        def run(on: bool) -> pairs.Run:
            engine = fleet[_ON if on else _OFF]
            given = [prompts.fresh(PROMPT_TOKENS) for _ in range(REQUESTS)]
            before = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            load: Load = engine.do("serve", given, ANSWER_TOKENS, AT_ONCE)
            after = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            found = of_load(load)
            tokens = PROMPT_TOKENS * REQUESTS
            found["cpu_s"] = per_thousand(after[0] - before[0], tokens)
            if on:
                found["transfer_s"] = per_thousand(after[2] - before[2], tokens)
                found |= of_threads(before[1], after[1], tokens)
            return found

        for on in (True, False):  # what is made at the first request
            run(on)
        found = pairs.alternate(
            run,
            until=time.monotonic() + SECONDS,
            watched={"requests_per_s": WIDTH, "gap_p99_s": WIDTH},
        )
    return summary(found)


def of_load(load: Load) -> dict[str, float]:
    """Raises RuntimeError if a prompt was not computed anew."""
    if any(asked.cached for asked in load.asked):
        raise RuntimeError("a prompt that nobody can know was known")
    first = [asked.first for asked in load.asked]
    gaps = [gap for asked in load.asked for gap in asked.gaps]
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


def summary(found: Sequence[tuple[pairs.Run, pairs.Run]]) -> dict[str, Any]:
    names = [name for name in found[0][0] if name not in found[0][1]]
    return {
        "pairs": len(found),
        "compared": pairs.summary(found),
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
        f"{ANSWER_TOKENS} tokens answered, at the engine ({DTYPE}); {part['pairs']} pairs of runs "
        "in turns with Xavier and without. Ratios are geometric means over the pairs, in brackets "
        "their 95 % confidence interval.",
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
