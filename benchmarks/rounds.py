"""Part `rounds`: sessions and a burst on one prompt, on real replicas, routed and in turn.

Two replicas under xinference, in the shape of production-stack's `multi-round-qa`: all sessions
begin with one system prompt, then each user's own history, and each round adds a question and the
last answer. A user asks the next question some seconds after the last one, or once that is
answered: so many that the replicas could not compute all prompts from their beginnings. Routing is
switched between runs, whose sessions have nothing in common.

The burst is what a chat gets: many questions behind one system prompt, two a second, each answered
at length. The replica that holds the prompt would answer all, if only first tokens counted.

Each replica computes on processors of its own, as on a GPU of its own: where replicas compete for
processors, the ones with short queues slow down the one with a long queue. Whatever else runs there
goes first, so that tokens are passed on as they come.
"""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import requests

from benchmarks import pairs
from benchmarks.figures import table
from benchmarks.report import ROOT
from examples.documents import document
from examples.local_cluster import REQUEST_TIMEOUT, LocalCluster
from tests.harness.engines import CHUNK, DTYPE, POOL_BYTES, own_model

REPLICAS = 2
USERS, ROUNDS = 10, 5
LOAD = 1.5
"""The time for computing all prompts from their beginnings, as a multiple of the time in which they
are asked."""
SYSTEM_ROWS, HISTORY_ROWS, QUESTION_ROWS = 8, 16, 1
"""A row has about 50 tokens."""
ANSWER_TOKENS = 32
BURST, BURST_PAUSE_S, BURST_TOKENS = 48, 0.5, 96
QUICK = {"ROUNDS": 2, "BURST": 8}
UID = "rounds"
_NAMES = {
    "mean_s": "mean",
    "median_s": "median",
    "p90_s": "90 of 100",
    "p99_s": "99 of 100",
    "longest_s": "longest",
}
_BURST = {
    "first_s": "first token, mean",
    "last_s": "last token, mean",
    "last_p99_s": "last token, 99 of 100",
}


def measure() -> dict[str, Any]:
    seeds = itertools.count(0, 1000)
    log = ROOT / "build" / "bench-rounds.log"
    with LocalCluster(log, environment=_ONE_THREAD) as cluster:
        cluster.register(own_model(), "small")
        cluster.launch("small", UID, replica=REPLICAS, **_LAUNCH)
        _give_own_processors(cluster)

        def computed() -> float:
            prompt = document(next(seeds), SYSTEM_ROWS + HISTORY_ROWS + QUESTION_ROWS)
            return _ask(cluster.endpoint, prompt).first_s

        for _ in range(REPLICAS):  # so that replicas know how fast they are
            computed()
        pause = median(computed() for _ in range(5)) * USERS / REPLICAS / LOAD

        def switch(routed: bool) -> None:
            mode = "auto" if routed else "off"
            cluster.call("PATCH", f"/v1/xavier/{UID}", {"routing": mode})

        def run(routed: bool) -> pairs.Run:
            switch(routed)
            return _figures(_play(cluster.endpoint, next(seeds), pause))

        for routed in (True, False):  # so that they know how fast they fetch
            run(routed)
        made = pairs.until_known(pairs.in_turns(run), until=0.0, watched={})

        def burst(routed: bool) -> pairs.Run:
            switch(routed)
            return _burst(cluster.endpoint, next(seeds))

        burst(routed=False)  # warm up
        bursts = pairs.summary(pairs.until_known(pairs.in_turns(burst), until=0.0, watched={}))
    return {
        "pairs": len(made),
        "requests": USERS * ROUNDS,
        "pause_s": pause,
        "compared": pairs.summary(made),
        "burst_most": bursts.pop("most")["on"],  # answers in turn do not say who gave them
        "burst": bursts,
    }


_LAUNCH: dict[str, Any] = {
    "dtype": DTYPE,
    "max_model_len": 16384,
    "block_size": CHUNK,
    "enable_xavier": True,
    "xavier_pool_bytes": POOL_BYTES,
}


