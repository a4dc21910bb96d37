"""Part `roles`: long prompts that arrive while others read their answers.

Two models of two replicas each run behind `xinference-local`, and take turns: in one, both replicas
do both; in the other, one prefills and one decodes. Some clients read answers, one after another,
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
ROUNDS = 6
PROMPTS = 3  # long ones in a round
ROWS = 120  # of a document, each about 50 tokens
READERS = 4
ANSWER = 100  # tokens that a reader gets for each question
QUICK = {"ROUNDS": 5, "PROMPTS": 1, "ROWS": 40}
_LAUNCHES: dict[str, dict[str, Any]] = {"any": {}, "roles": {"xavier_roles": "prefill:1,decode:1"}}
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
        for uid, options in _LAUNCHES.items():
            cluster.launch(
                "small",
                uid,
                replica=2,
                dtype=DTYPE,
                block_size=CHUNK,
                max_model_len=CONTEXT,
                enable_xavier=True,
                xavier_pool_bytes="1GiB",
                **options,
            )
        seeds = itertools.count()
        for uid in 2 * list(_LAUNCHES):
            _round(cluster, uid, seeds)  # warms up, and measures the engines' rates
        rounds: dict[str, list[dict[str, float]]] = {uid: [] for uid in _LAUNCHES}
        for _ in range(ROUNDS):
            for uid, figures in rounds.items():
                figures.append(_round(cluster, uid, seeds).figures())
        divided = cluster.xavier("roles")["routing"]["choices"].get("prefill", 0)
    by_name = {
        uid: {name: [each[name] for each in figures] for name in figures[0]}
        for uid, figures in rounds.items()
    }
    any_, roles = by_name["any"], by_name["roles"]
    return {
        "any": {name: figure(samples) for name, samples in any_.items()},
        "roles": {name: figure(samples) for name, samples in roles.items()},
        "roles/any": {name: ratio(roles[name], any_[name]) for name in roles},
        "divided": divided,
    }


def _round(cluster: LocalCluster, uid: str, seeds: itertools.count[int]) -> _Round:
    done = threading.Event()
    began = time.perf_counter()

    def read_on(reader: int) -> list[_Read]:
        reads = []
        while not done.is_set():
            reads.append(_read(cluster, uid, f"Reader {reader}, tell a story.", ANSWER))
        return reads

    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(read_on, reader) for reader in range(READERS)]
        try:
            prompts = [document(next(seeds), ROWS) for _ in range(PROMPTS)]
            long = [_read(cluster, uid, prompt, 8) for prompt in prompts]
        finally:
            done.set()
    others = [read for each in reading for read in each.result()]
    return _Round(long, others, time.perf_counter() - began)


def _read(cluster: LocalCluster, uid: str, prompt: str, tokens: int) -> _Read:
    body = {
        "model": uid,
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
        f"two with roles, in turns; {ROUNDS} rounds of {PROMPTS} prompts each. Of the long ones, "
        f"{part['divided']} were left to the prefill replica, those of the first two rounds, which "
        "do not count, included. Medians of the rounds, with minimum and maximum in brackets.",
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
