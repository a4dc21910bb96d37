"""Part `routing`: where requests should go, by replaying real traces on simulated replicas.

The router, the tracker's index, the mirror and the pools are the real ones; `simulator.py` says
what is simulated, `rivals.py` how others choose. The reference is whichever of them does best. An
ideal is computed beside it: one queue for all replicas, which hold everything that was ever
computed.

Then the real router chooses among 1,000 replicas for a prompt of 100 chunks.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import rivals, traces
from benchmarks.figures import figure, shown, table
from benchmarks.simulator import ENGINE, Maker, Result, Simulator
from benchmarks.traces import CHUNK, Request
from xinference_xavier.mirror.mirror import Mirror
from xinference_xavier.protocol.tracker import INITIAL_SETTINGS, Change, Member, Update
from xinference_xavier.routing.choice import Prompt
from xinference_xavier.routing.load import Report
from xinference_xavier.routing.router import Router

REPLICAS = (2, 4, 8, 64, 1000)
LOADS = (0.5, 0.8, 0.95)
WHOLE = (4, 1000)
"""Sizes at which the whole trace is played."""
REQUESTS = 6000
"""At other sizes."""
PIECES = 16
COPIES = {("synthetic", 1000): 3}
ERRORS = (0.5, 1.0)
"""By which share a prompt takes longer or less than forecast, in runs of their own."""
ERROR_REPLICAS, ERROR_LOAD = 4, 0.8
CHOICE_REPLICAS, CHOICE_CHUNKS, CHOICES = 1000, 100, 200
QUICK = {"REPLICAS": (4,), "WHOLE": (), "REQUESTS": 500, "ERRORS": (1.0,), "CHOICES": 20}
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
    runs = []
    for name in traces.NAMES:
        trace = traces.load(name)
        runs += [_run(name, trace, replicas, load, 0.0) for replicas in REPLICAS for load in LOADS]
        runs += [_run(name, trace, ERROR_REPLICAS, ERROR_LOAD, error) for error in ERRORS]
    return {
        "runs": runs,
        "choice_ms": {name: figure(_choices(*held)) for name, held in _HELD.items()},
    }


def _run(
    name: str, trace: Sequence[Request], replicas: int, load: float, error: float
) -> dict[str, Any]:
    requests = trace if replicas in WHOLE else trace[:REQUESTS]
    requests = traces.copied(requests, COPIES.get((name, replicas), 1))
    pieces = PIECES if replicas > PIECES else 1
    requests = traces.spread(requests, load * replicas * ENGINE.prefill, pieces)
    policies = {
        policy: _summary(Simulator(replicas, maker, shares=shares, error=error).run(requests))
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


def _summary(result: Result) -> dict[str, float]:
    tokens = result.local + result.fetched + result.computed
    return {
        "mean_s": mean(result.seconds),
        "median_s": median(result.seconds),
        "p99_s": float(np.percentile(result.seconds, 99)),
        "local": result.local / tokens,
        "fetched": result.fetched / tokens,
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


_HELD = {"by all": (1, 1), "more by each than by the one before": (1, 100), "by one": (1000, 1)}
"""Of which replicas hold the prompt: every n-th; and in how many lengths."""


def _choices(every: int, lengths: int) -> list[float]:
    """ms of each choice, by the real mirror."""
    keys = [os.urandom(36) for _ in range(CHOICE_CHUNKS)]
    names = [f"replica {number}" for number in range(CHOICE_REPLICAS)]
    mirror = Mirror("router")
    held = {
        name: CHOICE_CHUNKS * (number % lengths + 1) // lengths if number % every == 0 else 0
        for number, name in enumerate(names)
    }
    changes = (Change(name, 1, b"".join(keys[:n]), b"", True) for name, n in held.items())
    members = tuple(Member(name, "127.0.0.1:1") for name in names)
    mirror.apply(Update(1, "epoch", True, INITIAL_SETTINGS, 36, members, tuple(changes)))
    source = random.Random(0)
    router = Router(mirror, ENGINE.size, source)
    for name in names:
        router.report(name, Report(0.0, 1000, source.random(), 0, ENGINE.rates))
    prompt = Prompt(CHOICE_CHUNKS * CHUNK + 1, keys)
    took = []
    for number in range(CHOICES):
        began = time.perf_counter()
        choice = router.choose(prompt, 0.0)
        if choice is not None:
            router.sent(f"{number}", choice, 0.0)
        took.append((time.perf_counter() - began) * 1e3)
    return took


def markdown(part: dict[str, Any]) -> str:
    """Seconds to the first token, mean / 99 of 100; of the ideal, the mean."""
    columns = ("trace", "replicas", "load", "requests, seconds", *POLICIES, "ideal")
    runs = table(columns, map(_cells, part["runs"]))
    choice = table(
        (f"a choice among {CHOICE_REPLICAS:,} replicas; the prompt is held", "ms"),
        ((name, shown(value, 3)) for name, value in part["choice_ms"].items()),
    )
    return f"{runs}\n\n{choice}"


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
    ]
