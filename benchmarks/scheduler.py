"""Part `scheduler`: what the engine's scheduler thread spends on us.

The real manager, pool and mirror are called in the order in which vLLM's scheduler calls them, for
a prompt of 15,000 tokens. Stand-ins replace what talks to other processes, because no call of the
manager waits for it. The mirror knows 400,000 chunks, and the pool is full, so that every new chunk
evicts another. The reference is one dictionary lookup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from benchmarks.figures import figure, shown
from tests.engine.scheduling import CHUNK, KEY_BYTES, Request, Scheduling, chunks

TITLE = "Scheduler thread"
PROMPT_TOKENS = 15_000
CHUNKS = PROMPT_TOKENS // CHUNK
SLOTS = 4096
KNOWN_KEYS = 400_000
ROUNDS = 50
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
    vllm = Scheduling(slots=SLOTS)
    known = [os.urandom(KEY_BYTES) for _ in range(KNOWN_KEYS)]
    for number in range(SLOTS // CHUNKS + 1):
        vllm.fill(chunks(f"old {number}", CHUNKS))
    costs: dict[str, list[float]] = {name: [] for name in (*_ANSWERS, "dict")}
    calls: list[dict[str, float]] = []
    for number in range(ROUNDS):
        prompt, cold = chunks(f"prompt {number}", CHUNKS), chunks(f"cold {number}", CHUNKS)
        if number % 10 == 0:
            elsewhere = [chunks(f"prompt {n}", CHUNKS) for n in range(number, number + 10)]
            vllm.tier.peers_hold(a=known, b=[key for keys in elsewhere for key in keys])
        with _timed(vllm) as timed:
            costs["miss"].append(_lookups(vllm, vllm.arrive(f"cold {number}", cold), "miss"))
            request = vllm.arrive(f"warm {number}", prompt)
            costs["pending"].append(_lookups(vllm, request, "pending"))
            vllm.end_step()
            vllm.tier.end(vllm.tier.fetches[-1])
            costs["hit"].append(_lookups(vllm, request, "hit"))
            vllm.schedule(request, CHUNKS)
            vllm.end_step()
            vllm.loaded(request, CHUNKS)
            vllm.finish(request)
            vllm.fill(cold)
        costs["dict"].append(_of_a_dictionary(prompt))
        calls.append(timed.longest)
    names = sorted({name for longest in calls for name in longest})
    return {
        "chunks": CHUNKS,
        **{f"{name}_us": figure(samples) for name, samples in costs.items()},
        "calls_ms": {
            name: figure([longest[name] * 1e3 for longest in calls if name in longest])
            for name in names
        },
        "longest_ms": figure([max(longest.values()) * 1e3 for longest in calls]),
    }


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
    # Of a request that waits, the first chunk says so.
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
    lines = [
        f"A prompt of {part['chunks']} chunks of {CHUNK} tokens, {ROUNDS} times; the mirror knows "
        f"{KNOWN_KEYS:,} chunks, the pool of {SLOTS:,} rows is full. "
        "Medians, with minimum and maximum in brackets.",
        "",
        "| lookup of a chunk | µs |",
        "|---|---|",
        *(f"| {name} | {shown(part[f'{name}_us'])} |" for name in (*_ANSWERS, "dict")),
        "",
        f"The longest call for this prompt took {shown(part['longest_ms'])} ms:",
        "",
        "| the manager's call | longest, ms |",
        "|---|---|",
    ]
    slowest = sorted(part["calls_ms"].items(), key=lambda item: -item[1]["median"])
    lines += [f"| `{name}` | {shown(value, 3)} |" for name, value in slowest]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    slowest = sorted(part["calls_ms"].items(), key=lambda item: item[1]["median"])
    axes.barh([name for name, _ in slowest], [value["median"] for _, value in slowest])
    axes.set_xlabel("ms, longest call for a prompt of 15,000 tokens (median)")