_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def _give_own_processors(cluster: LocalCluster) -> None:
    workers = [each for each in cluster.processes() if each.name() == "VLLM::Worker"]
    assert len(workers) == REPLICAS
    processors = sorted(os.sched_getaffinity(0))
    for number, worker in enumerate(workers):
        worker.nice(10)
        for thread in worker.threads():
            os.sched_setaffinity(thread.id, processors[number::REPLICAS])


def _play(endpoint: str, seed: int, pause: float) -> list[float]:
    """Seconds to the first token of every request. A user pauses so many seconds between two
    questions; the users begin one after another within them."""
    system = document(seed, SYSTEM_ROWS)

    def session(user: int) -> list[float]:
        return [*_session(endpoint, system, seed, user, pause)]

    with ThreadPoolExecutor(USERS) as users:
        return [*itertools.chain.from_iterable(users.map(session, range(USERS)))]


def _session(endpoint: str, system: str, seed: int, user: int, pause: float) -> Iterator[float]:
    begin = time.monotonic() + pause * user / USERS
    said = system + document(seed + 1 + user, HISTORY_ROWS)
    for number in range(ROUNDS):
        time.sleep(max(0.0, begin + number * pause - time.monotonic()))
        said += f"\nQuestion {number}: {document(seed + 500 + number, QUESTION_ROWS)}\nAnswer: "
        answer = _ask(endpoint, said)
        said += answer.text
        yield answer.first_s


def _burst(endpoint: str, seed: int) -> pairs.Run:
    """All questions arrive at a fixed rate, whatever was answered."""
    system, began = document(seed, SYSTEM_ROWS), time.monotonic()

    def asked(number: int) -> Answer:
        time.sleep(max(0.0, began + number * BURST_PAUSE_S - time.monotonic()))
        question = f"{system}\nQuestion {number}: {document(seed + 1 + number, QUESTION_ROWS)}"
        return _ask(endpoint, question, BURST_TOKENS)

    with ThreadPoolExecutor(BURST) as clients:
        answers = [*clients.map(asked, range(BURST))]
    (_, most), *_ = Counter(each.replica for each in answers).most_common()
    return {
        "first_s": mean(each.first_s for each in answers),
        "last_s": mean(each.last_s for each in answers),
        "last_p99_s": float(np.percentile([each.last_s for each in answers], 99)),
        "most": most,
    }


class Answer(NamedTuple):
    """Seconds count from the request."""

    text: str
    replica: str
    first_s: float
    last_s: float


def _ask(endpoint: str, prompt: str, tokens: int = ANSWER_TOKENS) -> Answer:
    body = {
        "model": UID,
        "prompt": prompt,
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    began, first, text = time.monotonic(), 0.0, ""
    with requests.post(
        f"{endpoint}/v1/completions", json=body, stream=True, timeout=REQUEST_TIMEOUT
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            first = first or time.monotonic() - began
            text += json.loads(line[6:])["choices"][0]["text"]
        replica = answer.headers.get("x-xavier-replica", "")
    return Answer(text, replica, first, time.monotonic() - began)


def _figures(seconds: list[float]) -> pairs.Run:
    return {
        "mean_s": mean(seconds),
        "median_s": median(seconds),
        "p90_s": float(np.percentile(seconds, 90)),
        "p99_s": float(np.percentile(seconds, 99)),
        "longest_s": max(seconds),
    }


def markdown(part: dict[str, Any]) -> str:
    """Seconds to the first token: medians over the runs, and the mean ratio of the pairs with its
    95 % confidence interval."""
    asked = f"A user asks every {part['pause_s']:.1f} s.\n\n"
    sessions = table(
        (f"{part['pairs']} × {part['requests']} requests", "routed", "in turn", "ratio"),
        ([title, *pairs.cells(part["compared"][name], digits=2)] for name, title in _NAMES.items()),
    )
    burst = table(
        (f"{part['pairs']} × {BURST} questions on one prompt", "routed", "in turn", "ratio"),
        ([title, *pairs.cells(part["burst"][name], digits=2)] for name, title in _BURST.items()),
    )
    most = f"The busier replica answered {part['burst_most']['median']:.0f} of them (routed)."
    return f"{asked}{sessions}\n\n{burst}\n\n{most}"
