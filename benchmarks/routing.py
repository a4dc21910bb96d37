"""Part `routing`: where requests should go, by replaying real traces and sessions of many rounds on
simulated replicas.

The router, the tracker's index, the mirror and the pools are the real ones; the rest is in
`simulator.py`, and the other choices are in `rivals.py`. The reference is whichever of them does
best. An ideal is computed beside it: one queue for all replicas, which hold everything that was
ever computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import rivals, traces
from benchmarks.figures import table
from benchmarks.simulator import ENGINE, Maker, Result, Simulator
from benchmarks.traces import CHUNK, Request, Rounds

REPLICAS = (2, 4, 8, 64, 1000)
LOADS = (0.5, 0.8, 0.95)
WHOLE = (4, 1000)
"""Sizes at which the whole trace is played."""
REQUESTS = 6000
"""At other sizes."""
PIECES = 16
COPIES = {("synthetic", 1000): 3}
ERRORS = (0.5, 1.0)
"""The shares by which a prompt takes longer or less than forecast, in runs of their own."""
ERROR_REPLICAS, ERROR_LOAD = 4, 0.8
ROUNDS_REPLICAS, ROUNDS_LOADS, ROUNDS_SECONDS = (4, 8), (0.5, 0.8, 0.9), 300.0
QUICK = {
    "REPLICAS": (4,),
    "WHOLE": (),
    "REQUESTS": 500,
    "ERRORS": (1.0,),
    "ROUNDS_REPLICAS": (4,),
    "ROUNDS_SECONDS": 60.0,
}
OURS, TODAY = "earliest finish", "in turn"
POLICIES: Mapping[str, tuple[Maker, bool]] = {
    OURS: (rivals.EarliestFinish, True),
    "in turn, not shared": (rivals.InTurn, False),
    TODAY: (rivals.InTurn, True),
    "shortest backlog": (rivals.ShortestBacklog, True),
    "SGLang's thresholds": (rivals.Thresholds, True),
    "llm-d's weights": (rivals.Weights, True),
    "Dynamo's cost": (rivals.Tokens, True),
}
"""How a replica is chosen, and whether prefixes are shared."""


def measure() -> dict[str, Any]:
    return {"runs": [*_on_traces(), *_on_rounds()]}


def _on_traces() -> Iterator[dict[str, Any]]:
    cases = [(replicas, load, 0.0) for replicas in REPLICAS for load in LOADS]
    cases += [(ERROR_REPLICAS, ERROR_LOAD, error) for error in ERRORS]
    for name in traces.NAMES:
        trace = traces.load(name)
        for replicas, load, error in cases:
            requests = trace if replicas in WHOLE else trace[:REQUESTS]
            requests = traces.copied(requests, COPIES.get((name, replicas), 1))
            pieces = PIECES if replicas > PIECES else 1
            requests = traces.spread(requests, load * replicas * ENGINE.prefill, pieces)
            yield _run(name, requests, replicas, load, error)


def _on_rounds() -> Iterator[dict[str, Any]]:
    for replicas in ROUNDS_REPLICAS:
        for load in ROUNDS_LOADS:
            requests = Rounds().requests(load * replicas * ENGINE.prefill, ROUNDS_SECONDS)
            yield _run("rounds", requests, replicas, load, 0.0)


def _run(
    name: str, requests: Sequence[Request], replicas: int, load: float, error: float
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
        "mean/best": _against_best(policies, "mean_s"),
        "p99/best": _against_best(policies, "p99_s"),
        "mean/today": policies[OURS]["mean_s"] / policies[TODAY]["mean_s"],
    }


def _against_best(policies: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Ours ÷ the best of the others."""
    return policies[OURS][name] / min(
        found[name] for policy, found in policies.items() if policy != OURS
    )


def summary(result: Result) -> dict[str, float]:
    """Seconds to the first token, shares of tokens by where they came from, and what it cost."""
    tokens = result.local + result.fetched + result.read + result.computed
    return {
        "mean_s": mean(result.seconds),
        "median_s": median(result.seconds),
        "p99_s": float(np.percentile(result.seconds, 99)),
        "local": result.local / tokens,
        "fetched": result.fetched / tokens,
        "read": result.read / tokens,
        "saved": result.saved / tokens,
        "computed": result.computed / tokens,
        "moved_bytes": result.fetched // CHUNK * ENGINE.size.bytes,
        "choice_us": median(result.choices_us),
    }


def _ideal(requests: Sequence[Request], replicas: int) -> float:
    """The mean, if whichever replica is free takes the next prompt and holds all that was ever
    computed."""
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
    """Seconds to the first token, mean / 99 of 100; of the ideal, the mean."""
    columns = ("trace", "replicas", "load", "requests, seconds", *POLICIES, "ideal", _CHOICE)
    return table(columns, map(_cells, part["runs"]))


_CHOICE = "µs of our router per request"


def _cells(run: Mapping[str, Any]) -> list[str]:
    error = f", ± {run['error']:.0%}" if run["error"] else ""
    found = [run["policies"][name] for name in POLICIES]
    return [
        run["trace"],
        f"{run['replicas']:,}",
        f"{run['load']:g}{error}",
        f"{run['requests']:,}, {run['seconds']:,.0f}",
        *(f"{each['mean_s']:.2f} / {each['p99_s']:.1f}" for each in found),
        f"{run['ideal_s']:.2f}",
        f"{run['policies'][OURS]['choice_us']:.0f}",
    ]
