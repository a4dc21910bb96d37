"""Part `named`: the first question about a named document, and what naming does to full pools.

Two replicas of one model run behind `xinference-local`. Each sample is a document of its own: the
first question about one that nobody named, about a named one, and about a named one after all
replicas were killed and it was computed again.

Then the prompts of two traces go through one pool of a tenth of the chunks that they ask for, with
the most used tenth of their roots named, and without.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from benchmarks import traces
from benchmarks.engines import CHUNK, DTYPE, own_model
from benchmarks.figures import figure, ratio, shown
from benchmarks.report import ROOT
from benchmarks.traces import Request
from examples.documents import document
from examples.local_cluster import ClusterError, LocalCluster
from examples.make_model import CONTEXT
from examples.waiting import until
from tests.e2e import processes
from xinference_xavier.client import XavierClient
from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.sweep import protect

TITLE = "Named prefixes"
ROWS = 160  # of a document, each about 50 tokens
DOCUMENTS = 5
POOL = 0.1
"""Of the different chunks that a trace asks for."""
NAMED = 0.1
"""Of a trace's roots."""
QUICK = {"ROWS": 40}
_UID = "benchmark"
_REPLICAS = 2
_PATIENCE = 600.0
_LOG = ROOT / "build" / "bench-named.log"
_QUESTION = "Question: who is the oldest?"


def measure() -> dict[str, Any]:
    with LocalCluster(_LOG, environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(own_model(), "small")
        cluster.launch(
            "small",
            _UID,
            replica=_REPLICAS,
            dtype=DTYPE,
            block_size=CHUNK,
            max_model_len=CONTEXT,
            enable_xavier=True,
            xavier_pool_bytes="2GiB",
        )
        with XavierClient(cluster.endpoint) as client:
            times = _first_questions(cluster, client)
    cold, named, again = ([seconds * 1e3 for seconds in each] for each in times)
    return {
        "cold_ms": figure(cold),
        "named_ms": figure(named),
        "again_ms": figure(again),
        "cold/named": ratio(cold, named),
        "cold/again": ratio(cold, again),
        "traces": [_replay(name) for name in traces.NAMES],
    }


def _first_questions(cluster: LocalCluster, client: XavierClient) -> Sequence[list[float]]:
    """Seconds: without a name, with one, and with one after all replicas were killed."""
    texts = [document(seed, ROWS) for seed in range(2 * DOCUMENTS + 1)]
    _ask(cluster, texts.pop() + _QUESTION)  # warms up
    cold = [_ask(cluster, text + _QUESTION) for text in texts[:DOCUMENTS]]
    names = [f"document {number}" for number in range(DOCUMENTS)]
    for name, text in zip(names, texts[DOCUMENTS:], strict=True):
        client.add_prefix(_UID, name, text, copies="all")

    def are_kept() -> bool:
        return all(client.prefix(_UID, name).state == "kept" for name in names)

    _wait(are_kept, "all documents are kept")
    named = [_ask(cluster, _QUESTION, name) for name in names]
    for number in range(_REPLICAS):
        processes.kill(processes.model_process(f"{_UID}-rep{number}"))
    _wait(lambda: not are_kept(), "they are lost")
    _wait(are_kept, "they are kept again")
    _wait(lambda: _answers(cluster), "the replicas answer")
    again = [_ask(cluster, _QUESTION, name) for name in names]
    return cold, named, again


def _answers(cluster: LocalCluster) -> bool:
    try:
        for _ in range(2 * _REPLICAS):
            _ask(cluster, "Hello")
    except ClusterError:
        return False
    return True


def _ask(cluster: LocalCluster, prompt: str, name: str | None = None) -> float:
    """Seconds until a one-token answer."""
    body = {"model": _UID, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    if name is not None:
        body["prefix_name"] = name
    began = time.perf_counter()
    cluster.call("POST", "/v1/completions", body)
    return time.perf_counter() - began


def _wait(condition: Callable[[], bool], what: str) -> None:
    if not until(condition, _PATIENCE, interval=0.2):
        raise RuntimeError(f"not within {_PATIENCE:.0f} s: {what}")


def _replay(name: str) -> dict[str, Any]:
    trace = traces.load(name)
    chunks = len({key for request in trace for key in request.keys})
    slots = int(POOL * chunks)
    named = _named(trace)
    return {
        "trace": name,
        "chunks": chunks,
        "slots": slots,
        "named": len(named),
        "without": _hit_ratio(trace, slots),
        "with": _hit_ratio(trace, slots, named),
        "endless": _hit_ratio(trace, chunks),
    }


def _named(trace: Sequence[Request]) -> list[bytes]:
    """The chunks of the most used roots that at least half of a root's requests share."""
    by_root: dict[bytes, list[Request]] = {}
    for request in trace:
        if request.keys:
            by_root.setdefault(request.keys[0], []).append(request)
    roots = sorted(by_root.values(), key=len, reverse=True)
    return [key for requests in roots[: math.ceil(NAMED * len(roots))] for key in _shared(requests)]


def _shared(requests: Sequence[Request]) -> list[bytes]:
    """The longest prefix that at least half of the requests have."""
    uses = Counter(key for request in requests for key in request.keys)

    def shared(request: Request) -> list[bytes]:
        return [*takewhile(lambda key: 2 * uses[key] >= len(requests), request.keys)]

    return max(map(shared, requests), key=len)


def _hit_ratio(trace: Iterable[Request], slots: int, named: Sequence[bytes] = ()) -> float:
    """The part of the prompts' tokens that the pool holds when they come."""
    pool = Pool(slots)
    protect(pool, named, Protection.SOFT)
    held = tokens = 0
    for request in trace:
        held += traces.CHUNK * sum(1 for _ in takewhile(pool.lookup, request.keys))
        tokens += request.tokens
        for row in pool.reserve(request.keys, request.keys).rows:
            pool.commit(row)
        pool.touch(reversed(request.keys))
    return held / tokens


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"Time of a one-token answer to the first question about a document of {ROWS} rows, about "
        f"{50 * ROWS:,} tokens, at a client of xinference's REST API: {_REPLICAS} replicas "
        f"({DTYPE}), {DOCUMENTS} documents each. Medians, with minimum and maximum in brackets.",
        "",
        "| the document | ms | cold ÷ this |",
        "|---|---|---|",
        f"| has no name | {shown(part['cold_ms'], 0)} | |",
        f"| is named | {shown(part['named_ms'], 0)} | {shown(part['cold/named'], 1)} |",
        f"| is named, and all replicas were restarted | {shown(part['again_ms'], 0)} "
        f"| {shown(part['cold/again'], 1)} |",
        "",
        f"The part of the prompts' tokens that one pool holds, with room for {POOL:.0%} of the "
        f"different chunks of a trace, whose {NAMED:.0%} most used roots are named:",
        "",
        "| trace | chunks | pool | named chunks | without names | with names | endless pool |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row['trace']}` | {row['chunks']:,} | {row['slots']:,} | {row['named']:,} "
        f"| {row['without']:.3f} | {row['with']:.3f} | {row['endless']:.3f} |"
        for row in part["traces"]
    ]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = {"cold_ms": "no name", "named_ms": "named", "again_ms": "named, after a restart"}
    axes.bar([*names.values()], [part[name]["median"] for name in names])
    axes.set_yscale("log")
    axes.set_ylabel("ms to a one-token answer (median)")
