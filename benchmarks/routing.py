"""Part `routing`: where requests should go, by playing real traces, sessions of many rounds, and
questions after one common prompt on simulated replicas.

The router, the index and the pools are the real ones; the rest is in
`simulator.py` and `replica_model.py`, and the other choices are in `rivals.py`. The reference is
whichever of them does best. For traces and sessions an ideal is computed beside it: one queue for
all replicas, which hold everything that was ever computed and decode elsewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import rivals, traces
from benchmarks.figures import table
from benchmarks.replica_model import ENGINE
from benchmarks.simulator import EarliestFinish, Maker, Result, Simulator
from benchmarks.traces import CHUNK, Common, Request, Rounds

REPLICAS = (2, 4, 8, 64)
LOADS = (0.5, 0.8, 0.95)
REQUESTS = 3000
"""Requests of a trace that are played."""
PIECES = 16
ERRORS = (0.5, 1.0)
"""The shares by which a prompt takes longer or less than forecast, in runs of their own."""
ERROR_REPLICAS, ERROR_LOAD = 4, 0.8
ROUNDS_REPLICAS, ROUNDS_LOADS, ROUNDS_SECONDS = (4, 8), (0.5, 0.8, 0.9), 300.0
COMMON = ((1, 1000), (5, 1000), (10, 1000), (20, 500))
"""Requests a second, and tokens of an answer."""
COMMON_REPLICAS, COMMON_SECONDS = 8, 180.0
QUICK = {
    "REPLICAS": (4,),
    "REQUESTS": 500,
    "ERRORS": (1.0,),
    "ROUNDS_REPLICAS": (4,),
    "ROUNDS_SECONDS": 60.0,
    "COMMON": ((5, 1000),),
    "COMMON_SECONDS": 60.0,
}
OURS, TODAY = "earliest finish", "in turn"
POLICIES: Mapping[str, tuple[Maker, bool]] = {
    OURS: (EarliestFinish, True),
    "in turn, not shared": (rivals.InTurn, False),
    TODAY: (rivals.InTurn, True),
    "fewest requests": (rivals.FewestRequests, True),
    "shortest backlog": (rivals.ShortestBacklog, True),
    "SGLang's thresholds": (rivals.Thresholds, True),
    "llm-d's weights": (rivals.Weights, True),
    "Dynamo's cost": (rivals.Blocks, True),
}
"""How a replica is chosen, and whether prefixes are shared."""
COMPARED = ("first_mean_s", "first_p99_s", "last_mean_s", "last_p99_s")


def measure() -> dict[str, Any]:
    return {"runs": [*_on_traces(), *_on_rounds(), *_on_common()]}


def _on_traces() -> Iterator[dict[str, Any]]:
    cases = [(replicas, load, 0.0) for replicas in REPLICAS for load in LOADS]
    cases += [(ERROR_REPLICAS, ERROR_LOAD, error) for error in ERRORS]
    for name in traces.NAMES:
        trace = traces.load(name)[:REQUESTS]
        for replicas, load, error in cases:
            pieces = PIECES if replicas > PIECES else 1
            requests = traces.spread(trace, load * replicas * ENGINE.prefill, pieces)
            yield _run(name, requests, replicas, load, error)


def _on_rounds() -> Iterator[dict[str, Any]]:
    for replicas in ROUNDS_REPLICAS:
        for load in ROUNDS_LOADS:
            requests = Rounds().requests(load * replicas * ENGINE.prefill, ROUNDS_SECONDS)
            yield _run("rounds", requests, replicas, load)


def _on_common() -> Iterator[dict[str, Any]]:
    """Their load is told by requests a second and tokens of an answer."""
    for per_s, answer in COMMON:
        requests = Common(answer=answer).requests(per_s, COMMON_SECONDS)
        yield _run("common", requests, COMMON_REPLICAS, f"{per_s}/s × {answer:,}")


def _run(
    name: str, requests: Sequence[Request], replicas: int, load: float | str, error: float = 0.0
) -> dict[str, Any]:
    policies = {
        policy: summary(Simulator(replicas, maker, shares=shares, error=error).run(requests))
        for policy, (maker, shares) in POLICIES.items()
    }
    return {
        "trace": name,
        "replicas": replicas,
        "load": load,
        "error": error,
        "requests": len(requests),
        "seconds": requests[-1].at,
        "ideal_s": _ideal(requests, replicas),
        "policies": policies,
        "against_best": {each: _against_best(policies, each) for each in COMPARED},
        "against_today": {each: policies[OURS][each] / policies[TODAY][each] for each in COMPARED},
    }


def _against_best(policies: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Ours ÷ the best of the others."""
    return policies[OURS][name] / min(
        found[name] for policy, found in policies.items() if policy != OURS
    )


def summary(result: Result) -> dict[str, float]:
    """Seconds to the first and to the last token, milliseconds of a token between them, the most
    requests of a replica ÷ their mean, shares of the prompts' tokens by where they came from, and
    what it cost."""
    found = result.tokens
    tokens = found.local + found.fetched + found.read + found.computed
    decoding = sum(result.last) - sum(result.first)
    return {
        "first_mean_s": mean(result.first),
        "first_p99_s": float(np.percentile(result.first, 99)),
        "last_mean_s": mean(result.last),
        "last_p99_s": float(np.percentile(result.last, 99)),
        "token_ms": 1000 * decoding / max(1, sum(result.answers) - len(result.answers)),
        "most/mean": max(result.sent.values()) / mean(result.sent.values()),
        "local": found.local / tokens,
        "fetched": found.fetched / tokens,
        "read": found.read / tokens,
        "saved": result.saved / tokens,
        "computed": found.computed / tokens,
        "moved_bytes": found.fetched // CHUNK * ENGINE.chunk_bytes,
        "choice_us": median(result.choices_us),
    }


def _ideal(requests: Sequence[Request], replicas: int) -> float:
    """The mean to the first token, if whichever replica is free takes the next prompt and holds all
    that was ever computed."""
    known: set[bytes] = set()
    free = [0.0] * replicas
    heapify(free)
    seconds = 0.0
    for request in requests:
        hits = next((n for n, key in enumerate(request.keys) if key not in known), None)
        hits = len(request.keys) if hits is None else hits
        known.update(request.keys)
        ends = max(request.at, free[0]) + ENGINE.compute_seconds(request, hits)
        heapreplace(free, ends)
        seconds += ends - request.at
    return seconds / len(requests)


def markdown(part: dict[str, Any]) -> str:
    """A row for each run and choice: seconds to the first and to the last token, mean / 99 of 100;
    the ideal is a mean."""
    columns = ("run", "choice", "first token, s", "last token, s", "ms a token", _MOST, _CHOICE)
    return table(columns, (row for run in part["runs"] for row in _rows(run)))


_MOST = "requests of a replica, most ÷ mean"
_CHOICE = "µs per choice"


def _rows(run: Mapping[str, Any]) -> Iterator[list[str]]:
    error = f", ± {run['error']:.0%}" if run["error"] else ""
    name = f"{run['trace']}, {run['replicas']} × {run['load']}{error}"
    for policy, each in run["policies"].items():
        yield [
            name,
            policy,
            f"{each['first_mean_s']:.2f} / {each['first_p99_s']:.1f}",
            f"{each['last_mean_s']:.1f} / {each['last_p99_s']:.0f}",
            f"{each['token_ms']:.1f}",
            f"{each['most/mean']:.2f}",
            f"{each['choice_us']:.0f}",
        ]
    yield [name, "ideal", f"{run['ideal_s']:.2f}", "", "", "", ""]
