"""The targets of the parts, and by how much they are missed.

Each is a ratio to a reference of the same run, or does not depend on the machine's speed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.figures import table

Part = Mapping[str, Any]
Values = Mapping[str, float]
"""Medians by the name of what was measured."""


class Bar(NamedTuple):
    what: str
    limit: float
    values: Callable[[Part], Values]
    at_least: bool = False
    """Whether `limit` is a minimum; else it is a maximum."""


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
    }


def markdown(judged: Sequence[Mapping[str, Any]]) -> str:
    """A table, followed by an empty line; empty if there are no bars."""
    if not judged:
        return ""
    return table(["target", "worst median", "result"], map(_cells, judged)) + "\n\n"


def _cells(bar: Mapping[str, Any]) -> list[str]:
    sign = "≥" if bar["at_least"] else "≤"
    of = f" ({bar['of']})" if bar["of"] else ""
    verdict = "met" if bar["met"] else f"**missed**, {bar['value'] / bar['limit']:.2f} ×"
    return [f"{bar['what']} {sign} {bar['limit']:.3g}", f"{bar['value']:.3g}{of}", verdict]


def _rows(name: str) -> Callable[[Part], Values]:
    return lambda part: {
        f"{row['row_bytes'] >> 20} MiB × {row['pairs']}": row[name]["median"]
        for row in part["rows"]
        if row["row_bytes"] >= 4 << 20
    }


def _hits(
    name: str, mode: str, transports: Iterable[str], least_tokens: int
) -> Callable[[Part], Values]:
    return lambda part: {
        f"{transport}, {row['tokens']} tokens": row["transports"][transport][name]["median"]
        for row in part[mode]["lengths"]
        for transport in transports
        if row["tokens"] >= least_tokens
    }


def _at_once(name: str) -> Callable[[Part], Values]:
    return lambda part: {"": part["at_once"][name]["median"]}


def _compared(name: str) -> Callable[[Part], Values]:
    return lambda part: {"": part["compared"][name]["ratio"]}


def _disk(name: str) -> Callable[[Part], Values]:
    return lambda part: {"": part["rows"][name]["median"]}


def _steps_per_s(part: Part) -> Values:
    return {"": part["steps"]["per_s"]["ratio"]}


def _half_width(part: Part) -> Values:
    steps = part["steps"]["per_s"]
    return {"": (steps["high"] - steps["low"]) / 2}


def _routed(name: str) -> Callable[[Part], Values]:
    """Ours ÷ the best other choice. Errors do not count."""
    return lambda part: {
        f"{run['trace']}, {run['replicas']} × {run['load']}": run["against_best"][name]
        for run in part["runs"]
        if not run["error"]
    }


def _not_in_turn(part: Part) -> Values:
    """Traces and sessions on four replicas, from load 0.8 on: at half of it prompts hardly wait,
    and a common prompt is soon everywhere."""
    return {
        f"{run['trace']}, {run['load']}": run["against_today"]["first_mean_s"]
        for run in part["runs"]
        if run["trace"] != "common"
        and run["replicas"] == 4
        and run["load"] >= 0.8
        and not run["error"]
    }


_BOTH = ("gloo", "shared_memory")
_SHARED = ("shared_memory",)
_SYNC, _ASYNC = "synchronous", "asynchronous"
BARS: Mapping[str, tuple[Bar, ...]] = {
    "transport": (Bar("Gloo ÷ raw TCP from 4 MiB on", 0.8, _rows("gloo/tcp"), at_least=True),),
    "hit": (
        Bar("overhead ÷ (floor + 5 ms)", 2.0, _hits("ratio", _SYNC, _BOTH, 8000)),
        Bar("remote ÷ pool", 1.05, _hits("remote/pool", _SYNC, _SHARED, 8000)),
        Bar("cold ÷ remote", 20.0, _hits("cold/remote", _SYNC, _SHARED, 8000), True),
        Bar(f"{_ASYNC}: overhead ÷ (floor + 5 ms)", 2.0, _hits("ratio", _ASYNC, _BOTH, 4000)),
        Bar(f"{_ASYNC}: cold ÷ remote", 20.0, _hits("cold/remote", _ASYNC, _SHARED, 4000), True),
        Bar("at once: tokens computed ÷ tokens of the prompt", 1.2, _at_once("computed")),
        Bar("at once: last answer ÷ alone", 1.2, _at_once("slowest/alone")),
    ),
    "capacity": (
        Bar(
            "pools of distinct prefixes that a host holds ÷ its pools",
            0.95,
            lambda part: {
                f"round {turn}": pools / part["engines"]
                for turn, pools in enumerate(part["in place"]["reused"], 1)
            },
            at_least=True,
        ),
        Bar(
            "bytes copied between pools ÷ bytes of the hits",
            0.01,
            lambda part: {"": part["in place"]["copied"]},
        ),
    ),
    "disk": (
        Bar("write ÷ vLLM's file tier", 1.0, _disk("write/files"), at_least=True),
        Bar("read ÷ vLLM's file tier", 0.9, _disk("read/files"), at_least=True),
        Bar(
            "throughput while all is saved ÷ while nothing is",
            0.98,
            lambda part: {"": part["writing"]["compared"]["requests_per_s"]["ratio"]},
            at_least=True,
        ),
        Bar(
            "replay: seconds saved ÷ those that pools which hold everything save",
            0.65,
            lambda part: {each["trace"]: each["gain"] for each in part["replays"]},
            at_least=True,
        ),
    ),
    "no_hits": (
        Bar("throughput ÷ that without a connector", 0.99, _compared("requests_per_s"), True),
        Bar("steps a second ÷ those without a connector", 0.99, _steps_per_s, at_least=True),
        Bar("half of the steps' confidence interval", 0.01, _half_width),
        Bar("p99 time between tokens ÷ that without a connector", 1.02, _compared("gap_p99_s")),
    ),
    "tracker": (
        Bar(
            "bytes per chunk of an index",
            180.0,
            lambda part: {f"{each['members']} members": each["bytes"] for each in part["holdings"]},
        ),
    ),
    "routing": (
        *(
            Bar(f"{token} token, {what} ÷ that of the best other choice", 1.02, _routed(name))
            for token, what, name in (
                ("first", "mean", "first_mean_s"),
                ("first", "99 of 100", "first_p99_s"),
                ("last", "mean", "last_mean_s"),
                ("last", "99 of 100", "last_p99_s"),
            )
        ),
        Bar("first token, mean with four replicas ÷ that in turn", 0.57, _not_in_turn),
    ),
}
