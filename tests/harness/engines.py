"""vLLM engines without xinference, each in a process that takes commands through a pipe.

An engine serves many requests at once: `Engine.begin` and `Engine.ask` return futures. Its
scheduler and worker share a process, unless it is asynchronous. Times are taken beside the engine,
from the call that gives it a request to its first output: without HTTP, tokenizer and our pipe.

Processes are forked from one that has imported vLLM. Each import takes 10 s of processor time, and
an engine has two processes: the one that calls it and EngineCore. vLLM forks EngineCore wherever it
may, but its CPU platform starts it anew.
"""

import asyncio
import atexit
import itertools
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from examples.make_model import CONTEXT, make_model
from examples.processes import COMPILED, until
from tests.harness.asynchronous import schedule_asynchronously
from tests.harness.remote import Remote, forked, obey_at_once
from tests.harness.replicas import MODEL, TrackerProcess
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
_MODEL = Path(__file__).parents[2] / "build" / "model"
_KV_BLOCKS = 320  # two of the longest prompts, and vLLM's own reserve
_BLOCK_BYTES = 2 << 20  # of the model in float32
_START_TIMEOUT = 480.0
_STOP_TIMEOUT = 20.0
ANSWER_PATIENCE = 300.0
"""Seconds for an answer of an engine with many requests."""
_INTERVAL = 0.02
_LEASE = 3600.0
_CANARIES = 2  # that each engine computes: a short one and a long one
SETTLE = GATHER + 0.1
"""Seconds until what was stored is in every index; more than is ever needed."""
REST = 0.3
"""Seconds of rest before a request. OpenMP's threads spin for 0.2 s after they have computed, and a
request within that time is faster than a later one. So all requests start from the same state."""


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # otherwise the platform uses a worker process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all engines use all cores
    "TORCHINDUCTOR_CACHE_DIR": COMPILED,
}
_FORGET = "forget_prefix_cache"
"""A call of an engine's EngineCore that empties vLLM's own prefix cache and leaves our pool alone,
as `reset_prefix_cache` does not. False if any block is in use."""


class Asked(NamedTuple):
    """The times of one request, in seconds since it was given to the engine, and its reused prompt
    tokens (`cached`)."""

    first: float
    times: tuple[float, ...]
    cached: int

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Completion(NamedTuple):
    """One sequence of a request's result; `cached` counts reused prompt tokens. Log-probabilities
    are by token, position after position, and empty unless asked for."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...]
    prompt_logprobs: tuple[dict[int, float], ...]
    cached: int
    reason: str
    """Why it ended, such as "length" or "abort"."""

    @property
    def chosen(self) -> list[float]:
        """The log-probabilities of its own tokens."""
        return [at[token] for at, token in zip(self.logprobs, self.tokens, strict=True)]


class Load(NamedTuple):
    """Requests that were served concurrently."""

    seconds: float
    asked: list[Asked]


class Prompts:
    """Prompts of random tokens; no two share a chunk."""

    def __init__(self, seed: int = 0, vocabulary: range = range(300, 8000)) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary

    def fresh(self, tokens: int) -> list[int]:
        first, end = self._vocabulary.start, self._vocabulary.stop
        prompt: list[int] = self._random.integers(first, end, tokens).tolist()
        return prompt


def whole_chunks(tokens: int) -> int:
    """The chunks of a prompt that can be reused: its last token is always computed."""
    return (tokens - 1) // CHUNK


def own_model() -> Path:
    """Make the benchmarks' model and return its folder."""
    return make_model(_MODEL)


class Kind(NamedTuple):
    """How an engine differs from others: vLLM's arguments and our options. An engine without a
    transport does not share."""

    transport: str | None = "auto"
    arguments: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    asynchronous: bool = False
    """On the CPU platform: schedule ahead of a worker that computes in a process of its own."""
    environment: Mapping[str, str] = {}
    extra: Mapping[str, str] = {}
    """What is added to the extra configuration of vLLM's connector."""


_PLAIN = Kind()
ALWAYS_FETCH = {"min_fetch_tokens": CHUNK}
"""Measure how long a fetch takes, not whether it pays."""


