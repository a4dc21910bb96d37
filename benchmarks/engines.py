"""vLLM engines that share, each in a process that takes commands through a pipe.

Times are taken beside the engine, from the call that gives it a request to its first output:
without HTTP, tokenizer and our pipe. An engine runs one command at a time. To have several engines
work at once, call `begin` on all of them and then `finish`.
"""

from __future__ import annotations

import asyncio
import atexit
import getpass
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import psutil

from benchmarks import forking
from benchmarks.asynchronous import schedule_asynchronously
from benchmarks.steps import Step
from benchmarks.watchers import MODEL, TrackerProcess
from examples.make_model import CONTEXT, make_model
from examples.processes import until
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.errors import NotSharing
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.replica.peer_tier import GATHER
from xinference_xavier.tracker.fanout import flush_all

CHUNK = 128
"""Tokens; also the block size."""
POOL_BYTES = 1 << 30
DTYPE = "float32"
"""Processors without instructions for bfloat16 are 80 times as slow with it."""
STEP_TOKENS = 2048
"""Tokens that an engine computes in one step, as vLLM's server does by default."""
_MODEL = Path(__file__).resolve().parent.parent / "build" / "model"
_KV_BLOCKS = 320  # two of the longest prompts, and vLLM's own reserve
_BLOCK_BYTES = 2 << 20  # of the model in float32
_START_TIMEOUT = 480.0
_STOP_TIMEOUT = 20.0
_PATIENCE = 300.0
_INTERVAL = 0.02
_CANARIES = 2  # that each engine computes: a short one and a long one
SETTLE = GATHER + 0.1
"""Seconds until what was stored is in every mirror; more than is ever needed."""
REST = 0.3
"""Seconds of rest before a request. OpenMP's threads spin for 0.2 s after they have computed, and a
request within that time is faster than a later one. So all requests start from the same state."""


class Asked(NamedTuple):
    """The times of one request, in seconds since it was given to the engine, and its reused prompt
    tokens (`cached`)."""

    first: float
    times: tuple[float, ...]
    cached: int

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Answer(NamedTuple):
    """The result of one request; `cached` counts reused prompt tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Completion(NamedTuple):
    """One sequence of a request's result. Log-probabilities are by token, position after position.

    `prompt_logprobs` are empty unless asked for."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...]
    prompt_logprobs: tuple[dict[int, float], ...]
    cached: int


class Load(NamedTuple):
    """Requests that were served concurrently."""

    seconds: float
    asked: list[Asked]


class EngineError(Exception):
    """An error that an engine raised, as text."""


class Prompts:
    """Prompts of random tokens; no two share a chunk."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        prompt: list[int] = self._random.integers(300, 8000, tokens).tolist()
        return prompt


def whole_chunks(tokens: int) -> int:
    """The chunks of a prompt that can be reused: its last token is always computed."""
    return (tokens - 1) // CHUNK


def own_model() -> Path:
    """Make the benchmarks' model and return its folder."""
    return make_model(_MODEL)


