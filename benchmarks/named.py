"""Part `named`: documents as clients of xinference's REST API see them, and names in full pools.

Two replicas of one model run behind `xinference-local`. Each sample is a document of its own. Of
those that nobody named, one replica computes the document, the other fetches it and then has it
itself. The others are named: their first questions come when they are kept, and the second ones
after all replicas were killed and the documents were computed again. All are questions with one
token to answer, so the time is that to the first token.

Then the prompts of two traces go through one pool of a tenth of the chunks that they ask for, with
the most used tenth of their roots named, and without.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from benchmarks import traces
from benchmarks.engines import CHUNK, DTYPE, SETTLE, own_model
from benchmarks.figures import figure, ratio, shown
from benchmarks.report import ROOT
from benchmarks.traces import Request
from examples.documents import document
from examples.local_cluster import ClusterError, Completion, LocalCluster
from examples.make_model import CONTEXT
from examples.waiting import until
from tests.e2e import processes
from xinference_xavier.client import XavierClient
from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.sweep import protect

TITLE = "REST and named prefixes"
ROWS = 80  # of a document, each about 50 tokens
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
_WAYS = {
    "remote": "a peer holds it",
    "local": "the replica holds it",
    "first": "it is named",
    "again": "it is named, and all replicas were restarted",
}


class Unnamed(NamedTuple):
    """Seconds of the answers about one document."""

    cold: float
    remote: float
    local: float


class Named(NamedTuple):
    """Seconds of the first answer about a document, and of that after a restart."""

    first: float
    again: float


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
            xavier_routing="off",  # in turn
            xavier_pool_bytes="2GiB",
        )
        with XavierClient(cluster.endpoint) as client:
            texts = [document(seed, ROWS) for seed in range(2 * DOCUMENTS + 1)]
            _unnamed(cluster, texts.pop())  # warms up and makes the links
            unnamed = [_unnamed(cluster, text) for text in texts[:DOCUMENTS]]
            named = _named(cluster, client, texts[DOCUMENTS:])
    return summary(unnamed, named) | {"traces": [_replay(name) for name in traces.NAMES]}


def _unnamed(cluster: LocalCluster, text: str) -> Unnamed:
    """Requests go to the replicas in turn, so the second one reaches the other replica."""
    before = cluster.holdings(_UID)
    cold = _ask(cluster, text)
    chunks = cold.prompt_tokens // CHUNK
    _wait(lambda: cluster.holdings(_UID) >= before + chunks, "the prompt is published")
    time.sleep(SETTLE)
    remote = _ask(cluster, text)
    local = [_ask(cluster, text) for _ in range(_REPLICAS)]
    for answer in (remote, *local):
        if cold.cached_tokens or answer.cached_tokens // CHUNK < chunks - 1:
            raise RuntimeError(f"{answer.cached_tokens} of {answer.prompt_tokens} were reused")
    return Unnamed(cold.seconds, remote.seconds, local[-1].seconds)


def _named(cluster: LocalCluster, client: XavierClient, texts: Sequence[str]) -> list[Named]:
    names = [f"document {number}" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        client.add_prefix(_UID, name, text, copies="all")

    def are_kept() -> bool:
        return all(client.prefix(_UID, name).state == "kept" for name in names)

    _wait(are_kept, "all documents are kept")
    first = [_ask(cluster, _QUESTION, name).seconds for name in names]
    for number in range(_REPLICAS):
        processes.kill(processes.model_process(f"{_UID}-rep{number}"))
    _wait(lambda: not are_kept(), "they are lost")
    _wait(are_kept, "they are kept again")
    _wait(lambda: _answers(cluster), "the replicas answer")
    return [
        Named(one, _ask(cluster, _QUESTION, name).seconds)
        for one, name in zip(first, names, strict=True)
    ]


def _answers(cluster: LocalCluster) -> bool:
    try:
        for _ in range(2 * _REPLICAS):
            _ask(cluster, "Hello")
    except ClusterError:
        return False
    return True


def _ask(cluster: LocalCluster, prompt: str, name: str | None = None) -> Completion:
    names = {} if name is None else {"prefix_name": name}
    return cluster.complete(_UID, prompt, max_tokens=1, **names)


def _wait(condition: Callable[[], bool], what: str) -> None:
    if not until(condition, _PATIENCE, interval=0.2):
        raise RuntimeError(f"not within {_PATIENCE:.0f} s: {what}")


def summary(unnamed: Sequence[Unnamed], named: Sequence[Named]) -> dict[str, Any]:
    """Times in ms."""
    columns = {
        name: [1e3 * getattr(sample, name) for sample in samples]
        for samples in (unnamed, named)
        for name in type(samples[0])._fields
    }
    return {
        **{f"{name}_ms": figure(column) for name, column in columns.items()},
        **{f"cold/{name}": ratio(columns["cold"], columns[name]) for name in _WAYS},
        "remote/local": ratio(columns["remote"], columns["local"]),
    }


def _replay(name: str) -> dict[str, Any]:
    trace = traces.load(name)
    chunks = len({key for request in trace for key in request.keys})
    slots = int(POOL * chunks)
    named = _named_chunks(trace)
    return {
        "trace": name,
        "chunks": chunks,
        "slots": slots,
        "named": len(named),
        "without": _hit_ratio(trace, slots),
        "with": _hit_ratio(trace, slots, named),
        "endless": _hit_ratio(trace, chunks),
    }


def _named_chunks(trace: Sequence[Request]) -> list[bytes]:
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
        f"Time of a one-token answer about a document of {ROWS} rows, about {50 * ROWS:,} tokens, "
        f"at a client of xinference's REST API: {_REPLICAS} replicas ({DTYPE}), {DOCUMENTS} "
        "documents each. Medians, with minimum and maximum in brackets. A remote hit takes "
        f"{shown(part['remote/local'])} times a local one.",
        "",
        "| the document | ms | cold ÷ this |",
        "|---|---|---|",
        f"| nobody holds it | {shown(part['cold_ms'], 0)} | |",
        *(
            f"| {words} | {shown(part[f'{name}_ms'], 0)} | {shown(part[f'cold/{name}'], 1)} |"
            for name, words in _WAYS.items()
        ),
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
    names = {
        "cold": "nobody\nholds it",
        "remote": "a peer",
        "local": "the replica",
        "first": "named",
        "again": "named,\nrestarted",
    }
    axes.bar([*names.values()], [part[f"{name}_ms"]["median"] for name in names])
    axes.set_yscale("log")
    axes.set_ylabel("ms to a one-token answer (median)")
