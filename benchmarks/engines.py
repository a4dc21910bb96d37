"""vLLM engines that share, each in a process that is told through a pipe what to do.

Times are taken beside the engine, from the call that gives it a request to its first output: no
HTTP, no tokenizer, and not our pipe. One command of an engine at a time; `begin` on several engines
and then `finish` has them do something at once.
"""

from __future__ import annotations

import asyncio
import atexit
import getpass
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from benchmarks.asynchronous import schedule_asynchronously
from benchmarks.watchers import MODEL, TrackerProcess
from examples.make_model import CONTEXT, make_model
from examples.waiting import until
from xinference_xavier.config import XavierConfig
from xinference_xavier.kv_transfer_config import kv_transfer_config
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.tracker.fanout import flush_all

CHUNK = 128
"""Tokens; also the block size."""
POOL_BYTES = 512 << 20
DTYPE = "bfloat16"
STEP_TOKENS = 2048
"""That an engine computes at once, as a server of vLLM's does by default."""
_MODEL = Path(__file__).resolve().parent.parent / "build" / "model"
_KV_BLOCKS = 320  # two of the longest prompts, and what vLLM keeps for itself
_BLOCK_BYTES = 1 << 20  # of the model in bfloat16
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the platform insists on a worker process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines take turns on all cores
}
_START_TIMEOUT = 480.0
_STOP_TIMEOUT = 20.0
_PATIENCE = 300.0
_INTERVAL = 0.02
SETTLE = 0.2
"""Seconds from the tracker's knowing to every mirror's, and more than is ever needed."""
_REST = 0.5
"""Seconds before a request. OpenMP's threads spin for 0.2 after they computed, and who is asked
within that time is faster than who is asked after it: all requests start from the same state."""


class Asked(NamedTuple):
    """One request. Seconds since it was given to the engine; `cached` are prompt tokens."""

    first: float
    times: tuple[float, ...]
    cached: int

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Answer(NamedTuple):
    """What became of one request; `cached` are prompt tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Load(NamedTuple):
    """Requests that were served at once."""

    seconds: float
    asked: list[Asked]


class EngineError(Exception):
    """What an engine raised, as text."""


class Prompts:
    """Random tokens, of which no two prompts share a chunk."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        prompt: list[int] = self._random.integers(300, 8000, tokens).tolist()
        return prompt


def whole_chunks(tokens: int) -> int:
    """Of a prompt, as many as can be reused: its last token is always computed."""
    return (tokens - 1) // CHUNK


def own_model() -> Path:
    """Where it is, after it was made."""
    return make_model(_MODEL)


