"""Part `no_hits`: what sharing costs when there is nothing to share.

One vLLM engine serves the same kind of load in turns, with its connector and with the connector
taken out: prompts that share nothing, several at once, with answers of several lengths, so that
some begin while others go on. With its connector the engine stores everything that it computes, as
it would in service, and evicts the oldest chunks.

It is one engine because two of the same kind differ by a hundredth or two for as long as they live.
Without its connector an engine is as fast as one that never had one. Loads are short because the
machine's speed changes by the minute. Pairs of loads are made until throughput is known to a
hundredth, or until time is up.

Then single steps that answer a token to each request are compared, in turns within one load. So
close together, the machine's speed differs less, and a minute is enough to know to a hundredth how
many steps a second the connector leaves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any, NamedTuple

import psutil

from benchmarks import pairs
from benchmarks.engines import DTYPE, SETTLE, Engine, Fleet, Kind, Load, Prompts
from benchmarks.figures import figure, shown
from benchmarks.steps import Connector, Step

TITLE = "Nothing to share"
PROMPT_TOKENS = 500
ANSWER_TOKENS = (20, 44, 28, 36)
"""Output tokens of the requests, in turn."""
REQUESTS = 8
"""Requests per load."""
AT_ONCE = 4
SECONDS = 40.0
"""Seconds for all pairs."""
WIDTH = 0.01
STEPS = 120
"""Output tokens of each request of a load whose steps are compared."""
STEP_LOADS = 20
TIMED_LOADS = 10
QUICK = {"SECONDS": 0.0, "STEP_LOADS": 5, "TIMED_LOADS": 5}
_NAME = "engine"
_THREADS = "xavier-"  # prefix of our threads' names
_STEP_PARTS = {
    "whole": "the whole step",
    "schedule": "vLLM's scheduler",
    "worker": "the worker, which calls the connector before and after each of the model's layers",
    "update": "the worker's output, stats",
}


class Served(NamedTuple):
    """A load and the processor seconds that it took: in the engine, in its threads by name, and in
    its transfer process."""

    load: Load
    engine: float
    threads: Mapping[str, float]
    transfer: float


def measure() -> dict[str, Any]:
    with Fleet({_NAME: Kind()}) as fleet:
        transfer = psutil.Process(fleet.replicas()[_NAME]["stats"]["transfer_pid"])
        loads = _Loads(fleet[_NAME], transfer)
        for on in (True, False):  # whatever is made at the first request
            loads.serve(on)
        found = pairs.until_known(
            pairs.in_turns(loads.serve),
            until=time.monotonic() + SECONDS,
            watched={"requests_per_s": WIDTH},
        )
        compared = [loads.steps(Connector.IN_TURNS) for _ in range(STEP_LOADS)]
        timed = [loads.steps(Connector.TIMED) for _ in range(TIMED_LOADS)]
    return summary(found) | {"steps": of_steps(compared, timed)}


class _Loads:
    def __init__(self, engine: Engine, transfer: psutil.Process) -> None:
        self._engine = engine
        self._transfer = transfer
        self._prompts = Prompts()

    def serve(self, on: bool) -> pairs.Run:
        """A load's figures, and what of them is ours if the connector is in."""
        self._turn(Connector.IN if on else Connector.OUT)
        before = self._spent()
        load = self._load([*islice(cycle(ANSWER_TOKENS), REQUESTS)])
        time.sleep(SETTLE)  # until all is stored and published
        after = self._spent()
        threads = {name: seconds - before[1].get(name, 0.0) for name, seconds in after[1].items()}
        served = Served(load, after[0] - before[0], threads, after[2] - before[2])
        return of_loads([served]) | (ours([served]) if on else {})

    def steps(self, state: Connector) -> list[Step]:
        """The steps that answer a token to each of a load's requests."""
        self._turn(state)
        self._engine.do("steps")
        self._load([STEPS] * AT_ONCE)
        steps: list[Step] = self._engine.do("steps")
        return [step for step in steps if step.requests == step.tokens == AT_ONCE]

    def _turn(self, state: Connector) -> None:
        time.sleep(SETTLE)
        self._engine.do("connect", state.value)

    def _load(self, answers: Sequence[int]) -> Load:
        given = [self._prompts.fresh(PROMPT_TOKENS) for _ in answers]
        load: Load = self._engine.do("serve", given, answers, AT_ONCE)
        return load

    def _spent(self) -> tuple[float, dict[str, float], float]:
        return (
            self._engine.cpu_seconds(), self._engine.do("threads"), _seconds(self._transfer)
        )  # fmt: skip


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


def of_steps(compared: Sequence[Sequence[Step]], timed: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Milliseconds of a step by load: the medians of the load's steps with the connector, without,
    and their difference; and what of it is ours and vLLM's own Python."""

    def medians(loads: Sequence[Sequence[Step]], part: str, connector: bool = True) -> list[float]:
        return [
            median(getattr(step, part) * 1e3 for step in load if step.connector == connector)
            for load in loads
        ]

    parts = {}
    for part in _STEP_PARTS:
        on, off = (medians(compared, part, connector) for connector in (True, False))
        costs = [with_it - without for with_it, without in zip(on, off, strict=True)]
        parts[part] = {"on": figure(on), "off": figure(off), "cost": figure(costs)}
    whole = parts["whole"]
    return {
        "counted": sum(map(len, compared)),
        "per_s": pairs.interval(whole["off"]["samples"], whole["on"]["samples"])._asdict(),
        "parts": parts,
        **{name: figure(medians(timed, name)) for name in ("ours", "vllms")},
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
        f"Loads of {REQUESTS} requests of {PROMPT_TOKENS} tokens that share nothing, {AT_ONCE} at "
        f"once, with {', '.join(map(str, ANSWER_TOKENS))} output tokens in turn, at one engine "
        f"({DTYPE}), in turns with its connector and with the connector taken out, by "
        f"{part['pairs']} pairs of loads. Ratios are geometric means over the pairs, with 95 % "
        "confidence intervals in brackets.",
        "",
        "| | with Xavier | without | ratio |",
        "|---|---|---|---|",
    ]
    for name, (title, scale, digits) in _LINES.items():
        lines.append(pairs.line(title, part["compared"][name], scale, digits))
    steps = part["steps"]
    lines += [
        "",
        f"A step that answers a token to each of {AT_ONCE} requests, in ms, by {steps['counted']} "
        "steps of the same engine, in turns with its connector and without:",
        "",
        "| | with Xavier | without | costs |",
        "|---|---|---|---|",
    ]
    for name, title in _STEP_PARTS.items():
        found = steps["parts"][name]
        cells = [shown(found[column], 3) for column in ("on", "off", "cost")]
        lines.append(f"| {' | '.join([title, *cells])} |")
    lines += [
        "",
        f"So it makes {steps['per_s']['ratio']:.3f} times ({steps['per_s']['low']:.3f}–"
        f"{steps['per_s']['high']:.3f}) as many steps a second as without.",
        "",
        f"In further steps, in which each call is timed, our own Python takes "
        f"{shown(steps['ours'], 3)} ms, and that of vLLM's offloading connector "
        f"{shown(steps['vllms'], 3)}.",
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
    axes.set_xlabel("with Xavier ÷ without, 95 % confidence")
