"""Part `scheduler`: what the engine's scheduler thread spends on us.

The real manager, pool and index are called in the order in which vLLM's scheduler calls them, for
a prompt of 128,000 tokens that 1, 32, 200 and 1,000 peers hold. Stand-ins replace what talks to
other processes, because no call of the manager waits for it. The index has 400,000 other chunks,
and the pool is full, so that every new chunk evicts another. The reference is one dictionary
lookup.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from benchmarks.figures import figure, shown, table
from benchmarks.traces import GROUP
from tests.engine.scheduling import CHUNK, KEY_BYTES, Request, Scheduling, chunks
from xinference_xavier.engine.keys import Group, Layout
from xinference_xavier.pool.pool import flush

CHUNKS = 1000
PEERS = (1, 32, 200, 1000)
STEP = 64
"""Chunks that the engine computes in a step."""
SLOTS = 65_536
KNOWN_KEYS = 400_000
ROUNDS = 30
QUICK = {"PEERS": (1, 32), "SLOTS": 16_384, "ROUNDS": 5}
_ANSWERS = {
    "miss": LookupResult.MISS,
    "hit": LookupResult.HIT,
    "pending": LookupResult.RETRY,
}


class _Timed:
    """A manager whose calls are timed; the many lookups are timed one by one."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.longest: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._manager, name)

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            answer = method(*arguments)
            took = time.perf_counter() - began
            self.longest[name] = max(self.longest.get(name, 0.0), took)
            return answer

        return call


def measure() -> dict[str, Any]:
    with _frozen_heap():
        return _measure()


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """The collector skips the objects that exist at the start, as in vLLM's engine."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure() -> dict[str, Any]:
    vllm = Scheduling(slots=SLOTS, layout=Layout(CHUNK, {GROUP: Group(CHUNK)}))
    for number in range(SLOTS // CHUNKS + 1):
        vllm.fill(chunks(f"old {number}", CHUNKS))
    known = [os.urandom(KEY_BYTES) for _ in range(KNOWN_KEYS)]
    return {
        "chunks": CHUNKS,
        "peers": [{"peers": peers, **_with_peers(vllm, peers, known)} for peers in PEERS],
    }


def _with_peers(vllm: Scheduling, peers: int, known: list[bytes]) -> dict[str, Any]:
    """A prompt that so many peers hold."""
    costs: dict[str, list[float]] = {name: [] for name in (*_ANSWERS, "dict", "attempt")}
    calls: list[dict[str, float]] = []
    prompt = chunks("prompt", CHUNKS)
    vllm.tier.peers_hold(other=known, **{f"peer {number}": prompt for number in range(peers)})
    for number in range(ROUNDS):
        cold = chunks(f"cold {peers} {number}", CHUNKS)
        with _timed(vllm) as timed:
            costs["miss"].append(_lookups(vllm, vllm.arrive(f"cold {number}", cold), "miss"))
            request = vllm.arrive(f"warm {number}", prompt)
            vllm.tier.forget()  # else garbage collection takes longer from round to round
            began = time.perf_counter()
            deferred = vllm.attempt(request) is None
            costs["attempt"].append((time.perf_counter() - began) * 1e3)
            fetches = vllm.tier.fetches
            if not deferred or sum(len(fetch.rows) for fetch in fetches) < CHUNKS:
                raise RuntimeError("the request does not wait for all of its chunks")
            costs["pending"].append(_lookups(vllm, request, "pending"))
            for fetch in fetches:
                vllm.tier.end(fetch)
            costs["hit"].append(_lookups(vllm, request, "hit"))
            vllm.schedule(request, CHUNKS)
            vllm.end_step()
            vllm.loaded(request, CHUNKS)
            vllm.finish(request)
            _compute(vllm, cold)
        costs["dict"].append(_of_a_dictionary(prompt))
        calls.append(timed.longest)
        flush(vllm.pool, lambda row: row.origin is not None)
        _compute(vllm, chunks(f"refill {peers} {number}", CHUNKS))
    names = sorted({name for longest in calls for name in longest})
    return {
        **{f"{name}_us": figure(costs[name]) for name in (*_ANSWERS, "dict")},
        "attempt_ms": figure(costs["attempt"]),
        "calls_ms": {
            name: figure([longest[name] * 1e3 for longest in calls if name in longest])
            for name in names
        },
        "longest_ms": figure([max(longest.values()) * 1e3 for longest in calls]),
    }


def _compute(vllm: Scheduling, keys: list[OffloadKey]) -> None:
    """A request computes and stores these chunks."""
    request = vllm.arrive(keys[0].hex(), keys)
    for start in range(0, len(keys), STEP):
        vllm.stored(request, vllm.begin_store(request, keys[start : start + STEP]))
        vllm.end_step()
    vllm.finish(request)


@contextmanager
def _timed(vllm: Scheduling) -> Iterator[_Timed]:
    manager = vllm.manager
    timed = _Timed(manager)
    vllm.manager = timed  # type: ignore[assignment]  # the same methods
    try:
        yield timed
    finally:
        vllm.manager = manager


def _lookups(vllm: Scheduling, request: Request, name: str) -> float:
    """µs per chunk."""
    lookup = vllm.manager._manager.lookup  # type: ignore[attr-defined]  # a `_Timed`
    context = request.context
    began = time.perf_counter()
    answers = [lookup(key, context) for key in request.keys]
    took = time.perf_counter() - began
    # If a request waits, only its first chunk is sure to be answered with RETRY.
    if answers[0] is not _ANSWERS[name] or set(answers[1:]) - {_ANSWERS[name], LookupResult.MISS}:
        raise RuntimeError(f"lookups that should be {name} were answered with {set(answers)}")
    return took / len(answers) * 1e6


def _of_a_dictionary(keys: list[OffloadKey]) -> float:
    held = dict.fromkeys(keys)
    began = time.perf_counter()
    for key in keys:
        held.get(key)
    return (time.perf_counter() - began) / len(keys) * 1e6


def markdown(part: dict[str, Any]) -> str:
    rows = part["peers"]
    peers = [f"{row['peers']:,} peers" for row in rows]
    titles = {
        **{f"{name}_us": f"{name}, µs per chunk" for name in (*_ANSWERS, "dict")},
        "attempt_ms": "the attempt that begins the fetch, ms",
        "longest_ms": "the longest call, ms",
    }
    costs = table(
        (f"{part['chunks']:,} chunks", *peers),
        ((title, *(shown(row[name]) for row in rows)) for name, title in titles.items()),
    )
    slowest = sorted(rows[-1]["calls_ms"].items(), key=lambda item: -item[1]["median"])
    calls = table(
        (f"call, with {peers[-1]}", "longest, ms"),
        ((f"`{name}`", shown(value, 3)) for name, value in slowest),
    )
    return f"{costs}\n\n{calls}"