def engine_environment() -> dict[str, str]:
    """Additions to the environment of engines."""
    # torch compiles for 20 s at the first request: keep the result.
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    return {**forking.ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": kept}


class Kind(NamedTuple):
    """How an engine differs from others: vLLM's arguments and our options. An engine without a
    transport does not share."""

    transport: str | None = "auto"
    arguments: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    asynchronous: bool = False
    """On the CPU platform: schedule ahead of a worker that computes in a process of its own."""
    environment: Mapping[str, str] = {}


ALWAYS_FETCH = {"min_fetch_tokens": CHUNK}
"""Measure how long a fetch takes, not whether it pays."""


class Engine:
    """The handle of an engine's process; commands are the methods of `_Inside`."""

    def __init__(self, name: str, arguments: dict[str, Any], kind: Kind) -> None:
        self.name = name
        self._has_answered = False
        context = forking.context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, arguments, kind))
        self.process.start()
        atexit.register(self.close)  # at exit, multiprocessing would wait for it for ever
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def finish(self, timeout: float = _PATIENCE) -> Any:
        """The answer to `begin`. Raises EngineError."""
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
        time.sleep(REST)
        asked: Asked = self.do("ask", prompt, tokens)
        return asked

    def cpu_seconds(self) -> float:
        """CPU seconds of all of its processes."""
        own = psutil.Process(self.process.pid)
        return sum(_cpu_seconds(process) for process in (own, *own.children(recursive=True)))

    def close(self) -> None:
        """End all of its processes; idempotent. An engine that is still starting is killed."""
        atexit.unregister(self.close)
        patience = _STOP_TIMEOUT if self._has_answered else 0.0
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        with suppress(OSError):  # the process is dead
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
    """A tracker and named engines, all ready when the `with` block begins.

    An engine's name is its incarnation. If an engine in `may_fail` does not start, it is missing
    from `engines`, and the reason is in `failed`.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        *,
        model: Path | None = None,
        may_fail: Sequence[str] = (),
        step_tokens: int = STEP_TOKENS,
        host: str = "127.0.0.1",
    ) -> None:
        self._kinds = kinds
        self._host = host
        self.model = model
        self._may_fail = may_fail
        self._step_tokens = step_tokens
        self.engines: dict[str, Engine] = {}
        self.failed: dict[str, str] = {}
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        model = self.model or own_model()
        self._tracker = TrackerProcess(self._host)
        try:
            self.actor = self.run(self._tracker.actor())
            for name, kind in self._kinds.items():
                arguments = self._arguments(model, name, kind)
                self.engines[name] = Engine(name, arguments, kind)
            for name in self._kinds:
                self._wait_ready(name)
            self._wait(self._have_joined, "all replicas have joined")
            self._compare()
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
        with ThreadPoolExecutor() as threads:
            list(threads.map(Engine.close, self.engines.values()))
        self._loop.close()
        self._tracker.close()

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def run(self, call: Any) -> Any:
        """Make a call to the tracker, always on the same loop."""

        async def called() -> Any:
            return await call

        return self._loop.run(called())

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The current status of each replica, from the tracker."""
        namespaces = self.run(self.actor.status())["namespaces"].values()
        return {
            replica["incarnation"]: replica for known in namespaces for replica in known["replicas"]
        }

    def wait_published(self, name: str, chunks: int) -> None:
        """Wait until all mirrors have `chunks` that `name` has published since the last `flush`."""
        self._wait(
            lambda: self.replicas()[name]["holdings"] >= chunks,
            f"{name} has published {chunks} chunks",
        )
        time.sleep(SETTLE)

    def flush(self, names: Sequence[str] = ()) -> None:
        """Empty these pools, or all. vLLM's own prefix caches keep what they have."""
        names = names or [name for name in self.engines if self._kinds[name].transport is not None]

        def are_empty() -> bool:
            replicas = self.replicas()
            members = [Member(name, replicas[name]["address"]) for name in names]
            self.run(flush_all(members))  # again: recent chunks are still being stored
            return not any(self.replicas()[name]["holdings"] for name in names)

        time.sleep(SETTLE)
        self._wait(are_empty, "the pools are empty")
        time.sleep(SETTLE)

    def _have_joined(self) -> bool:
        replicas = self.replicas()
        names = [name for name in self.engines if self._kinds[name].transport is not None]
        return all(replicas.get(name, {}).get("stats", {}).get("transfer_pid") for name in names)

    def _compare(self) -> None:
        """Wait until each engine has computed both canaries, and trusts its like."""
        sharing = {
            name
            for name, replica in self.replicas().items()
            if replica["stats"]["not_sharing"] != NotSharing.NO_PREFIX_CACHING
        }

        def have_compared() -> bool:
            groups = self.run(self.actor.status())["namespaces"].values()
            return all(
                replica["stats"]["comparison"]["compared"] == len(group["replicas"]) - 1
                and replica["stats"]["comparison"]["canaries"] == _CANARIES
                for group in groups
                for replica in group["replicas"]
                if replica["incarnation"] in sharing
            )

        self._wait(have_compared, "all have compared their rows")

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
            "worker_extension_cls": "benchmarks.steps.StepTimes",
        }
        if kind.transport is not None:
            options = {"pool_bytes": POOL_BYTES, "chunk_tokens": CHUNK, **kind.options}
            config = XavierConfig(MODEL, self._tracker.address, transport=kind.transport, **options)
            arguments["kv_transfer_config"] = {**kv_transfer_config(config), "engine_id": name}
        return {**arguments, **kind.arguments}