def engine_environment() -> dict[str, str]:
    """What engines find in their environment beside what is there."""
    # What torch compiles for the first request takes 20 s and is worth keeping.
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    return {**_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": kept}


class Kind(NamedTuple):
    """How an engine differs from the others: arguments of vLLM's, options of ours. One without a
    transport does not share."""

    transport: str | None = "auto"
    arguments: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    asynchronous: bool = False
    """On the CPU platform: it schedules ahead of what a worker in a process of its own computes."""
    environment: Mapping[str, str] = {}


ALWAYS_FETCH = {"min_fetch_tokens": CHUNK}
"""What a fetch takes is to be seen, not whether it pays."""


class Engine:
    """The handle of an engine's process; commands are the methods of `_Inside`."""

    def __init__(self, name: str, arguments: dict[str, Any], kind: Kind) -> None:
        self.name = name
        self._has_answered = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, arguments, kind))
        self.process.start()
        atexit.register(self.close)  # before multiprocessing waits for it, for ever
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def finish(self, timeout: float = _PATIENCE) -> Any:
        """The answer to `begin`; raises EngineError."""
        try:
            if not self._pipe.poll(timeout):
                raise EngineError(f"{self.name} did not answer within {timeout:.0f} s")
            error, answer = self._pipe.recv()
            self._has_answered = True
        except EOFError:
            raise EngineError(f"{self.name} has ended") from None
        if error is not None:
            raise EngineError(f"{self.name}: {error}")
        return answer

    def do(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.finish()

    def ask(self, prompt: Sequence[int], tokens: int = 1) -> Asked:
        time.sleep(_REST)
        asked: Asked = self.do("ask", prompt, tokens)
        return asked

    def cpu_seconds(self) -> float:
        """Of all of its processes."""
        own = psutil.Process(self.process.pid)
        return sum(_cpu_seconds(process) for process in (own, *own.children(recursive=True)))

    def close(self) -> None:
        """Ends all of its processes; again does nothing. One that is only starting is killed."""
        atexit.unregister(self.close)
        patience = _STOP_TIMEOUT if self._has_answered else 0.0
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        with suppress(OSError):  # it is dead
            self._pipe.send(None)
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        for process in psutil.wait_procs(started, patience)[1]:
            process.kill()


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Fleet:
    """A tracker and engines by their names, all ready when the `with` begins.

    An engine's name is its incarnation; one that does not start is missing from `engines`, and
    `failed` says why, if it is among those that `may_fail`.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        *,
        model: Path | None = None,
        may_fail: Sequence[str] = (),
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        self._kinds = kinds
        self._model = model
        self._may_fail = may_fail
        self._step_tokens = step_tokens
        self.engines: dict[str, Engine] = {}
        self.failed: dict[str, str] = {}
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        model = self._model or own_model()
        self._tracker = TrackerProcess()
        self._tracker.__enter__()
        try:
            self.actor = self.run(self._tracker.actor())
            for name, kind in self._kinds.items():
                arguments = self._arguments(model, name, kind)
                self.engines[name] = Engine(name, arguments, kind)
            for name in self._kinds:
                self._wait_ready(name)
            self._wait(self._have_joined, "all have joined")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._loop.close()
        self._tracker.close()

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def run(self, call: Any) -> Any:
        """A call of the tracker's, always on the same loop."""

        async def called() -> Any:
            return await call

        return self._loop.run(called())

    def replicas(self) -> dict[str, dict[str, Any]]:
        """What the tracker knows of each, with figures of now."""
        namespaces = self.run(self.actor.status())["namespaces"].values()
        return {
            replica["incarnation"]: replica for known in namespaces for replica in known["replicas"]
        }

    def namespace(self) -> str:
        (found,) = self.run(self.actor.status())["namespaces"]
        return str(found)

    def wait_published(self, name: str, chunks: int) -> None:
        """Since the last `flush`; all others know of them, too."""
        self._wait(
            lambda: self.replicas()[name]["holdings"] >= chunks,
            f"{name} has published {chunks} chunks",
        )
        time.sleep(SETTLE)

    def flush(self, names: Sequence[str] = ()) -> None:
        """These pools, or all, hold nothing any more; vLLM's own caches keep what they have."""
        names = names or [name for name in self.engines if self._kinds[name].transport is not None]

        def are_empty() -> bool:
            replicas = self.replicas()
            members = [Member(name, replicas[name]["address"]) for name in names]
            self.run(flush_all(members))  # again: what was just computed is still being stored
            return not any(self.replicas()[name]["holdings"] for name in names)

        time.sleep(SETTLE)
        self._wait(are_empty, "the pools are empty")
        time.sleep(SETTLE)

    def _have_joined(self) -> bool:
        replicas = self.replicas()
        names = [name for name in self.engines if self._kinds[name].transport is not None]
        return all(replicas.get(name, {}).get("stats", {}).get("transfer_pid") for name in names)

    def _wait_ready(self, name: str) -> None:
        try:
            self.engines[name].finish(_START_TIMEOUT)
        except EngineError as error:
            if name not in self._may_fail:
                raise
            self.failed[name] = str(error)
            self.engines.pop(name).close()

    def _wait(self, condition: Any, what: str) -> None:
        if not until(condition, _PATIENCE, _INTERVAL):
            raise EngineError(f"not within {_PATIENCE:.0f} s: {what}")

    def _arguments(self, model: Path, name: str, kind: Kind) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": DTYPE,
            "enforce_eager": True,
            "max_model_len": CONTEXT,
            "block_size": CHUNK,
            "num_gpu_blocks_override": _KV_BLOCKS,
            "kv_cache_memory_bytes": _KV_BLOCKS * _BLOCK_BYTES,
            "max_num_batched_tokens": self._step_tokens,
            "skip_tokenizer_init": True,
            "distributed_executor_backend": "mp" if kind.asynchronous else "uni",
            "worker_extension_cls": "benchmarks.threads.ThreadTimes",
        }
        if kind.transport is not None:
            options = {"pool_bytes": POOL_BYTES, "chunk_tokens": CHUNK, **kind.options}
            config = XavierConfig(MODEL, self._tracker.address, transport=kind.transport, **options)
            arguments["kv_transfer_config"] = {**kv_transfer_config(config), "engine_id": name}
        return {**arguments, **kind.arguments}


