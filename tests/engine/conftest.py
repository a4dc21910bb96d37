"""Fixtures for tests of the manager and its parts, with vLLM's own scheduler and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from tests.engine.any_version import called
from tests.engine.scheduling import Scheduling
from tests.engine.vllm_scheduler import BLOCK_TOKENS, Engine, MakeEngine, engine_config


@pytest.fixture
def vllm() -> Scheduling:
    return Scheduling()


@pytest.fixture
def cache_config() -> KVCacheConfig:
    """The cache has sixteen blocks, and vLLM keeps one for itself."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=4, head_size=64, dtype=torch.float32
    )
    layers = ["layer.0", "layer.1"]
    tensor = called(
        KVCacheTensor,
        size=16 * 2 * spec.page_size_bytes,
        **dict.fromkeys(("layers", "shared_by"), layers),
        **dict.fromkeys(("layer_stride", "block_stride"), spec.page_size_bytes),
    )
    groups = [KVCacheGroupSpec(layers, spec)]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[tensor], kv_cache_groups=groups)


@pytest.fixture
def make_engine(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> MakeEngine:
    def make(**arguments: Any) -> Engine:
        return Engine(engine_config(model_folder, **arguments), cache_config, monkeypatch)

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()