class Engine(Remote):
    """An engine in a process; its commands are the methods of `_Inside` and of vLLM's engine.

    `name` is its incarnation. Without a `config` it shares nothing.
    """

    def __init__(
        self, name: str, model: Path, kind: Kind = _PLAIN, config: XavierConfig | None = None
    ) -> None:
        super().__init__(
            _run,
            _arguments(name, model, kind, config),
            kind,
            name=name,
            context=forked(),
            daemon=False,  # it has processes of its own
            patience=ANSWER_PATIENCE,
        )
        atexit.register(self.close)  # at exit, multiprocessing would wait for it for ever

    def wait_until_ready(self, seconds: float | None = None) -> None:
        super().wait_until_ready(_START_TIMEOUT if seconds is None else seconds)

    def ask(
        self, prompt: Sequence[int], tokens: int = 8, name: str | None = None
    ) -> Future[Completion]:
        """Begin a request; a `name` makes it possible to abort it."""
        return self.begin("answer", list(prompt), tokens, name)

    def answer(self, prompt: Sequence[int], tokens: int = 8) -> Completion:
        answer: Completion = self.call("answer", list(prompt), tokens)
        return answer

    def timed(self, prompt: Sequence[int], tokens: int = 1) -> Asked:
        """Time a request that comes after a rest."""
        time.sleep(REST)
        asked: Asked = self.call("timed", prompt, tokens)
        return asked

    def close(self, seconds: float = _STOP_TIMEOUT) -> None:
        """End all of its processes; idempotent. An engine that is still starting is killed."""
        atexit.unregister(self.close)
        super().close(seconds if self._ready.done() else 0.0)


def _arguments(name: str, model: Path, kind: Kind, config: XavierConfig | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": DTYPE,
        "enforce_eager": True,
        "max_model_len": CONTEXT,
        "block_size": CHUNK,
        "num_gpu_blocks_override": _KV_BLOCKS,
        "kv_cache_memory_bytes": _KV_BLOCKS * _BLOCK_BYTES,
        "max_num_batched_tokens": STEP_TOKENS,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": "mp" if kind.asynchronous else "uni",
    }
    if config is not None:
        transfer = kv_transfer_config(config)
        extra = transfer["kv_connector_extra_config"] | dict(kind.extra)
        arguments["kv_transfer_config"] = transfer | {
            "engine_id": name,
            "kv_connector_extra_config": extra,
        }
    return {**arguments, **kind.arguments}


class Fleet:
    """A tracker and named engines, all ready when the `with` block begins.

    An engine's name is its incarnation.
    """

    def __init__(
        self,
        kinds: Mapping[str, Kind],
        *,
        model: Path | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._kinds = kinds
        self._host = host
        self.model = model
        self.engines: dict[str, Engine] = {}
        self._loop = asyncio.Runner()
        """The loop for all calls to actors."""

    def __enter__(self) -> Self:
        model = self.model or own_model()
        self.tracker = TrackerProcess(self._host, lease=_LEASE)
        try:
            for name, kind in self._kinds.items():
                self.engines[name] = Engine(name, model, kind, self._config(kind))
            for engine in self.engines.values():
                engine.wait_until_ready()
            self._wait(self._have_joined, "all replicas have joined")
            self._compare()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Engine.close, self.engines.values()))
        self._loop.close()
        self.tracker.close()

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def replicas(self) -> dict[str, dict[str, Any]]:
        """The current status of each replica, from the tracker."""
        return self.tracker.replicas()

    def stats(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.replicas()[name]["stats"]
        return found

    def wait_published(self, name: str, chunks: int) -> None:
        """Wait until all indexes have `chunks` that `name` has published since the last `flush`."""
        self._wait(
            lambda: self.replicas()[name]["holdings"] >= chunks,
            f"{name} has published {chunks} chunks",
        )
        time.sleep(SETTLE)

    def wait_mapped(self, names: Sequence[str]) -> None:
        """Wait until each of these engines loads what the others hold in place."""

        def are_mapped() -> bool:
            stats = [self.stats(name) for name in names]
            sizes = [each["pool"]["rows"] * each["pool"]["row_bytes"] for each in stats]
            return all(
                each["mapped_bytes"] >= sum(sizes) - size
                for each, size in zip(stats, sizes, strict=True)
            )

        self._wait(are_mapped, "the pools of neighbours are mapped")

    def flush(self, names: Sequence[str] = ()) -> None:
        """Empty these pools, or all. vLLM's own prefix caches keep what they have."""
        names = names or [name for name in self.engines if self._kinds[name].transport is not None]

        def are_empty() -> bool:
            replicas = self.replicas()
            members = [Member(name, replicas[name]["address"]) for name in names]
            self._loop.run(flush_all(members))  # again: recent chunks are still being stored
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
            groups = self.tracker.call("status")["namespaces"].values()
            return all(
                replica["stats"]["comparison"]["compared"] == len(group["replicas"]) - 1
                and replica["stats"]["comparison"]["canaries"] == _CANARIES
                for group in groups
                for replica in group["replicas"]
                if replica["incarnation"] in sharing
            )

        self._wait(have_compared, "all have compared their rows")

    def _wait(self, condition: Any, what: str) -> None:
        if not until(condition, ANSWER_PATIENCE, _INTERVAL):
            raise TimeoutError(f"not within {ANSWER_PATIENCE:.0f} s: {what}")

    def _config(self, kind: Kind) -> XavierConfig | None:
        if kind.transport is None:
            return None
        options = {"pool_bytes": POOL_BYTES, "chunk_tokens": CHUNK, **kind.options}
        return XavierConfig(MODEL, self.tracker.address, transport=kind.transport, **options)


# -- in the engine's process ------------------------------------------------------------------

_GREEDY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}