# -- in the engine's process ------------------------------------------------------------------


class _Inside:
    """Each public method is a command."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._asked = 0

    async def ask(self, prompt: Sequence[int], tokens: int) -> Asked:
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = _greedy(tokens, output_kind=RequestOutputKind.DELTA)
        self._asked += 1
        times: list[float] = []
        cached = 0
        given = TokensPrompt(prompt_token_ids=list(prompt))
        began = time.perf_counter()
        async for output in self._engine.generate(given, sampling, f"request-{self._asked}"):
            times.append(time.perf_counter() - began)
            cached = output.num_cached_tokens or 0
        return Asked(times[0], tuple(times), cached)

    async def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        """To all of them at once."""
        return await asyncio.gather(*(self._answer(prompt, tokens) for prompt in prompts))

    async def _answer(self, prompt: Sequence[int], tokens: int) -> Answer:
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = _greedy(tokens, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        self._asked += 1
        given = TokensPrompt(prompt_token_ids=list(prompt))
        async for output in self._engine.generate(given, sampling, f"request-{self._asked}"):
            (said,) = output.outputs
        logprobs = [
            at[token].logprob for at, token in zip(said.logprobs, said.token_ids, strict=True)
        ]
        return Answer(tuple(said.token_ids), tuple(logprobs), output.num_cached_tokens or 0)

    async def serve(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], at_once: int
    ) -> Load:
        """So many requests at a time, each next one when one is done, with as many tokens answered
        as is said for it."""
        left = iter(zip(prompts, tokens, strict=True))
        asked: list[Asked] = []

        async def one_after_the_other() -> None:
            for prompt, count in left:
                asked.append(await self.ask(prompt, count))

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return Load(time.perf_counter() - began, asked)

    async def forget(self) -> None:
        """vLLM's own prefix cache, and not the pool."""
        end = time.monotonic() + _PATIENCE
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > end:
                raise TimeoutError("blocks are in use all the time")
            await asyncio.sleep(_INTERVAL)

    async def threads(self) -> dict[str, float]:
        (found,) = await self._engine.collective_rpc("benchmark_threads")
        return dict(found)


def _greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


def _run(pipe: Connection, arguments: dict[str, Any], kind: Kind) -> None:
    os.environ.update(engine_environment(), **kind.environment)
    if kind.asynchronous:
        schedule_asynchronously()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        inside = _Inside(engine)
        loop = asyncio.get_running_loop()
        pipe.send((None, None))
        while True:
            try:
                order = await loop.run_in_executor(None, pipe.recv)
            except EOFError:  # who started it is gone
                order = None
            if order is None:
                break
            method, given = order
            error, answer = None, None
            try:
                answer = await getattr(inside, method)(*given)
            except Exception as raised:  # it is the caller's
                error = repr(raised)
            pipe.send((error, answer))
        engine.shutdown()

    try:
        asyncio.run(serve())
    except Exception as error:
        with suppress(OSError):
            pipe.send((repr(error), None))
    os._exit(0)
