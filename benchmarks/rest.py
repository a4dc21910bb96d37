"""Part `rest`: part `hit` as a client of xinference's REST API sees it.

Two replicas of one model run behind `xinference-local`. Each sample is a document of its own: one
replica computes it, the other fetches it and then has it itself. The client asks for one token, so
that it measures the time to first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.engines import CHUNK, DTYPE, SETTLE, own_model
from benchmarks.figures import figure, ratio, shown
from benchmarks.report import ROOT
from examples.documents import document
from examples.local_cluster import Completion, LocalCluster
from examples.make_model import CONTEXT
from examples.waiting import until

TITLE = "Hits through REST"
ROWS = (160,)
"""Rows of a document, each about 50 tokens."""
ROUNDS = 5
QUICK = {"ROWS": (80,)}
_UID = "benchmark"
_REPLICAS = 2
_PATIENCE = 60.0
_LOG = ROOT / "build" / "bench-rest.log"


class Sample(NamedTuple):
    """Seconds at the client."""

    tokens: int
    cold: float
    remote: float
    local: float


def measure() -> dict[str, Any]:
    samples: dict[int, list[Sample]] = {rows: [] for rows in ROWS}
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
        seed = 0
        for turn in range(-1, ROUNDS):  # the first turn warms up and makes the links
            for rows in ROWS:
                seed += 1
                sample = _sample(cluster, document(seed, rows))
                if turn >= 0:
                    samples[rows].append(sample)
    return {"documents": [summary(found) for found in samples.values()]}


def _sample(cluster: LocalCluster, text: str) -> Sample:
    """Requests go to the replicas in turn, so the second one reaches the other replica."""
    _drop(cluster)
    cold = _ask(cluster, text)
    chunks = cold.prompt_tokens // CHUNK
    _wait(lambda: cluster.holdings(_UID) >= chunks, "the prompt is published")
    time.sleep(SETTLE)
    remote = _ask(cluster, text)
    local = [_ask(cluster, text) for _ in range(_REPLICAS)]
    for answer in (remote, *local):
        if cold.cached_tokens or answer.cached_tokens // CHUNK < chunks - 1:
            raise RuntimeError(f"{answer.cached_tokens} of {answer.prompt_tokens} were reused")
    return Sample(cold.prompt_tokens, cold.seconds, remote.seconds, local[-1].seconds)


def _ask(cluster: LocalCluster, text: str) -> Completion:
    return cluster.complete(_UID, text, max_tokens=1)


def _drop(cluster: LocalCluster) -> None:
    def are_empty() -> bool:
        cluster.call("POST", f"/v1/xavier/{_UID}/flush")  # again: something may still be stored
        return cluster.holdings(_UID) == 0

    _wait(are_empty, "the pools are empty")


def _wait(condition: Callable[[], bool], what: str) -> None:
    if not until(condition, _PATIENCE, interval=0.02):
        raise RuntimeError(f"not within {_PATIENCE:.0f} s: {what}")


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    cold, remote, local = (
        [getattr(sample, name) for sample in samples] for name in ("cold", "remote", "local")
    )
    return {
        "tokens": figure([float(sample.tokens) for sample in samples]),
        "cold_ms": _ms(cold),
        "remote_ms": _ms(remote),
        "local_ms": _ms(local),
        "cold/remote": ratio(cold, remote),
        "remote/local": ratio(remote, local),
    }


def _ms(seconds: Iterable[float]) -> dict[str, Any]:
    return figure([value * 1e3 for value in seconds])


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"Time of a one-token answer at a client of xinference's REST API, ms: two replicas of "
        f"one model ({DTYPE}), documents about invented people. Medians, with minimum and maximum "
        "in brackets.",
        "",
        "| tokens | cold | local hit | remote hit | remote ÷ local | cold ÷ remote |",
        "|---|---|---|---|---|---|",
    ]
    for row in part["documents"]:
        times = [shown(row[f"{name}_ms"], 1) for name in ("cold", "local", "remote")]
        ratios = [shown(row[name]) for name in ("remote/local", "cold/remote")]
        cells = " | ".join([f"{row['tokens']['median']:.0f}", *times, *ratios])
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = {"cold": "computed", "remote": "from a peer", "local": "from vLLM's own cache"}
    labels = [f"{row['tokens']['median']:.0f}" for row in part["documents"]]
    width = 0.8 / len(names)
    for number, (name, words) in enumerate(names.items()):
        values = [row[f"{name}_ms"] for row in part["documents"]]
        middle = [value["median"] for value in values]
        below = [value["median"] - value["least"] for value in values]
        above = [value["most"] - value["median"] for value in values]
        places = [place + (number - 1) * width for place in range(len(labels))]
        axes.bar(places, middle, width, yerr=[below, above], capsize=3, label=words)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms to a one-token answer")
    axes.legend()
