"""Engines share only pages of equal formats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from xinference_xavier.engine import identity as module
from xinference_xavier.engine.identity import page_format, tensor_format

BLOCKS = 24
LAYERS = [["full.0", "full.1"], ["window.0"]]


def engine(dtype: torch.dtype) -> Any:
    """What is read of a configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_config(layers: list[list[str]], dtype: torch.dtype) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=dtype)
    groups = [KVCacheGroupSpec(names, spec) for names in layers]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def test_the_number_of_blocks_does_not_matter() -> None:
    formats = {
        tensor_format(torch.empty(blocks, 2, 128, 4, 64), blocks) for blocks in (BLOCKS, 1000, 64)
    }
    assert formats == {"torch.float32 (1 × blocks, 2, 128, 4, 64) in the order [0, 1, 2, 3, 4]"}


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(2 * BLOCKS, 2, 64, 4, 64),  # a kernel with smaller blocks than vLLM
        torch.empty(BLOCKS, 2, 4, 128, 64),
        torch.empty(BLOCKS, 2, 4, 128, 64).transpose(2, 3),  # the same shape in another order
        torch.empty(2, BLOCKS, 128, 4, 64),
        torch.empty(BLOCKS, 2, 128, 4, 64, dtype=torch.float16),
    ],
    ids=["kernel blocks", "shape", "order", "keys and values apart", "type"],
)
def test_other_formats_of_equal_size_differ(other: torch.Tensor) -> None:
    assert tensor_format(other, BLOCKS) != tensor_format(torch.empty(BLOCKS, 2, 128, 4, 64), BLOCKS)


@pytest.mark.parametrize(
    ("processor", "kernel"),
    [("AMX", "amx"), ("AVX-512", "vec"), ("ARM", "neon")],
)
def test_processors_lay_out_pages_of_equal_size_differently(
    monkeypatch: pytest.MonkeyPatch, processor: str, kernel: str
) -> None:
    """vLLM's kernels for AMX pack K and V, those for AVX keep K by column."""
    arm, x86 = CpuArchEnum.ARM, CpuArchEnum.X86
    architecture = arm if processor == "ARM" else x86
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    monkeypatch.setattr(current_platform, "get_cpu_architecture", lambda: architecture)
    monkeypatch.setattr(module, "get_current_attn_backends", lambda _config, _layers: [])
    config = cache_config([["layer"]], torch.bfloat16)
    layers = {"layer": torch.empty(BLOCKS, 2, 32, 64)}
    (group,) = page_format(engine(torch.bfloat16), config, layers)
    assert group["kernels"] == [kernel]


def test_each_group_has_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"full": "FLASH_ATTN", "window": "TRITON_ATTN"}

    def of_layers(_config: object, layers: list[str]) -> list[Any]:
        name = backends[layers[0].partition(".")[0]]
        return [SimpleNamespace(get_name=lambda: name)]

    monkeypatch.setattr(module, "get_current_attn_backends", of_layers)
    config = cache_config(LAYERS, torch.float32)
    caches: dict[str, Any] = {
        "full.0": torch.empty(BLOCKS, 2, 16, 8),
        "full.1": torch.empty(BLOCKS, 2, 16, 8),
        "window.0": [torch.empty(BLOCKS, 3), torch.empty(BLOCKS, 5)],  # a state in two tensors
    }
    formats = page_format(engine(torch.float32), config, caches)
    assert [group["backends"] for group in formats] == [["FLASH_ATTN"], ["TRITON_ATTN"]]
    assert [len(group["tensors"]) for group in formats] == [1, 2]
    del caches["full.1"], caches["window.0"]  # another pipeline stage has them
    assert [len(g["tensors"]) for g in page_format(engine(torch.float32), config, caches)] == [1, 0]
