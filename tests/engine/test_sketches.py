"""Samples reveal a different layout, type or weights, even if pages are equally large."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from tests.engine.scheduling import chunks
from xinference_xavier.engine.sketches import SAMPLES, Sketcher, describe_pages
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Region
from xinference_xavier.replica.canary import Sketch, difference

BLOCKS, BLOCKS_PER_CHUNK, CELLS = 8, 2, 2
SHAPE = (BLOCKS, 2, 16, 2, 8)
"""Blocks, K and V, tokens, heads, numbers."""
LAYERS = ["layer.0", "layer.1"]
(KEY,) = chunks("prompt", 1)


def caches(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {layer: torch.randn(SHAPE, generator=random).to(dtype) for layer in LAYERS}


def canonical(layers: dict[str, torch.Tensor]) -> CanonicalKVCaches:
    tensors = [
        CanonicalKVCacheTensor(data, data.shape[1])
        for tensor in layers.values()
        for data in (tensor.view(torch.int8).reshape(BLOCKS, -1),)
    ]
    refs = [[CanonicalKVCacheRef(n, data.page_size_bytes) for n, data in enumerate(tensors)]]
    return CanonicalKVCaches(tensors, refs)


class Scene:
    """A pool with one row, the chunk of the caches' first two blocks in both workers' cells."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        cache_dtype: str = "auto",
    ) -> None:
        layers = {layer: change(tensor).contiguous() for layer, tensor in caches(dtype).items()}
        pages = canonical(layers)
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=dtype)
        groups = {0: KVCacheGroupSpec(LAYERS, spec)}
        described = describe_pages(groups, layers, pages, BLOCKS_PER_CHUNK, cache_dtype)
        cell = b"".join(
            tensor.tensor[:BLOCKS_PER_CHUNK].numpy().tobytes() for tensor in pages.tensors
        )
        self.pool = Pool(2)
        self.region = Region.create(2, -(-len(cell) * CELLS // 4096) * 4096)
        (self.row,) = self.pool.reserve([KEY]).rows
        data = np.frombuffer(cell * CELLS, np.uint8)
        self.region.row(self.row.slot)[: len(data)] = data
        self.pool.commit(self.row, checksum=1)
        self.sketcher = Sketcher(
            self.region,
            self.pool,
            described,
            cells=CELLS,
            cell_bytes=len(cell),
            blocks_per_chunk=BLOCKS_PER_CHUNK,
        )

    @property
    def sketch(self) -> Sketch:
        found = self.sketcher.sketch(KEY)
        assert found is not None
        return found


def test_each_layer_of_each_worker_is_sampled() -> None:
    sketch = Scene().sketch
    assert [*sketch] == [f"{layer}, worker {worker}" for worker in (0, 1) for layer in LAYERS]
    assert {(dtype, len(samples)) for dtype, samples in sketch.values()} == {("bfloat16", SAMPLES)}


def test_samples_are_the_numbers_of_the_cache() -> None:
    numbers = set(caches(torch.bfloat16)["layer.0"][:BLOCKS_PER_CHUNK].float().flatten().tolist())
    _, samples = Scene().sketch["layer.0, worker 1"]
    assert set(samples) <= numbers
    assert len(set(samples)) > SAMPLES // 2


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_rounding_passes(dtype: torch.dtype) -> None:
    rounded = Scene(dtype, lambda tensor: (tensor.float() * 1.002).to(dtype))
    assert difference(Scene(dtype).sketch, rounded.sketch) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.transpose(2, 3),
        lambda tensor: tensor.flip(1),
        lambda tensor: tensor * 1.5,
        lambda tensor: tensor.flip(0),
    ],
    ids=["tokens and heads", "K and V", "weights", "blocks"],
)
def test_a_change_of_the_bytes_is_seen(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = difference(Scene().sketch, Scene(change=change).sketch)
    assert found is not None
    assert found.layer == "layer.0, worker 0"


def test_fp8_may_be_kept_as_bytes() -> None:
    as_bytes = Scene(
        torch.float8_e5m2, lambda tensor: tensor.view(torch.uint8), cache_dtype="fp8_e5m2"
    )
    assert difference(Scene(torch.float8_e5m2).sketch, as_bytes.sketch) is None


def test_a_copy_is_not_sketched() -> None:
    scene = Scene()
    scene.row.origin = "peer"
    assert scene.sketcher.sketch(KEY) is None
    assert scene.pool.counts().pinned == 0


def test_a_chunk_that_is_not_held_has_no_sketch() -> None:
    scene = Scene()
    assert scene.sketcher.sketch(chunks("other", 1)[0]) is None


def test_nan_becomes_zero() -> None:
    """JSON has no NaN."""
    sketch = Scene(change=lambda tensor: torch.full_like(tensor, float("nan"))).sketch
    assert {number for _, samples in sketch.values() for number in samples} == {0.0}
