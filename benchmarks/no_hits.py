"""Part `no_hits`: what sharing costs when there is nothing to share.

Two vLLM engines, one with Xavier and one without, serve the same kind of load in turns: prompts
that share nothing, several at once, with answers of several lengths, so that some begin while
others go on. The engine with Xavier stores everything that it computes, as it would in service, and
evicts the oldest chunks.

Loads are short because the machine's speed changes by the minute. Two engines of the same kind
differ by a hundredth or two for as long as they live, so both are started anew for each pair. Pairs
are made until throughput and the longest times between tokens are known to a hundredth, or until
time is up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from statistics import quantiles
from typing import Any, NamedTuple

import psutil

from benchmarks import pairs
from benchmarks.engines import DTYPE, Fleet, Kind, Load, Prompts
from benchmarks.figures import figure, shown

TITLE = "Nothing to share"
PROMPT_TOKENS = 500
ANSWER_TOKENS = (20, 44, 28, 36)
"""Output tokens of the requests, in turn."""
REQUESTS = 8
"""Requests per load."""
LOADS = 8
"""Loads per engine."""
AT_ONCE = 4
SECONDS = 1800.0
"""Seconds for all pairs."""
WIDTH = 0.01
QUICK = {"SECONDS": 0.0, "LOADS": 2}
_ON, _OFF = "on", "off"
_THREADS = "xavier-"  # prefix of our threads' names


class Served(NamedTuple):
    """A load and the processor seconds that it took: in the engine, in its threads by name, and in
    its transfer process."""

    load: Load
    engine: float
    threads: Mapping[str, float]
    transfer: float


def measure() -> dict[str, Any]:
    prompts = Prompts()
    found = pairs.until_known(
        lambda number: _pair(number, prompts),
        until=time.monotonic() + SECONDS,
        watched={"requests_per_s": WIDTH, "gap_p99_s": WIDTH},
    )
    return summary(found)


def _pair(number: int, prompts: Prompts) -> pairs.Pair:
    """A pair of new engines."""
    kinds = {_ON: Kind(), _OFF: Kind(None)}
    in_order = dict([*kinds.items()][:: -1 if number % 2 else 1])
    with Fleet(in_order) as fleet:
        transfer = psutil.Process(fleet.replicas()[_ON]["stats"]["transfer_pid"])

        def serve(on: bool) -> Served:
            engine = fleet[_ON if on else _OFF]
            given = [prompts.fresh(PROMPT_TOKENS) for _ in range(REQUESTS)]
            answers = [*islice(cycle(ANSWER_TOKENS), REQUESTS)]
            before = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            load: Load = engine.do("serve", given, answers, AT_ONCE)
            after = engine.cpu_seconds(), engine.do("threads"), _seconds(transfer)
            threads = {
                name: seconds - before[1].get(name, 0.0) for name, seconds in after[1].items()
            }
            return Served(load, after[0] - before[0], threads, after[2] - before[2])

        for on in (True, False):  # whatever is made at the first request
            serve(on)
        turns = [pairs.in_turns(serve)(turn) for turn in range(LOADS)]
    shared, alone = [on for on, _ in turns], [off for _, off in turns]
    return of_loads(shared) | ours(shared), of_loads(alone)


def of_loads(served: Sequence[Served]) -> dict[str, float]:
    """The figures of loads. Raises RuntimeError if a prompt was not computed anew."""
    asked = [one for load in served for one in load.load.asked]
    if any(one.cached for one in asked):
        raise RuntimeError("a fresh prompt was known")
    first = [one.first for one in asked]
    gaps = [gap for one in asked for gap in one.gaps]
    return {
        "requests_per_s": len(asked) / sum(load.load.seconds for load in served),
        "first_p50_s": _percentile(first, 50),
        "first_p99_s": _percentile(first, 99),
        "gap_p50_s": _percentile(gaps, 50),
        "gap_p99_s": _percentile(gaps, 99),
        "cpu_s": per_thousand(sum(load.engine for load in served), len(asked)),
    }


def ours(served: Sequence[Served]) -> dict[str, float]:
    """Processor seconds per 1,000 prompt tokens of the transfer process and of our threads."""
    requests = sum(len(load.load.asked) for load in served)
    spent = defaultdict(float, transfer_s=sum(load.transfer for load in served))
    for load in served:
        for name, seconds in load.threads.items():
            if name.startswith(_THREADS):
                spent[name] += seconds
    return {name: per_thousand(seconds, requests) for name, seconds in spent.items()}


def per_thousand(seconds: float, requests: int) -> float:
    """Seconds per 1,000 prompt tokens."""
    return seconds / (requests * PROMPT_TOKENS) * 1000


def _percentile(samples: list[float], percent: int) -> float:
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def summary(found: Sequence[pairs.Pair]) -> dict[str, Any]:
    names = sorted({name for on, off in found for name in on.keys() - off.keys()})
    return {
        "pairs": len(found),
        "compared": pairs.summary(found),
        "ours_s": {name: figure([on.get(name, 0.0) for on, _ in found]) for name in names},
    }


_LINES = {
    "requests_per_s": ("requests per second", 1.0, 2),
    "first_p50_s": ("time to first token, median, ms", 1e3, 1),
    "first_p99_s": ("time to first token, p99, ms", 1e3, 1),
    "gap_p50_s": ("time between tokens, median, ms", 1e3, 2),
    "gap_p99_s": ("time between tokens, p99, ms", 1e3, 2),
    "cpu_s": ("CPU ms per 1,000 prompt tokens, all processes", 1e3, 1),
}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"{LOADS} times {REQUESTS} requests of {PROMPT_TOKENS} tokens that share nothing, "
        f"{AT_ONCE} at once, with {', '.join(map(str, ANSWER_TOKENS))} output tokens in turn, at "
        f"the engine ({DTYPE}), in turns with Xavier and without, by {part['pairs']} pairs of "
        "engines. Ratios are geometric means over the pairs, with 95 % confidence intervals in "
        "brackets.",
        "",
        "| | with Xavier | vLLM alone | ratio |",
        "|---|---|---|---|",
    ]
    for name, (title, scale, digits) in _LINES.items():
        lines.append(pairs.line(title, part["compared"][name], scale, digits))
    lines += [
        "",
        "Our share of the CPU time, in ms per 1,000 prompt tokens; part `scheduler` has what "
        "vLLM's own thread spends on us:",
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