class _Inside:
    """Each public method is a command."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _name(self) -> str:
        return f"request-{next(self._numbers)}"

    async def timed(self, prompt: Sequence[int], tokens: int) -> Asked:
        from vllm import TokensPrompt

        sampling = _sampling(**_GREEDY, max_tokens=tokens)
        times: list[float] = []
        cached = 0
        given = TokensPrompt(prompt_token_ids=list(prompt))
        began = time.perf_counter()
        async for output in self._engine.generate(given, sampling, self._name()):
            times.append(time.perf_counter() - began)
            cached = output.num_cached_tokens or 0
        return Asked(times[0], tuple(times), cached)

    async def answer(
        self, prompt: Sequence[int], tokens: int, name: str | None = None, **sampling: Any
    ) -> Completion:
        given = {"prompt_token_ids": list(prompt)}
        how = {**_GREEDY, "max_tokens": tokens, **sampling}
        (found,) = await self.generate(given, how, name=name)
        return found

    async def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
        """Answer all prompts at once, with log-probabilities."""
        return await asyncio.gather(*(self.answer(each, tokens, logprobs=0) for each in prompts))

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling: Mapping[str, Any],
        lora: Mapping[str, Any] | None = None,
        rank: int | None = None,
        name: str | None = None,
    ) -> list[Completion]:
        """Answer a prompt of any kind that vLLM takes, with arrays for its tensors.

        `lora` are a LoRARequest's fields; `rank` is the one to ask of several data-parallel ones.
        """
        import torch
        from vllm.lora.request import LoRARequest

        given = {
            field: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for field, value in prompt.items()
        }
        outputs = self._engine.generate(
            given,
            _sampling(**sampling),
            name or self._name(),
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
                parts[index][-1].finish_reason or "",
            )
            for index in sorted(parts)
        ]

    async def serve(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], at_once: int
    ) -> Load:
        """Serve `at_once` requests at a time, each with its number of output tokens; when one ends,
        the next begins."""
        left = iter(zip(prompts, tokens, strict=True))
        asked: list[Asked] = []

        async def one_after_the_other() -> None:
            for prompt, answer in left:
                asked.append(await self.timed(prompt, answer))

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
        return Load(time.perf_counter() - began, asked)

    async def forget(self) -> None:
        """Empty vLLM's own prefix cache, but not the pool, once no block is in use."""
        end = time.monotonic() + ANSWER_PATIENCE
        while not await self._engine.engine_core.call_utility_async(_FORGET):
            if time.monotonic() > end:
                raise TimeoutError("blocks stay in use")
            await asyncio.sleep(_INTERVAL)

    async def load_weights(self, folder: str) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    async def unfinished(self) -> int:
        """The number of requests that have arrived and not ended."""
        unfinished: int = self._engine.output_processor.get_num_unfinished_requests()
        return unfinished

    async def counted(self, metric: str, label: str | None = None) -> Any:
        """The value of one of vLLM's own counters, or its values by a label."""
        from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

        found = [
            each
            for each in get_metrics_snapshot()
            if isinstance(each, Counter) and each.name == metric
        ]
        if label is None:
            return sum(each.value for each in found)
        return {each.labels[label]: each.value for each in found}


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
    os.environ.update(ENVIRONMENT, **kind.environment)
    _fork_engine_core()
    if kind.asynchronous:
        schedule_asynchronously()
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        if not current_platform.is_cuda():
            scheduling = engine.vllm_config.scheduler_config
            assert scheduling.async_scheduling is kind.asynchronous
        await obey_at_once(pipe, _Inside(engine))
        engine.shutdown()

    asyncio.run(serve())


def _fork_engine_core() -> None:
    """Affects engines that this process creates from now on; not their workers, since OpenMP does
    not survive a fork."""
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCore

    vars(utils)["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    setattr(EngineCore, _FORGET, _forget)


def _forget(core: Any) -> bool:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager.reset_prefix_cache(core.scheduler.kv_cache_manager)
