"""Part `roles`: long prompts that arrive while others read their answers.

Two replicas run behind `xinference-local`, and are launched in two ways, in turns: both do both, or
one prefills and one decodes. Some clients read answers, one after another,
while another client sends long prompts that nobody has sent before, each once the one before is
answered.
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
ROUNDS = 3  # for each launch
PROMPTS = 3  # long ones in a round
ROWS = 120  # of a document, each about 50 tokens
READERS = 4
ANSWER = 100  # tokens that a reader gets for each question
QUICK = {"LAUNCHES": 1, "ROUNDS": 5, "PROMPTS": 1, "ROWS": 40}
_WAYS: dict[str, dict[str, Any]] = {"any": {}, "roles": {"xavier_roles": "prefill:1,decode:1"}}
_WARM_UP = 2  # rounds, in which the engines measure how fast they are
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
        return {
            "first_s": median(read.first for read in self.long),
            "gap_ms": median(gaps) * 1e3,
            "gap_99_ms": float(np.percentile(gaps, 99)) * 1e3,
            "longest_gap_ms": max(gaps) * 1e3,
            "requests_per_s": (len(self.long) + len(self.others)) / self.seconds,
        }


def measure() -> dict[str, Any]:
    with LocalCluster(_LOG, environment={"PYTHONPATH": str(ROOT)}) as cluster:
        cluster.register(own_model(), "small")
        seeds = itertools.count()
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
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
                xavier_pool_bytes="1GiB",
                **_WAYS[way],
            )
            for _ in range(_WARM_UP):
                _round(cluster, seeds)
            before = _divided(cluster)
            rounds[way] += [_round(cluster, seeds).figures() for _ in range(ROUNDS)]
            divided += _divided(cluster) - before
            cluster.terminate(_UID)
    by_name = {
        way: {name: [each[name] for each in figures] for name in figures[0]}
        for way, figures in rounds.items()
    }
    any_, roles = by_name["any"], by_name["roles"]
    return {
        "any": {name: figure(samples) for name, samples in any_.items()},
        "roles": {name: figure(samples) for name, samples in roles.items()},
        "roles/any": {name: ratio(roles[name], any_[name]) for name in roles},
        "divided": divided,
    }


def _divided(cluster: LocalCluster) -> int:
    """Requests whose prompt was left to the prefill replica so far."""
    return int(cluster.xavier(_UID)["routing"]["choices"].get("prefill", 0))


def _round(cluster: LocalCluster, seeds: itertools.count[int]) -> _Round:
    done = threading.Event()
    began = time.perf_counter()

    def read_on(reader: int) -> list[_Read]:
        reads = []
        while not done.is_set():
            reads.append(_read(cluster, f"Reader {reader}, tell a story.", ANSWER))
        return reads

    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(read_on, reader) for reader in range(READERS)]
        try:
            prompts = [document(next(seeds), ROWS) for _ in range(PROMPTS)]
            long = [_read(cluster, prompt, 8) for prompt in prompts]
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
    "first_s": ("first token of a long prompt, s", 2),
    "gap_ms": ("between tokens, median, ms", 0),
    "gap_99_ms": ("between tokens, 99 of 100, ms", 0),
    "longest_gap_ms": ("between tokens, longest, ms", 0),
    "requests_per_s": ("requests per second", 2),
}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"{READERS} clients read answers of {ANSWER} tokens, while prompts of {ROWS} rows, about "
        f"{50 * ROWS:,} tokens, come one after another: two replicas ({DTYPE}) that do both, and "
        f"two with roles, launched in turns, {LAUNCHES} times {ROUNDS} rounds of {PROMPTS} prompts "
        f"each. {part['divided']} of the long ones were left to the prefill replica. Medians, with "
        "minimum and maximum of the rounds in brackets.",
        "",
        "| | both do both | one prefills, one decodes | roles ÷ both |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {words} | {shown(part['any'][name], digits)} | {shown(part['roles'][name], digits)} "
        f"| {shown(part['roles/any'][name])} |"
        for name, (words, digits) in _WORDS.items()
    ]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = ("gap_ms", "gap_99_ms", "longest_gap_ms")
    words = [_WORDS[name][0] for name in names]
    for uid, label in (("any", "both do both"), ("roles", "roles")):
        axes.plot(words, [part[uid][name]["median"] for name in names], marker="o", label=label)
    axes.set_ylabel("ms between tokens (median)")
    axes.legend()
