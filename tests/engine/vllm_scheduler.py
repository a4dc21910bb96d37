"""vLLM's own scheduler with our connector, above a manager without a replica and below no model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tests.engine.any_version import called
from tests.engine.scheduling import CHUNK, ROW_BYTES, Scheduling, without_requests
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec

BLOCK_TOKENS = 32
NOBODY = "127.0.0.1:1"
Hasher = Callable[[Request], list[BlockHash]]
"""Gives a request the hashes of its blocks."""


def engine_config(
    folder: Path,
    chunk_tokens: int | None = None,
    extra: Mapping[str, Any] = {},
    **arguments: Any,
) -> VllmConfig:
    """`arguments` are vLLM's, other than these or more; `extra` is for its connector."""
    xavier = XavierConfig("model", NOBODY, pool_bytes=1 << 26, chunk_tokens=chunk_tokens)
    transfer = kv_transfer_config(xavier)
    transfer["kv_connector_extra_config"] |= extra
    all_arguments = {
        "model": str(folder),
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "max_model_len": 2048,
        "skip_tokenizer_init": True,
        "kv_transfer_config": KVTransferConfig(**transfer),
        **arguments,
    }
    return EngineArgs(**all_arguments).create_engine_config()


def slide_one_layer(caches: KVCacheConfig, window: int) -> None:
    """The second of two layers attends to the last `window` tokens, and has a group of its own."""
    (group,) = caches.kv_cache_groups
    full = group.kv_cache_spec
    shape = ("block_size", "num_kv_heads", "head_size", "dtype")
    sliding = SlidingWindowSpec(
        **{name: getattr(full, name) for name in shape}, sliding_window=window
    )
    caches.kv_cache_groups = [
        KVCacheGroupSpec(group.layer_names[:1], full),
        KVCacheGroupSpec(group.layer_names[1:], sliding),
    ]


def hasher_of(config: VllmConfig, block_tokens: int) -> Hasher:
    """Made as an engine does when it starts."""
    digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(digest)
    return get_request_block_hasher(block_tokens, digest)


class Core(EngineCore):
    """vLLM's engine without workers: its clients' calls reach a mock."""

    scheduler: Scheduler

    def __init__(
        self, config: VllmConfig, caches: KVCacheConfig, kind: type[Scheduler] = Scheduler
    ) -> None:
        self.model_executor = Mock()
        config.cache_config.num_gpu_blocks = caches.num_blocks
        block, self.hash_tokens = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=Mock(**{"should_advance.return_value": False}),
            block_size=block,
            hash_block_size=self.hash_tokens,
        )


def request_of(
    req_id: str, prompt: Sequence[int], answer: int, hasher: Hasher, **more: Any
) -> Request:
    """`answer` is its number of tokens; `more` are vLLM's arguments."""
    return called(
        Request,
        request_id=req_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=hasher,
        **more,
    )


def starts_of(step: SchedulerOutput) -> dict[str, int]:
    """The number of tokens that each request of the step has computed before."""
    cached = step.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def output_of(
    sampled: Mapping[str, list[int]], of_connector: KVConnectorOutput
) -> ModelRunnerOutput:
    """The output of a step in which each request answered the tokens `sampled`."""
    return called(
        ModelRunnerOutput,
        req_ids=list(sampled),
        req_id_to_index={req_id: index for index, req_id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=of_connector,
    )


class Engine:
    """An engine that answers the same token always. Its workers end every job within a step."""

    def __init__(
        self, config: VllmConfig, caches: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.own: Scheduling

        def manager(spec: XavierSpec) -> XavierManager:
            facts, layout = spec.facts, spec.facts.layout(spec)
            self.own = Scheduling(
                slots=64,
                facts=SchedulerFacts.for_region(facts, layout, ROW_BYTES, shares=True),
                probes=partial(
                    without_requests,
                    chunk_tokens=layout.chunk_tokens,
                    max_tokens=facts.longest_probe,
                    vocabulary=config.model_config.get_vocab_size(),
                    audits=True,
                ),
                min_fetch_tokens=2 * CHUNK,
                adaptive=False,
            )
            return self.own.manager

        monkeypatch.setattr(XavierSpec, "get_manager", manager)
        self.core = Core(config, caches)
        self.scheduler = self.core.scheduler
        assert isinstance(self.scheduler.connector, XavierConnector)
        self.connector = self.scheduler.connector
        self.hasher = hasher_of(config, self.core.hash_tokens)
        self.stored_blocks: list[int] = []
        self._done: dict[int, int] = {}

    def ask(self, req_id: str, prompt: Sequence[int], tokens: int, **more: Any) -> None:
        self.scheduler.add_request(request_of(req_id, prompt, tokens, self.hasher, **more))

    def step(self) -> SchedulerOutput:
        scheduled = self.begin_step()
        self.end_step(scheduled)
        return scheduled

    def begin_step(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def end_step(self, scheduled: SchedulerOutput) -> None:
        metadata = scheduled.kv_connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        for job in metadata.store_jobs.values():
            assert isinstance(job.src_spec, BlockIDsLoadStoreSpec)
            self.stored_blocks += job.src_spec.block_ids.tolist()
        ended, self._done = self._done, dict.fromkeys(metadata.store_jobs, 1)
        self._done |= dict.fromkeys(metadata.load_jobs, 1)
        loaded = {job.req_id for job in metadata.load_jobs.values()}
        sampled = {req_id: self._sampled(req_id) for req_id in scheduled.num_scheduled_tokens}
        of_connector = KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=OffloadingWorkerMetadata(ended) if ended else None,
        )
        self.scheduler.update_from_output(scheduled, output_of(sampled, of_connector))

    def _sampled(self, req_id: str) -> list[int]:
        request = self.scheduler.requests[req_id]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, but not the pool."""
        assert KVCacheManager.reset_prefix_cache(self.scheduler.kv_cache_manager)

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()


MakeEngine = Callable[..., Engine]
"""Takes what `engine_config` takes after the folder."""
