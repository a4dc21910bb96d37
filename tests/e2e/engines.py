"""Real vLLM engines without xinference, each in a process that a test talks to through a pipe.

An engine serves many requests at once, and events happen meanwhile. Commands are answered when they
are done, in any order, so `EngineProcess.begin` returns a future. An engine's scheduler and worker
share a process, unless it is asynchronous: then it schedules like an engine on CUDA, ahead of a
worker in a process of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from benchmarks import forking
from benchmarks.asynchronous import schedule_asynchronously
from tests.e2e.gates import FOLDER
from tests.replica_process import TrackerProcess, wait_until
from xinference_xavier.config import XavierConfig, kv_transfer_config

CHUNK = 128
"""Tokens; also the block size."""
CHUNKS = 5
"""Whole chunks of a prompt, unless a test says otherwise; with its tail it takes 6 blocks."""
KV_BLOCKS = 20
"""Blocks of an engine's own KV cache: three prompts, as vLLM keeps one block for itself."""
POOL_ROWS = 25
"""Rows of an engine's pool: four prompts, and what engines store to compare themselves."""
CONTEXT = 2048
ROW_BYTES = 2 << 20
"""Bytes of a chunk: 8 layers, keys and values, 4 heads of 64 float32 numbers."""

_START_TIMEOUT = 300.0
_STOP_TIMEOUT = 15.0
PATIENCE = 180.0
"""Seconds for an answer of an engine with many requests."""


class Answer(NamedTuple):
    """The outcome of a request."""

    tokens: tuple[int, ...]
    cached: int  # prompt tokens that were not computed
    reason: str  # "length" or "abort"


def _gated(transfer: dict[str, Any], engine_id: str) -> dict[str, Any]:
    """Make the engine's copies wait at a gate, and give it an id that the test knows."""
    extra = transfer["kv_connector_extra_config"] | {
        "spec_name": "GatedSpec",
        "spec_module_path": "tests.e2e.gated_copies",
    }
    return {**transfer, "engine_id": engine_id, "kv_connector_extra_config": extra}


def prompt(seed: int, *, chunks: int = CHUNKS, tail: int = 40) -> list[int]:
    """A prompt of whole chunks and a tail. With one seed, the chunks of a prompt begin those of
    every longer one."""
    random = np.random.default_rng(seed)
    tokens: list[int] = random.integers(300, 8000, chunks * CHUNK).tolist()
    return [*tokens, *np.random.default_rng(seed + 1).integers(300, 8000, tail).tolist()]


def fine_tune(folder: Path, to: Path) -> Path:
    """A model of the same shape with other weights in each layer."""
    shutil.copytree(folder, to)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "v_proj.weight" in name or "k_proj.weight" in name:
            weights[name] = np.ascontiguousarray(tensor[::-1])
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


class Known(NamedTuple):
    """What the tracker knows about a replica."""

    namespace: str
    holdings: int
    stats: dict[str, Any]


class Tracker(TrackerProcess):
    """A tracker in a process, for the engines of one test module."""

    def known(self, name: str) -> Known:
        """Ask for the replica's current figures; wait while it is between two namespaces."""
        found: list[Known] = []

        def look() -> bool:
            for namespace, known in self._ask("status")["namespaces"].items():
                for replica in known["replicas"]:
                    stats = replica["stats"]
                    if replica["incarnation"] == name and "stale" not in stats:
                        found.append(Known(namespace, replica["holdings"], stats))
            return bool(found)

        wait_until(look, f"{name} is a member", interval=0.02)
        return found[-1]