# -- in the engine's process ------------------------------------------------------------------


class _Inside:
    """Runs in the engine's process; each public method is a command."""

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
        """Answer all prompts at once."""
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

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling: Mapping[str, Any],
        lora: Mapping[str, Any] | None = None,
        rank: int | None = None,
    ) -> list[Completion]:
        """Answer a prompt of any kind that vLLM takes, with arrays for its tensors.

        `lora` are a LoRARequest's fields; `rank` is the one to ask of several data-parallel ones.
        """
        import torch
        from vllm.lora.request import LoRARequest

        given = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in prompt.items()
        }
        self._asked += 1
        outputs = self._engine.generate(
            given,
            _sampling(**sampling),
            f"request-{self._asked}",
            lora_request=None if lora is None else LoRARequest(**lora),
            data_parallel_rank=rank,
        )
        parts: dict[int, list[Any]] = {}
        prompt_logprobs: tuple[dict[int, float], ...] = ()
        async for output in outputs:
            prompt_logprobs = _by_token(output.prompt_logprobs) or prompt_logprobs
            for part in output.outputs:
                parts.setdefault(part.index, []).append(part)
        return [
            Completion(
                tuple(token for part in parts[index] for token in part.token_ids),
                "".join(part.text for part in parts[index]),
                tuple(each for part in parts[index] for each in _by_token(part.logprobs)),
                prompt_logprobs,
                output.num_cached_tokens or 0,
            )
            for index in sorted(parts)
        ]

    async def counted(self, metric: str) -> int:
        """The value of one of vLLM's own counters."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        found = (each for each in get_metrics_snapshot() if isinstance(each, Counter))
        return sum(each.value for each in found if each.name == metric)

    async def serve(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], at_once: int
    ) -> Load:
        """Serve `at_once` requests at a time, each with its number of output tokens; when one ends,
        the next begins."""
        left = iter(zip(prompts, tokens, strict=True))
        asked: list[Asked] = []

        async def one_after_the_other() -> None:
            for prompt, count in left:
                asked.append(await self.ask(prompt, count))

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return Load(time.perf_counter() - began, asked)

    async def forget(self) -> None:
        """Reset vLLM's own prefix cache, but not the pool."""
        end = time.monotonic() + _PATIENCE
        while not await self._engine.engine_core.call_utility_async(forking.FORGET):
            if time.monotonic() > end:
                raise TimeoutError("blocks stay in use")
            await asyncio.sleep(_INTERVAL)

    async def connect(self, state: str) -> None:
        """Take the connector out or put it back: see `Connector`."""
        await self._engine.collective_rpc("benchmark_connector", args=(state,))

    async def steps(self) -> list[Step]:
        """The steps since the last call."""
        (found,) = await self._engine.collective_rpc("benchmark_steps")
        return [Step(*step) for step in found]


def _greedy(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


def _sampling(*, structured: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """vLLM's parameters; all parts of an answer come one after the other."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return SamplingParams(
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=None if structured is None else StructuredOutputsParams(**structured),
        **fields,
    )


def _by_token(logprobs: Any) -> tuple[dict[int, float], ...]:
    return tuple(
        {token: each.logprob for token, each in (position or {}).items()}
        for position in logprobs or ()
    )


def _run(pipe: Connection, arguments: dict[str, Any], kind: Kind) -> None:
    os.environ.update(engine_environment(), **kind.environment)
    forking.fork_engine_core()
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
            except EOFError:  # the parent has ended
                order = None
            if order is None:
                break
            method, given = order
            error, answer = None, None
            try:
                answer = await getattr(inside, method)(*given)
            except Exception as raised:  # for the caller
                error = repr(raised)
            pipe.send((error, answer))
        engine.shutdown()

    try:
        asyncio.run(serve())
    except Exception as error:
        with suppress(OSError):
            pipe.send((repr(error), None))
    os._exit(0)
