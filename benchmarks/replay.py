"""Part `replay`: a real trace through xinference, with routing and in turn.

Conversations of Mooncake's trace, scaled down, go to three replicas, alternately with routing and
in turn. Each time they have other words, so no replica holds anything of them. The simulator of
part `routing` plays the same requests with the replicas' speed, which is measured before each pair,
because the machine's changes by the minute. That shows how far its figures can be believed.

`vllm bench serve --dataset-name timed_trace` sends tokens, which xinference's API does not take.
Here the same is sent as text: every word is one token.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks import pairs, traces
from benchmarks.engines import DTYPE, SETTLE, own_model
from benchmarks.report import ROOT
from benchmarks.rivals import EarliestFinish, InTurn
from benchmarks.simulator import Engine, Maker, Simulator
from benchmarks.traces import Request
from examples.local_cluster import REQUEST_TIMEOUT, LocalCluster
from examples.waiting import until

TITLE = "Real requests on real replicas"
TRACE = "conversation"
REPLICAS = 3
SMALLER = 16
"""Tokens of the trace ÷ tokens that are sent."""
BLOCK = traces.CHUNK // SMALLER
CONVERSATIONS = 200
"""Of the trace ÷ of a pair."""
LOAD = 0.5
"""Seconds that one replica takes to compute all prompts ÷ those that all have, on the processors
that they share."""
PAIRS = 5
QUICK = {"CONVERSATIONS": 1200, "ROUNDS": 1}
POOL_SLOTS = 2048
LENGTHS = (8, 64, 160)
"""Blocks of the prompts by which the speed is measured."""
AT_ONCE, EACH = 24, 4
"""Blocks of prompts that all replicas compute at once, about as many as the trace's prompts have on
average, and how many each replica gets."""
ROUNDS = 3
CONTEXT = 16_384
STEP = 2048
"""Tokens that a replica computes at once, at most."""
_UID = "replay"
_PATH = "/v1/completions"
_LOG = ROOT / "build" / "bench-replay.log"
_PATIENCE = 60.0
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # three replicas would fight for the processors
}
_POLICIES: dict[bool, Maker] = {True: EarliestFinish, False: InTurn}


class Played(NamedTuple):
    """The seconds of each answer, which is one token, and which part of all tokens was reused."""

    seconds: Sequence[float]
    reused: float


class Words:
    """Texts of so many tokens."""

    def __init__(self, model: Path) -> None:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = sorted(
            f" {token[1:]}" for token in vocabulary if token[0] == "Ġ" and token[1:].isalpha()
        )

    def text(self, seed: object, tokens: int) -> str:
        return "".join(random.Random(str(seed)).choices(self._words, k=tokens))

    def prompts(self, requests: Sequence[Request], time: int) -> list[str]:
        """Those with equal keys begin alike, but not like those of another `time`."""
        return [
            "".join(self.text((time, key), BLOCK) for key in request.keys)
            + self.text((time, number), request.tokens - BLOCK * len(request.keys))
            for number, request in enumerate(requests)
        ]


def conversations(trace: Sequence[Request], number: int) -> list[Request]:
    """Every so many conversations, and all of their requests; smaller, from 0 s on.

    All requests of a trace may begin alike, so a conversation is known by its second block."""
    found = [
        Request(request.at, max(1, request.tokens // SMALLER), request.keys)
        for request in trace
        if request.keys[1:] and int.from_bytes(request.keys[1][:8]) % CONVERSATIONS == number
    ]
    return [request._replace(at=request.at - found[0].at) for request in found]


def measure() -> dict[str, Any]:
    trace = traces.load(TRACE)
    model = own_model()
    words, times = Words(model), count()
    with LocalCluster(_LOG, environment=_ENVIRONMENT) as cluster:
        cluster.register(model, "small")
        cluster.launch(
            "small",
            _UID,
            replica=REPLICAS,
            dtype=DTYPE,
            block_size=BLOCK,
            max_model_len=CONTEXT,
            max_num_batched_tokens=STEP,
            enable_xavier=True,
            xavier_chunk_tokens=BLOCK,
            xavier_pool_bytes=POOL_SLOTS * (BLOCK << 14),
        )
        engines: list[Engine] = []
        played: dict[bool, list[Played]] = {True: [], False: []}
        simulated: dict[bool, list[Played]] = {True: [], False: []}

        def play(requests: Sequence[Request], routed: bool) -> None:
            prompts = words.prompts(requests, next(times))
            _route(cluster, routed)
            played[routed].append(asyncio.run(_play(cluster.endpoint, requests, prompts)))
            simulated[routed].append(simulate(engines[-1], requests, routed))

        for number in range(PAIRS):
            engine = _engine(cluster, words, number)
            engines.append(engine)
            requests = conversations(trace, number)
            speed = _tokens(requests) / sum(engine.compute_seconds(each, 0) for each in requests)
            requests = traces.spread(requests, LOAD * engine.processors * speed, 1)
            pairs.in_turns(partial(play, requests))(number)
    return summary(engines, played, simulated)


def _engine(cluster: LocalCluster, words: Words, number: int) -> Engine:
    """How fast a replica is while the others rest, and how many processors all have in effect:
    xinference and what stores and publishes rows need some of them, too."""
    _route(cluster, False)
    cluster.call("POST", f"/v1/xavier/{_UID}/flush")  # room for what is published here
    took: dict[int, list[tuple[float, float]]] = {blocks: [] for blocks in LENGTHS}
    together = []
    # The first turn of all warms up and makes the links.
    for turn in range(0 if number else -1, ROUNDS):
        tokens = AT_ONCE * BLOCK + 1
        at_once = [Request(0.0, tokens, ())] * REPLICAS * EACH
        texts = [words.text((number, turn, place), tokens) for place in range(len(at_once))]
        seconds = asyncio.run(_play(cluster.endpoint, at_once, texts)).seconds
        if turn >= 0:
            together.append(max(seconds))
        for blocks, samples in took.items():
            sample = _cold_and_remote(
                cluster, words.text((number, turn, f"{blocks} blocks"), blocks * BLOCK + 1)
            )
            if turn >= 0:
                samples.append(sample)
    cold, remote = (
        {blocks: median(each[place] for each in samples) for blocks, samples in took.items()}
        for place in (0, 1)
    )
    lengths = [blocks * BLOCK for blocks in LENGTHS]
    transit, token_s, depth_s = np.linalg.solve(
        [[1, length, length**2 / 2] for length in lengths], [*cold.values()]
    ).tolist()
    least, most = min(LENGTHS), max(LENGTHS)
    fetch = (most - least) * BLOCK / (remote[most] - remote[least])
    engine = Engine(
        prefill=1 / token_s,
        depth_s=depth_s,
        fetch=fetch,
        fetch_s=max(0.0, remote[least] - least * BLOCK / fetch - transit),
        transit=max(0.0, transit),
        chunk=BLOCK,
        slots=POOL_SLOTS,
        step=STEP,
    )
    alone = engine.seconds(0, AT_ONCE * BLOCK + 1)
    processors = REPLICAS * EACH * alone / (median(together) - engine.transit)
    return engine._replace(processors=processors)


def _cold_and_remote(cluster: LocalCluster, text: str) -> tuple[float, float]:
    """Requests go to the replicas in turn, so the second one reaches another replica."""
    held = cluster.holdings(_UID)
    cold = cluster.complete(_UID, text, max_tokens=1)
    blocks = cold.prompt_tokens // BLOCK
    if not until(lambda: cluster.holdings(_UID) >= held + blocks, _PATIENCE, 0.02):
        raise RuntimeError("the prompt is not published")
    time.sleep(SETTLE)
    remote = cluster.complete(_UID, text, max_tokens=1)
    if cold.cached_tokens or remote.cached_tokens < blocks * BLOCK:
        raise RuntimeError(f"{remote.cached_tokens} of {remote.prompt_tokens} tokens were reused")
    return cold.seconds, remote.seconds


def _route(cluster: LocalCluster, routed: bool) -> None:
    """Switch routing on or off; return when it is so."""
    cluster.call("POST", f"/v1/xavier/{_UID}", {"routing": "auto" if routed else "off"})

    def switched() -> bool:
        answer = httpx.post(f"{cluster.endpoint}{_PATH}", json=_body("Hello"), timeout=_PATIENCE)
        return ("x-xavier-replica" in answer.raise_for_status().headers) == routed

    if not until(switched, _PATIENCE, 0.1):
        raise RuntimeError("routing was not switched")


def _body(prompt: str) -> dict[str, Any]:
    return {"model": _UID, "prompt": prompt, "max_tokens": 1, "temperature": 0}


async def _play(endpoint: str, requests: Sequence[Request], prompts: Sequence[str]) -> Played:
    """Whatever has not been answered yet, each request is sent at its time."""
    async with httpx.AsyncClient(
        base_url=endpoint, timeout=REQUEST_TIMEOUT, limits=httpx.Limits(max_connections=None)
    ) as client:
        began = asyncio.get_running_loop().time()
        answers = await asyncio.gather(
            *(
                _ask(client, prompt, request.tokens, began + request.at)
                for request, prompt in zip(requests, prompts, strict=True)
            )
        )
    seconds = [seconds for seconds, _ in answers]
    reused = sum(cached for _, cached in answers)
    return Played(seconds, reused / _tokens(requests))


def _tokens(requests: Sequence[Request]) -> int:
    return sum(request.tokens for request in requests)


async def _ask(client: httpx.AsyncClient, prompt: str, tokens: int, at: float) -> tuple[float, int]:
    """Seconds, and reused tokens."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, at - clock()))
    answer = await client.post(_PATH, json=_body(prompt))
    seconds = clock() - at
    usage = answer.raise_for_status().json()["usage"]
    if usage["prompt_tokens"] != tokens:
        raise RuntimeError(f"{usage['prompt_tokens']} tokens were meant to be {tokens}")
    return seconds, (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def simulate(engine: Engine, requests: Sequence[Request], routed: bool) -> Played:
    result = Simulator(REPLICAS, _POLICIES[routed], engine=engine).run(requests)
    reused = result.local + result.fetched
    return Played(result.seconds, reused / (reused + result.computed))


_WAYS = {True: "routed", False: "in turn"}


def summary(
    engines: Sequence[Engine],
    played: Mapping[bool, Sequence[Played]],
    simulated: Mapping[bool, Sequence[Played]],
) -> dict[str, Any]:
    ways = {}
    for routed, name in _WAYS.items():
        measured, forecast = (_together(each[routed]) for each in (played, simulated))
        ways[name] = {
            "measured": measured,
            "simulated": forecast,
            "simulated/measured": forecast["mean_s"] / measured["mean_s"],
        }
    on, off = ([_times(each.seconds) for each in played[routed]] for routed in (True, False))
    return {
        "engine": Engine(*map(median, zip(*engines, strict=True)))._asdict(),
        "requests": sum(len(each.seconds) for each in played[True]),
        "ways": ways,
        "compared": pairs.summary(list(zip(on, off, strict=True))),
    }


def _times(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "mean_s": mean(seconds),
        "median_s": median(seconds),
        "p99_s": float(np.percentile(seconds, 99)),
    }


def _together(plays: Sequence[Played]) -> dict[str, float]:
    seconds = [second for play in plays for second in play.seconds]
    return {**_times(seconds), "reused": mean(play.reused for play in plays)}


def markdown(part: dict[str, Any]) -> str:
    engine = Engine(**part["engine"])
    lines = [
        f"{part['requests']} requests of the trace `{TRACE}`, of whole conversations and with "
        f"1/{SMALLER} of the tokens, to xinference with {REPLICAS} replicas: {PAIRS} parts, each "
        "with routing and in turn, beginning with either alternately. The load is "
        f"{LOAD:g} of what the replicas can compute; together they "
        f"are as fast as {engine.processors:.2f} with a processor each. Alone, one computes "
        f"{engine.prefill:,.0f} tokens a second at the beginning of a prompt and "
        f"{1 / (1 / engine.prefill + 1e4 * engine.depth_s):,.0f} after 10,000 tokens, "
        f"and fetches {engine.fetch:,.0f} after {engine.fetch_s * 1e3:.0f} ms; "
        f"{engine.transit * 1e3:.0f} ms of a request are spent elsewhere. "
        "Answers have one token.",
        "",
        "| | mean, s | median, s | 99 of 100, s | reused |",
        "|---|---|---|---|---|",
    ]
    for name, way in part["ways"].items():
        for source in ("measured", "simulated"):
            found = way[source]
            lines.append(
                f"| {name}, {source} | {found['mean_s']:.2f} | {found['median_s']:.2f} "
                f"| {found['p99_s']:.2f} | {found['reused']:.2f} |"
            )
    lines += [
        "",
        "Measured, pair by pair (geometric mean of the ratios, 95 % confidence interval):",
        "",
        "| | routed | in turn | ratio |",
        "|---|---|---|---|",
        *(
            pairs.line(title, part["compared"][name], digits=2)
            for name, title in (("mean_s", "mean, s"), ("p99_s", "99 of 100, s"))
        ),
    ]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = [f"{way}, {source}" for way in part["ways"] for source in ("measured", "simulated")]
    means = [
        way[source]["mean_s"]
        for way in part["ways"].values()
        for source in ("measured", "simulated")
    ]
    axes.bar(names, means)
    axes.tick_params(axis="x", labelrotation=15)
    axes.set_ylabel("seconds to the answer (mean)")
