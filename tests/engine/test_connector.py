"""What our connector adds to vLLM's."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from tests.engine.any_version import made
from tests.engine.caches import cell_bytes, kv_caches
from tests.engine.vllm_scheduler import Engine
from xinference_xavier.config import XavierConfig
from xinference_xavier.engine.connector import (
    OnlyLoads,
    XavierConnector,
    prefill_of,
)
from xinference_xavier.engine.worker.cpu import HostWorker
from xinference_xavier.errors import ConfigError
from xinference_xavier.kv_transfer_config import kv_transfer_config
from xinference_xavier.pool.region import Region

BLOCK_TOKENS = 32
NOBODY = "127.0.0.1:1"


def engine_config(folder: Path, chunk_tokens: int | None = None) -> VllmConfig:
    xavier = XavierConfig("model", NOBODY, pool_bytes=1 << 26, chunk_tokens=chunk_tokens)
    return EngineArgs(
        model=str(folder),
        dtype="float32",
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(xavier)),
    ).create_engine_config()


@pytest.fixture
def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=64, dtype=torch.float32
    )
    layers = ["layer.0", "layer.1"]
    tensor = made(
        KVCacheTensor,
        size=16 * 2 * spec.page_size_bytes,
        **dict.fromkeys(("layers", "shared_by"), layers),
        **dict.fromkeys(("layer_stride", "block_stride"), spec.page_size_bytes),
    )
    groups = [KVCacheGroupSpec(layers, spec)]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def worker(config: VllmConfig, cache_config: KVCacheConfig) -> XavierConnector:
    return XavierConnector(config, KVConnectorRole.WORKER, cache_config)


@pytest.mark.parametrize(("chunk_tokens", "blocks"), [(None, 4), (256, 8)])
def test_vllm_and_the_spec_get_the_chunk_size(
    model_folder: Path, cache_config: KVCacheConfig, chunk_tokens: int | None, blocks: int
) -> None:
    """vLLM 0.33 and later also derive sliding windows from it, before there is a spec."""
    config = engine_config(model_folder, chunk_tokens)
    for _ in range(2):  # one process may make a worker's connector and a scheduler's
        connector = worker(config, cache_config)
        assert connector.connector_worker is not None
        assert connector.connector_worker.spec.blocks_per_chunk == blocks
        assert connector.connector_worker.spec.config.cache.blocks_per_chunk == blocks


def test_a_chunk_size_that_does_not_fit_the_model_is_refused(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    with pytest.raises(ConfigError, match=r"xavier_chunk_tokens=100 .* use 128"):
        worker(engine_config(model_folder, chunk_tokens=100), cache_config)


def test_one_replica_over_several_hosts_is_refused(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    config = engine_config(model_folder)
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match=r"nnodes=2 .* use one host per replica"):
        worker(config, cache_config)


def test_keys_that_no_other_process_computes_are_refused(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = engine_config(model_folder)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ConfigError, match=r"'xxhash' has a random seed .* use sha256, or set"):
        worker(config, cache_config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    worker(config, cache_config)


def test_scales_of_its_own_are_refused(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(model_folder)
    # vLLM from 0.28 on has no such setting any more.
    monkeypatch.setattr(config.cache_config, "calculate_kv_scales", True, raising=False)
    with pytest.raises(ConfigError, match=r"calculate_kv_scales=True gives each replica its own"):
        worker(config, cache_config)


def test_a_chunk_is_not_longer_than_the_sliding_window(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    (group,) = cache_config.kv_cache_groups
    full = group.kv_cache_spec
    assert isinstance(full, FullAttentionSpec)
    group.kv_cache_spec = SlidingWindowSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        sliding_window=100,
    )
    connector = worker(engine_config(model_folder), cache_config)
    assert connector.connector_worker is not None
    assert connector.connector_worker.spec.blocks_per_chunk == 3


if "hisparse_host_num_blocks" in {field.name for field in fields(KVCacheConfig)}:  # since 0.30

    def test_a_cache_that_loads_in_a_later_step_is_refused(
        model_folder: Path, cache_config: KVCacheConfig
    ) -> None:
        config = engine_config(model_folder)
        with pytest.raises(ConfigError, match="hisparse_config"):
            worker(config, replace(cache_config, hisparse_host_num_blocks=4))


def test_prompt_tokens_of_a_step_and_their_mean_depth() -> None:
    step = SchedulerOutput.make_empty()
    assert prefill_of(step) == (0, 0.0)
    step.scheduled_new_reqs = [
        NewRequestData(
            "new", [], [], None, None, block_ids=(), num_computed_tokens=1000, lora_request=None
        )
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        ["old", "answered"],
        set(),
        [],
        {},
        [None, None],
        num_computed_tokens=[4000, 9000],
        num_output_tokens=[0, 7],
    )
    step.num_scheduled_tokens = {"new": 100, "old": 300, "answered": 1}
    step.total_num_scheduled_tokens = 401
    assert prefill_of(step) == (400, (100 * 1050 + 300 * 4150) / 400)


def test_a_step_that_only_decodes_has_no_prompt_tokens() -> None:
    """Even with many requests that speculate. Otherwise it would distort the prefill rate."""
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens = {f"request-{number}": 1 + 5 for number in range(300)}
    step.total_num_scheduled_tokens = 1800
    assert prefill_of(step) == (0, 0.0)


def test_a_worker_waits_in_steps_that_have_nothing_but_loads(
    model_folder: Path, cache_config: KVCacheConfig
) -> None:
    waited: list[float] = []

    class Watched(HostWorker):
        def await_finished(self, seconds: float) -> bool:
            waited.append(seconds)
            return True

    connector = worker(engine_config(model_folder), cache_config)
    assert connector.connector_worker is not None
    caches = kv_caches([[64]])
    region = Region.create(1, cell_bytes(caches, 1))
    connector.connector_worker.worker = Watched(caches, region, 1, 0)
    for metadata in (OffloadingConnectorMetadata({}, {}), OnlyLoads({}, {})):
        connector.bind_connector_metadata(metadata)
        assert connector.get_finished(set()) == (set(), set())
    assert len(waited) == 1
    connector.shutdown()
    region.close()


def test_a_load_makes_a_step_that_has_nothing_else(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(engine_config(model_folder), cache_config, monkeypatch)
    prompt = list(range(300, 300 + 130))
    engine.ask("first", prompt, tokens=2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.ask("again", prompt, tokens=2)
    assert isinstance(engine.step().kv_connector_metadata, OnlyLoads)
    assert not isinstance(engine.step().kv_connector_metadata, OnlyLoads)