class EngineProcess:
    """An engine in a process; `name` is its incarnation. Without a `config` it shares nothing.
    `more` are arguments of vLLM's."""

    def __init__(
        self,
        name: str,
        model: Path,
        config: XavierConfig | None,
        gates: Path | None = None,
        *,
        asynchronous: bool = False,
        **more: Any,
    ) -> None:
        self.name = name
        self.gates = gates
        context = forking.context()
        self._pipe, theirs = context.Pipe()
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": CONTEXT,
            "block_size": CHUNK,
            "num_gpu_blocks_override": KV_BLOCKS,
            "kv_cache_memory_bytes": KV_BLOCKS * ROW_BYTES,
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "mp" if asynchronous else "uni",
            "max_num_batched_tokens": CONTEXT,
            **more,
        }
        if config is None:
            arguments["enable_prefix_caching"] = False
        else:
            arguments["kv_transfer_config"] = _gated(kv_transfer_config(config), name)
        self.process = context.Process(target=_run, args=(theirs, arguments, gates, asynchronous))
        self.process.start()
        atexit.register(self.close)  # at exit, multiprocessing would wait for it for ever
        theirs.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._ready: Future[Any] = Future()
        self._waiting[-1] = self._ready
        threading.Thread(target=self._listen, name=f"{name}-answers", daemon=True).start()

    def wait_until_ready(self) -> None:
        self._ready.result(_START_TIMEOUT)

    def begin(self, command: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of `_Inside` or, if it has none of that name, of vLLM's engine."""
        number = next(self._numbers)
        future = self._waiting[number] = Future()
        self._pipe.send((number, command, args, kwargs))
        return future

    def call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        return self.begin(command, *args, **kwargs).result(PATIENCE)

    def ask(
        self, prompt: Sequence[int], tokens: int = 8, name: str | None = None
    ) -> Future[Answer]:
        """Begin a request; a `name` makes it possible to abort it."""
        return self.begin("ask", list(prompt), tokens, name)

    def answer(self, prompt: Sequence[int], tokens: int = 8) -> Answer:
        return self.ask(prompt, tokens).result(PATIENCE)

    def close(self) -> None:
        """End all of its processes. Idempotent."""
        atexit.unregister(self.close)
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        with suppress(OSError):  # the process is dead
            self._pipe.send(None)
        self.process.join(_STOP_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for process in psutil.wait_procs(started, _STOP_TIMEOUT)[1]:
            process.kill()

    def _listen(self) -> None:
        try:
            while True:
                number, error, answer = self._pipe.recv()
                future = self._waiting.pop(number)
                if error is None:
                    future.set_result(answer)
                else:
                    future.set_exception(EngineError(error))
        except (EOFError, OSError):  # closed, or the process is dead
            for future in self._waiting.values():
                future.set_exception(EngineError(f"{self.name} has ended"))


class EngineError(Exception):
    """What an engine raised, as text."""


# -- in the engine's process --------------------------------------------------------------------


class _Inside:
    """Each public method is a command."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._unnamed = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def ask(self, prompt: list[int], tokens: int, name: str | None) -> Answer:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        name = name or f"unnamed-{next(self._unnamed)}"
        said: list[int] = []
        cached, reason = 0, ""
        outputs = self._engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling, name)
        async for output in outputs:
            (one,) = output.outputs
            said = list(one.token_ids)
            cached = output.num_cached_tokens or 0
            reason = one.finish_reason or ""
        return Answer(tuple(said), cached, reason)

    async def forget(self) -> None:
        """Empty vLLM's own prefix cache, but not the pool."""
        assert await self._engine.engine_core.call_utility_async(forking.FORGET)

    async def load_weights(self, folder: str) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    async def unfinished(self) -> int:
        """The number of requests that have arrived and not ended."""
        count: int = self._engine.output_processor.get_num_unfinished_requests()
        return count

    async def cached_tokens(self) -> dict[str, int]:
        """vLLM's own count of cached prompt tokens, by source."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        return {
            metric.labels["source"]: metric.value
            for metric in get_metrics_snapshot()
            if isinstance(metric, Counter) and metric.name == "vllm:prompt_tokens_cached_by_source"
        }

    async def preemptions(self) -> int:
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        return sum(
            metric.value
            for metric in get_metrics_snapshot()
            if isinstance(metric, Counter) and metric.name == "vllm:num_preemptions"
        )


def _run(
    pipe: Connection, arguments: dict[str, Any], gates: Path | None, asynchronous: bool
) -> None:
    os.environ.update(forking.ENVIRONMENT, **({FOLDER: str(gates)} if gates is not None else {}))
    forking.fork_engine_core()
    if asynchronous:
        schedule_asynchronously()
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cuda():  # three engines share a card
        arguments = {**arguments, "gpu_memory_utilization": 0.2, "async_scheduling": asynchronous}

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        assert engine.vllm_config.scheduler_config.async_scheduling is asynchronous
        inside = _Inside(engine)
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        pipe.send((-1, None, None))
        while True:
            try:
                order = await loop.run_in_executor(None, pipe.recv)
            except EOFError:  # the test's process is gone
                order = None
            if order is None:
                break
            task = asyncio.ensure_future(_obey(inside, pipe, *order))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        engine.shutdown()

    asyncio.run(serve())
    os._exit(0)


async def _obey(
    inside: _Inside, pipe: Connection, number: int, command: str, args: Any, kwargs: Any
) -> None:
    try:
        failed, answer = None, await getattr(inside, command)(*args, **kwargs)
    except Exception as error:
        failed, answer = repr(error), None
    pipe.send((number, failed, answer))
