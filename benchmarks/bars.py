"""The targets of the parts, and by how much they are missed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Part = Mapping[str, Any]
Values = Mapping[str, float]
"""Medians by the name of what was measured."""


class Bar(NamedTuple):
    what: str
    limit: float
    values: Callable[[Part], Values]
    at_least: bool = False
    """If false, `limit` is a maximum."""
    limited_by: str = ""
    """Why the target was missed, where that is known."""


def judge(name: str, part: Part) -> list[dict[str, Any]]:
    """The worst value for each bar of this part that was measured; JSON-able."""
    return [_judged(bar, values) for bar in BARS.get(name, ()) if (values := bar.values(part))]


def _judged(bar: Bar, values: Values) -> dict[str, Any]:
    of, value = (min if bar.at_least else max)(values.items(), key=lambda item: item[1])
    return {
        "what": bar.what,
        "of": of,
        "limit": bar.limit,
        "at_least": bar.at_least,
        "value": value,
        "met": value >= bar.limit if bar.at_least else value <= bar.limit,
        "limited_by": bar.limited_by,
    }


def markdown(judged: Sequence[Mapping[str, Any]]) -> str:
    """A table, followed by an empty line; empty if there are no bars."""
    if not judged:
        return ""
    lines = ["| target | worst median | result |", "|---|---|---|"]
    causes = []
    for bar in judged:
        sign = "≥" if bar["at_least"] else "≤"
        of = f" ({bar['of']})" if bar["of"] else ""
        verdict = "met" if bar["met"] else f"**missed**, {bar['value'] / bar['limit']:.2f} ×"
        if bar["limited_by"] and not bar["met"]:
            causes += ["", f"“{bar['what']}” is limited by {bar['limited_by']}."]
        value, limit = _shown(bar["value"]), _shown(bar["limit"])
        lines.append(f"| {bar['what']} {sign} {limit} | {value}{of} | {verdict} |")
    return "\n".join(lines + causes) + "\n\n"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _median(name: str) -> Callable[[Part], Values]:
    return lambda part: {"": part[name]["median"]}


def _rows(name: str) -> Callable[[Part], Values]:
    return lambda part: {
        f"{row['row_bytes'] >> 20} MiB × {row['pairs']}": row[name]["median"]
        for row in part["rows"]
        if row["row_bytes"] >= 4 << 20
    }


def _hits(name: str, transports: Iterable[str], lengths: Iterable[int]) -> Callable[[Part], Values]:
    return lambda part: {
        f"{transport}, {row['tokens']} tokens": row["transports"][transport][name]["median"]
        for row in part["lengths"]
        for transport in transports
        if row["tokens"] in lengths
    }


def _compared(name: str) -> Callable[[Part], Values]:
    return lambda part: {"": part["compared"][name]["ratio"]}


def _steps_per_s(part: Part) -> Values:
    return {"": part["steps"]["per_s"]["ratio"]}


def _half_width(part: Part) -> Values:
    steps = part["steps"]["per_s"]
    return {"": (steps["high"] - steps["low"]) / 2}


def _step_cost(part: Part) -> Values:
    return {"": part["steps"]["parts"]["whole"]["cost"]["median"]}


def _own_python(part: Part) -> Values:
    return {"": part["steps"]["ours"]["median"]}


def _watchers(part: Part) -> Values:
    return {
        f"{row['watchers']}": row["p99_ms"]["median"]
        for row in part["propagation"]
        if row["watchers"] == 16
    }


def _by_peers(name: str, most: int = 1000, which: str = "median") -> Callable[[Part], Values]:
    return lambda part: {
        f"{row['peers']} peers": row[name][which] for row in part["peers"] if row["peers"] <= most
    }


def _sizes(name: str) -> Callable[[Part], Values]:
    return lambda part: {f"{row['replicas']}": row[name]["median"] for row in part["sizes"]}


def _routed(ratio: str, replicas: Iterable[int] = ()) -> Callable[[Part], Values]:
    return lambda part: {
        f"{run['trace']}, {run['replicas']} × {run['load']:g}": run[ratio]
        for run in part["runs"]
        if not run["error"] and (not replicas or run["replicas"] in replicas)
    }


def _simulated(part: Part) -> Values:
    """By how much the simulator is wrong, whichever is larger."""
    ratios = {name: way["simulated/measured"] for name, way in part["ways"].items()}
    return {name: max(ratio, 1 / ratio) for name, ratio in ratios.items()}


def _choices(part: Part) -> Values:
    return {f"held {held}": value["median"] for held, value in part["choice_ms"].items()}


_BOTH = ("gloo", "shared_memory")
_TWO_COPIES = (
    "two copies of every row, by the fetch and by the load, and about 6 ms of messages and of "
    "vLLM's own steps ([where the time goes](performance.md#where-the-time-of-a-remote-hit-goes))"
)
_STORING = (
    "vLLM's calls of a connector in each step ([table](performance.md#what-a-step-pays-for-the-"
    "connector)), and by the processor time that storing takes from "
    "computing: storing and publishing a prompt of 500 tokens takes 3 to 6 ms of the engine's "
    "processors and 1 to 2 of the tracker's, and where the model computes on all processors, each "
    "of them delays it by more than two"
)
_INTERFACE = (
    "what vLLM does to call a connector, in each layer and around the model, which takes most of "
    "the step's cost ([table](performance.md#what-a-step-pays-for-the-connector))"
)
_MEMORY = (
    "memory: each chunk is looked up in three dictionaries that other work has put out of the "
    "processor's cache ([Evictions](performance.md#evictions))"
)
_COLD = (
    "the processor's cache, in which the model leaves nothing of it ([a step]"
    "(performance.md#what-a-step-pays-for-the-connector))"
)
_PAUSES = (
    "the machine where it stops a thread for milliseconds: see the longest step without a snapshot"
)
BARS: Mapping[str, tuple[Bar, ...]] = {
    "transport": (
        Bar("Gloo ÷ raw TCP from 4 MiB on", 0.8, _rows("gloo/tcp"), at_least=True),
        Bar("shared memory ÷ memcpy from 4 MiB on", 0.8, _rows("shared_memory/memcpy"), True),
    ),
    "hit": (
        Bar(
            "overhead ÷ (floor + 5 ms)",
            2.0,
            _hits("ratio", _BOTH, (8000,)),
            limited_by=_TWO_COPIES,
        ),
        Bar(
            "remote ÷ local",
            1.25,
            _hits("remote/local", ("shared_memory",), (8000,)),
            limited_by=_TWO_COPIES,
        ),
        Bar("cold ÷ remote", 20.0, _hits("cold/remote", ("shared_memory",), (8000,)), True),
    ),
    "hit_async": (
        Bar(
            "overhead ÷ (floor + 5 ms)", 2.0, _hits("ratio", _BOTH, (4000,)), limited_by=_TWO_COPIES
        ),
        Bar("cold ÷ remote", 20.0, _hits("cold/remote", ("shared_memory",), (4000,)), True),
    ),
    "no_hits": (
        Bar(
            "throughput ÷ that without a connector",
            0.99,
            _compared("requests_per_s"),
            at_least=True,
            limited_by=_STORING,
        ),
        Bar("steps a second ÷ those without a connector", 0.99, _steps_per_s, True, _INTERFACE),
        Bar("half of the steps' confidence interval", 0.01, _half_width),
        Bar("p99 time between tokens ÷ that without a connector", 1.02, _compared("gap_p99_s")),
        Bar("ms that a step costs", 0.25, _step_cost),
        Bar("ms of our own Python in it", 0.04, _own_python, limited_by=_COLD),
    ),
    "scheduler": (
        Bar("µs per chunk missed", 1.0, _by_peers("miss_us"), limited_by=_MEMORY),
        Bar("µs per chunk hit", 0.5, _by_peers("hit_us")),
        Bar("ms of an attempt, up to 32 peers", 2.0, _by_peers("attempt_ms", 32), False, _MEMORY),
        Bar("ms of an attempt", 5.0, _by_peers("attempt_ms")),
        Bar("ms of the longest call", 2.0, _by_peers("longest_ms")),
        Bar(
            "ms of the longest call ever, but for garbage collection",
            5.0,
            _by_peers("longest_own_ms", which="most"),
            limited_by=_PAUSES,
        ),
        Bar(
            "ms of a step beside a snapshot",
            3.0,
            _median("step_beside_snapshot_ms"),
            limited_by=_PAUSES,
        ),
    ),
    "tracker": (
        Bar("keys published per second, one process", 200_000, _median("publishes_per_s"), True),
        Bar("lookups per second, one process", 1_000_000, _median("lookups_per_s"), True),
        Bar(
            "p99 ms until an update reaches a watcher",
            20.0,
            _watchers,
            limited_by="1,600 answers a second, which take most of the processors if tracker, "
            "publisher and watchers share one machine; the table also has the same calls without "
            "content",
        ),
        Bar("bytes per key of a mirror", 120.0, lambda part: {"": part["mirror_bytes_per_key"]}),
    ),
    "routing": (
        Bar("mean ÷ that of the best other choice", 1.02, _routed("mean/best")),
        Bar("99 of 100 ÷ that of the best other choice", 1.02, _routed("p99/best")),
        Bar(
            "mean with four replicas ÷ that in turn",
            0.57,
            _routed("mean/today", (4,)),
            limited_by="the load: at half of it prompts hardly wait, so there is little to gain; "
            "the ideal of the table is at 0.51 to 0.55 there",
        ),
        Bar("ms of a choice among 1,000 replicas", 1.0, _choices),
    ),
    "replay": (
        Bar("mean as simulated ÷ as measured, or the reverse", 1.25, _simulated),
        Bar("mean ÷ that in turn", 1.0, _compared("mean_s")),
    ),
    "named": (Bar("cold ÷ remote", 10.0, _median("cold/remote"), at_least=True),),
    "stampede": (
        Bar("tokens computed ÷ tokens of the prompt", 1.2, _sizes("computed")),
        Bar("last answer ÷ alone", 1.2, _sizes("slowest/alone")),
    ),
}
