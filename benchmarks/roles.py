"""Part `roles`: long prompts that arrive while others read their answers.

Two replicas run behind `xinference-local`, and are launched in two ways, in turns: both do both, or
one prefills and one decodes. Some clients read answers to short questions, one after another. In
the rounds `long`, another client sends long prompts meanwhile that nobody has sent before, each
once the one before is answered. In the rounds `short` it does not: a prefill replica is idle then.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.engines import CHUNK, DTYPE, own_model
from benchmarks.figures import figure, ratio, shown
from benchmarks.report import ROOT
from examples.documents import document
from examples.local_cluster import LocalCluster
from examples.make_model import CONTEXT

TITLE = "Roles"
LAUNCHES = 2  # of each way, in turns
ROUNDS = 3  # of each load, for each launch
PROMPTS = 2  # long ones in a round
ROWS = 80  # of a document, each about 50 tokens
READERS = 4
ANSWERS = 2  # that a reader reads at least
ANSWER = 100  # tokens of each
QUICK = {"LAUNCHES": 1, "ROUNDS": 5, "PROMPTS": 1, "ROWS": 40}
_WAYS: dict[str, dict[str, Any]] = {"any": {}, "roles": {"xavier_roles": "prefill:1,decode:1"}}
_LOADS = ("long", "short")
_UID = "benchmark"
_TIMEOUT = 300.0
_LOG = ROOT / "build" / "bench-roles.log"


class _Read(NamedTuple):
    first: float
    """Seconds until the first token."""
    gaps: list[float]
    """Seconds between tokens."""


class _Round(NamedTuple):
    long: list[_Read]
    others: list[_Read]
    seconds: float

    def figures(self) -> dict[str, float]:
        gaps = [gap for read in (*self.long, *self.others) for gap in read.gaps]
        first = median(read.first for read in self.long or self.others)
        return {
            "first_s": first,
            "gap_ms": median(gaps) * 1e3,
            "gap_99_ms": float(np.percentile(gaps, 99)) * 1e3,
            "longest_gap_ms": max(gaps) * 1e3,
            "requests_per_s": (len(self.long) + len(self.others)) / self.seconds,
        }


def measure() -> dict[str, Any]:
    with LocalCluster(_LOG, environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(own_model(), "small")
        seeds = itertools.count()
        rounds: dict[tuple[str, str], list[dict[str, float]]] = {
            (load, way): [] for load in _LOADS for way in _WAYS
        }
        divided = 0
        for way in LAUNCHES * list(_WAYS):
            cluster.launch(
                "small",
                _UID,
                replica=2,
                dtype=DTYPE,
                block_size=CHUNK,
                max_model_len=CONTEXT,
                enable_xavier=True,
                xavier_pool_bytes="2GiB",
                **_WAYS[way],
            )
            _round(cluster, seeds, PROMPTS)  # in which the engines measure how fast they are
            before = _divided(cluster)
            for _ in range(ROUNDS):
                for load in _LOADS:
                    prompts = PROMPTS if load == "long" else 0
                    rounds[load, way].append(_round(cluster, seeds, prompts).figures())
            divided += _divided(cluster) - before
            cluster.terminate(_UID)
    found = {load: _compare(rounds[load, "any"], rounds[load, "roles"]) for load in _LOADS}
    return {**found, "divided": divided}


def _compare(any_: list[dict[str, float]], roles: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: {
            "any": figure([each[name] for each in any_]),
            "roles": figure([each[name] for each in roles]),
            "roles/any": ratio([each[name] for each in roles], [each[name] for each in any_]),
        }
        for name in any_[0]
    }


def _divided(cluster: LocalCluster) -> int:
    """Requests whose prompt was left to the prefill replica so far."""
    return int(cluster.xavier(_UID)["routing"]["choices"].get("prefill", 0))


def _round(cluster: LocalCluster, seeds: itertools.count[int], prompts: int) -> _Round:
    done = threading.Event()
    began = time.perf_counter()

    def read_on(reader: int) -> list[_Read]:
        reads: list[_Read] = []
        while len(reads) < ANSWERS or not done.is_set():
            reads.append(_read(cluster, f"Reader {reader}, tell a story.", ANSWER))
        return reads

    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(read_on, reader) for reader in range(READERS)]
        try:
            documents = [document(next(seeds), ROWS) for _ in range(prompts)]
            long = [_read(cluster, prompt, 8) for prompt in documents]
        finally:
            done.set()
    others = [read for each in reading for read in each.result()]
    return _Round(long, others, time.perf_counter() - began)


def _read(cluster: LocalCluster, prompt: str, tokens: int) -> _Read:
    body = {
        "model": _UID,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    times = [time.perf_counter()]
    url = f"{cluster.endpoint}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=_TIMEOUT) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            text = line.removeprefix("data: ")
            if text.startswith("{") and json.loads(text).get("choices"):
                times.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    return _Read(times[1] - times[0], gaps)


_WORDS = {
    "first_s": ("first token, s", 2),
    "gap_ms": ("between tokens, median, ms", 0),
    "gap_99_ms": ("between tokens, 99 of 100, ms", 0),
    "longest_gap_ms": ("between tokens, longest, ms", 0),
    "requests_per_s": ("requests per second", 2),
}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"{READERS} clients read answers of {ANSWER} tokens to short questions. In the first rows, "
        f"prompts of {ROWS} rows, about {50 * ROWS:,} tokens, come meanwhile, one after another; "
        "the first token is theirs. In the last rows nobody sends long prompts. Two replicas "
        f"({DTYPE}) that do both, and two with roles, were launched in turns: {LAUNCHES} times "
        f"{ROUNDS} rounds of each load, with {PROMPTS} long prompts. {part['divided']} requests "
        "were left to the prefill replica. Medians, with minimum and maximum of the rounds in "
        "brackets.",
        "",
        "| | | both do both | one prefills, one decodes | roles ÷ both |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {load} | {words} | {shown(found['any'], digits)} | {shown(found['roles'], digits)} "
        f"| {shown(found['roles/any'])} |"
        for load in _LOADS
        for name, (words, digits) in _WORDS.items()
        for found in [part[load][name]]
    ]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = ("gap_ms", "gap_99_ms", "longest_gap_ms")
    words = [_WORDS[name][0] for name in names]
    for way, label in (("any", "both do both"), ("roles", "roles")):
        axes.plot(
            words, [part["long"][name][way]["median"] for name in names], marker="o", label=label
        )
    axes.set_ylabel("ms between tokens (median)")
    axes.legend()
