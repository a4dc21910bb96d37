"""Part `served`: what sharing costs behind HTTP, measured by vLLM's own `vllm bench serve`.

Two vLLM servers, one with Xavier and one without, get the same load in turns: the data set
`random`, where nothing can be reused, and `prefix_repetition`, where vLLM's own prefix cache serves
most. The benchmark is called as a function, because the program `vllm` of vLLM's CPU build does not
start.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks import pairs
from benchmarks.figures import table
from benchmarks.report import ROOT
from benchmarks.watchers import MeasuredTracker
from examples.processes import answers, end, free_port, start, until
from tests.harness.engines import CHUNK, DTYPE, ENVIRONMENT, POOL_BYTES, own_model
from tests.harness.replicas import MODEL
from xinference_xavier.config import XavierConfig, kv_transfer_config

PROMPT_TOKENS = 500
PREFIX_TOKENS = 400
ANSWER_TOKENS = 32
REQUESTS = 16
AT_ONCE = 4
SECONDS = 30.0
"""Seconds for all pairs of a data set."""
WIDTH = 0.01
QUICK = {"SECONDS": 0.0}
DATASETS = ("random", "prefix_repetition")
_HOST = "127.0.0.1"
_LOG = ROOT / "build" / "bench-served.log"
_START_TIMEOUT = 480.0
_STOP_TIMEOUT = 30.0
_FIGURES = {
    "request_throughput": ("requests per second", 2),
    "median_ttft_ms": ("time to first token, median, ms", 1),
    "p99_ttft_ms": ("time to first token, p99, ms", 1),
    "median_itl_ms": ("time between tokens, median, ms", 2),
    "p99_itl_ms": ("time between tokens, p99, ms", 2),
}
"""vLLM's names of what is compared; titles and digits in the table."""


def measure() -> dict[str, Any]:
    seeds = itertools.count()
    model = own_model()
    found = {}
    with MeasuredTracker() as tracker, Server(model, None) as off:
        config = XavierConfig(MODEL, tracker.address, pool_bytes=POOL_BYTES, chunk_tokens=CHUNK)
        with Server(model, kv_transfer_config(config)) as on:
            servers = {True: on, False: off}
            for server in servers.values():
                server.wait_ready()
            for name in DATASETS:

                def run(sharing: bool, name: str = name) -> pairs.Run:
                    return bench(model, servers[sharing].port, name, next(seeds))

                for sharing in servers:  # warm up
                    run(sharing)
                until = time.monotonic() + SECONDS
                watched = {"request_throughput": WIDTH, "p99_itl_ms": WIDTH}
                made = pairs.until_known(pairs.in_turns(run), until=until, watched=watched)
                found[name] = {"pairs": len(made), "compared": pairs.summary(made)}
    return {"datasets": found}


class Server:
    """A vLLM server that runs until its `with` block ends."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None) -> None:
        self.port = free_port(_HOST)
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--host", _HOST, "--port", str(self.port)),
            *("--dtype", DTYPE, "--block-size", str(CHUNK), "--enforce-eager"),
            *("--distributed-executor-backend", "uni"),
        ]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        self._process = start(command, _LOG, environment, append=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        end(self._process, _STOP_TIMEOUT)

    def wait_ready(self) -> None:
        health = f"http://{_HOST}:{self.port}/health"
        until(lambda: self._process.poll() is not None or answers(health), _START_TIMEOUT, 0.5)
        if not answers(health):
            raise RuntimeError(f"vLLM's server does not answer: see {_LOG}")


def bench(model: Path, port: int, dataset: str, seed: int) -> dict[str, float]:
    """Run `vllm bench serve` once."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    serve.add_cli_args(parser)
    arguments: argparse.Namespace = parser.parse_args(
        [
            f"--model={model}",
            f"--host={_HOST}",
            f"--port={port}",
            f"--dataset-name={dataset}",
            f"--num-prompts={REQUESTS}",
            f"--max-concurrency={AT_ONCE}",
            f"--seed={seed}",
            "--ignore-eos",
            "--disable-tqdm",
            "--percentile-metrics=ttft,itl",
            "--metric-percentiles=99",
            *_lengths(dataset),
        ]
    )
    with _LOG.open("a") as log, contextlib.redirect_stdout(log):
        result = asyncio.run(serve.main_async(arguments))
    if result["completed"] != REQUESTS:
        raise RuntimeError(f"{result['completed']} of {REQUESTS} requests were answered")
    return {name: float(result[name]) for name in _FIGURES}


def _lengths(dataset: str) -> Iterator[str]:
    if dataset == "random":
        yield from (f"--random-input-len={PROMPT_TOKENS}", f"--random-output-len={ANSWER_TOKENS}")
        return
    option = "--prefix-repetition"
    yield f"{option}-prefix-len={PREFIX_TOKENS}"
    yield f"{option}-suffix-len={PROMPT_TOKENS - PREFIX_TOKENS}"
    yield f"{option}-num-prefixes={max(1, REQUESTS // 8)}"
    yield f"{option}-output-len={ANSWER_TOKENS}"


def markdown(part: dict[str, Any]) -> str:
    """Ratios are geometric means over the pairs, with 95 % confidence intervals."""
    return table(
        ("data set", "", "with Xavier", "vLLM alone", "ratio"),
        (
            (
                f"`{dataset}`, {found['pairs']} pairs",
                title,
                *pairs.cells(found["compared"][name], digits=digits),
            )
            for dataset, found in part["datasets"].items()
            for name, (title, digits) in _FIGURES.items()
        ),
    )
