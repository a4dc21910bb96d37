"""Samples reveal a different layout, type or weights, even if pages are equally large, and take no
rounding for a difference, whatever a cache keeps its numbers in."""

from collections.abc import Callable, Mapping
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.config.cache import CacheDType
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from tests.engine.scheduling import chunks
from xinference_xavier.engine.sketcher import SAMPLES, Sketcher, describe_pages
from xinference_xavier.pool.pool import Row
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.sketches import Difference, Sketch, difference

BLOCKS, TOKENS, BLOCKS_PER_CHUNK, CELLS = 3, 16, 2, 2
SHAPE = (BLOCKS, 2, TOKENS, 2, 8)
"""Blocks, K and V, tokens, heads, numbers."""
LAYERS = ["layer.0", "layer.1"]
(KEY,) = chunks("prompt", 1)
Caches = Mapping[str, Tensor | list[Tensor]]

ATTENTION = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def caches(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {layer: torch.randn(SHAPE, generator=random).to(dtype) for layer in LAYERS}


def pages_of(tensor: Tensor) -> CanonicalKVCacheTensor:
    """A tensor of its own, the blocks first."""
    data = tensor.view(torch.int8).reshape(BLOCKS, -1)
    assert data.data_ptr() == tensor.data_ptr()
    return CanonicalKVCacheTensor(data, data.shape[1])


def one_by_one(layers: Caches) -> CanonicalKVCaches:
    tensors = [pages_of(tensor) for tensor in layers.values() if isinstance(tensor, Tensor)]
    refs = [CanonicalKVCacheRef(n, each.page_size_bytes) for n, each in enumerate(tensors)]
    return CanonicalKVCaches(tensors, [refs])


def sketch_of(layers: Caches, pages: CanonicalKVCaches, spec: KVCacheSpec = ATTENTION) -> Sketch:
    """The sketch of the chunk in the caches' first two blocks; both workers' cells are alike."""
    groups = {0: KVCacheGroupSpec([*layers], spec)}
    described = describe_pages(groups, layers, pages, BLOCKS_PER_CHUNK)
    cell = b"".join(each.tensor[:BLOCKS_PER_CHUNK].numpy().tobytes() for each in pages.tensors)
    region = Region.create(1, -(-len(cell) * CELLS // 4096) * 4096)
    region.row(0)[: len(cell) * CELLS] = np.frombuffer(cell * CELLS, np.uint8)
    sketcher = Sketcher(region.array, [described], [len(cell)] * CELLS, BLOCKS_PER_CHUNK)
    assert not sketcher.unlocated
    found = sketcher.sample([Row(KEY, 0)])
    assert found.keys() == sketcher.layers
    return found


def test_a_group_whose_layers_lie_elsewhere_is_named() -> None:
    """The other groups alone would not show that it is computed differently."""
    layers = caches()
    pages = one_by_one(layers)
    groups = {
        0: KVCacheGroupSpec([LAYERS[0]], ATTENTION),
        1: KVCacheGroupSpec([LAYERS[1]], ATTENTION),
        2: KVCacheGroupSpec([], ATTENTION),  # all of its layers are in other stages
    }
    first, second = pages.group_data_refs[0]
    pages = CanonicalKVCaches(pages.tensors, [[first], [second], []])
    layers[LAYERS[1]] = layers[LAYERS[1]].clone()
    described = describe_pages(groups, layers, pages, BLOCKS_PER_CHUNK)
    region = Region.create(1, 4096)
    assert Sketcher(region.array, [described], [4096], BLOCKS_PER_CHUNK).unlocated == {1}


def sketch(change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Sketch:
    layers = {layer: change(tensor).contiguous() for layer, tensor in caches().items()}
    return sketch_of(layers, one_by_one(layers))


def test_each_layer_of_each_worker_is_sampled() -> None:
    found = sketch()
    assert [*found] == [f"{layer}, worker {worker}" for worker in (0, 1) for layer in LAYERS]
    assert {(dtype, len(samples)) for dtype, samples in found.values()} == {("bfloat16", SAMPLES)}


def test_samples_are_the_numbers_of_the_cache() -> None:
    numbers = set(caches()["layer.0"][:BLOCKS_PER_CHUNK].float().flatten().tolist())
    _, samples = sketch()["layer.0, worker 1"]
    assert set(samples) <= numbers
    assert len(set(samples)) > SAMPLES // 2


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
def test_a_change_of_the_bytes_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    found = difference(sketch(), sketch(change))
    assert found is not None
    assert found.layer == "layer.0, worker 0"


def test_each_stage_of_a_pipeline_is_sampled() -> None:
    """Each has other layers, and cells of another size; both have two workers."""
    one, other = caches().values()
    layers = {"first": one, "last": other, "more": one}
    described, cells = [], list[bytes]()
    for names in (["first"], ["last", "more"]):
        stage = {name: layers[name] for name in names}
        pages = one_by_one(stage)
        groups = {0: KVCacheGroupSpec(names, ATTENTION)}
        described.append(describe_pages(groups, stage, pages, BLOCKS_PER_CHUNK))
        cells += 2 * [
            b"".join(each.tensor[:BLOCKS_PER_CHUNK].numpy().tobytes() for each in pages.tensors)
        ]
    row = b"".join(cells)
    region = Region.create(1, -(-len(row) // 4096) * 4096)
    region.row(0)[: len(row)] = np.frombuffer(row, np.uint8)
    sketcher = Sketcher(region.array, described, [*map(len, cells)], BLOCKS_PER_CHUNK)
    found = sketcher.sample([Row(KEY, 0)])
    workers = [("first", 0), ("first", 1), ("last", 2), ("more", 2), ("last", 3), ("more", 3)]
    assert [*found] == [f"{layer}, worker {worker}" for layer, worker in workers]
    for (layer, _), (_, samples) in zip(workers, found.values(), strict=True):
        assert set(samples) <= set(layers[layer][:BLOCKS_PER_CHUNK].float().flatten().tolist())


def test_nan_becomes_zero() -> None:
    """JSON has no NaN."""
    found = sketch(lambda tensor: torch.full_like(tensor, float("nan")))
    assert {number for _, samples in found.values() for number in samples} == {0.0}


# -- what a layer's bytes are ----------------------------------------------------------------------

_FP4 = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between its numbers


def floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda numbers: numbers.to(dtype).view(torch.uint8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits, one behind the other."""
    ones = (codes.long()[..., None] >> torch.arange(bits) & 1).flatten(1)
    return (ones.unflatten(1, (-1, 8)) << torch.arange(8)).sum(-1).to(torch.uint8)


def scaled(code: str, group: int, scale: str) -> Callable[[Tensor], Tensor]:
    """Groups of numbers that share a scale. The scales are behind the codes."""

    def encode(numbers: Tensor) -> Tensor:
        groups = numbers.unflatten(1, (-1, group))
        largest = {"fp8": 448.0, "int8": 127.0, "fp4": 6.0, "int4": 7.5, "int3": 3.5}[code]
        exact = groups.abs().amax(-1, keepdim=True) / largest
        if scale == "exponent":
            used = 2 ** exact.log2().ceil()
            scales = (used.log2() + 127).to(torch.uint8)
        else:
            kept = exact.to(getattr(torch, scale))
            used, scales = kept.float(), kept.view(torch.uint8)
        wanted = groups / used
        match code:
            case "fp8":
                codes = wanted.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            case "int8":
                codes = wanted.round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
            case "fp4":
                nearest = torch.bucketize(wanted.abs(), _FP4)
                codes = packed((nearest + 8 * (wanted < 0)).flatten(1), 4)
            case _:
                bits = int(code[-1])
                codes = packed((wanted + largest).round().clamp(0, 2**bits - 1).flatten(1), bits)
        return torch.cat([codes.flatten(1), scales.flatten(1)], 1)

    return encode


def beside(*encoders: tuple[int, Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    """Each takes so many of a token's numbers."""
    sizes, encodes = zip(*encoders, strict=True)
    return lambda numbers: torch.cat(
        [
            encode(part)
            for encode, part in zip(encodes, numbers.split([*sizes, WIDTH - sum(sizes)], 1))  # noqa: B905  # some are left
        ],
        1,
    )


WIDTH = 576
"""Numbers of a token in a layer."""
BF16, E4M3, E5M2 = floats(torch.bfloat16), floats(torch.float8_e4m3fn), floats(torch.float8_e5m2)
LATENT = (512, scaled("fp8", 128, "float32"))
FORMATS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "auto": (torch.float32, floats(torch.float32)),
    "float16": (torch.float16, floats(torch.float16)),
    "bfloat16": (torch.bfloat16, BF16),
    "fp8": (torch.uint8, E4M3),
    "fp8_e4m3": (torch.float8_e4m3fn, E4M3),
    "fp8_e5m2": (torch.uint8, E5M2),
    "fp8_inc": (torch.float8_e4m3fn, E4M3),
    "fp8_ds_mla": (torch.uint8, beside(LATENT, (64, BF16))),
    "nvfp4_ds_mla": (torch.uint8, beside((512, scaled("fp4", 16, "float8_e4m3fn")), (64, BF16))),
    "turboquant_k8v4": (torch.uint8, beside((288, E4M3), (288, scaled("int4", 288, "float16")))),
    "turboquant_4bit_nc": (torch.uint8, scaled("int4", 64, "float16")),
    "turboquant_k3v4_nc": (
        torch.uint8,
        beside((288, scaled("int3", 96, "float16")), (288, scaled("int4", 96, "float16"))),
    ),
    "turboquant_3bit_nc": (torch.uint8, scaled("int3", 64, "float16")),
    "ultraquant_4bit": (torch.uint8, scaled("fp4", 32, "exponent")),
    "int4_per_token_head": (torch.uint8, scaled("int4", 64, "float32")),
    "int8_per_token_head": (torch.int8, scaled("int8", 64, "float32")),
    "fp8_per_token_head": (torch.uint8, scaled("fp8", 64, "float32")),
    "nvfp4": (torch.uint8, scaled("fp4", 16, "float8_e4m3fn")),
    "nvfp4_4over6": (torch.uint8, scaled("fp4", 16, "float8_e4m3fn")),
}
"""The type of the tensors, and how vLLM writes a token's numbers, for each type of cache."""
INDEXER = (torch.uint8, beside((128, scaled("fp8", 128, "float32"))))
"""The indexer of sparse attention, which stands beside any type."""


def layers_of(
    *kinds: tuple[torch.dtype, Callable[[Tensor], Tensor]], weights: int = 0, noise: float = 0.0
) -> dict[str, Tensor]:
    """Layers of each kind, as an engine with these weights computes them with some `noise`."""
    random = torch.Generator().manual_seed(weights)
    rounding = torch.Generator().manual_seed(weights + 1000)
    layers = {}
    for number in range(LAYERS_OF_A_KIND * len(kinds)):
        dtype, encode = kinds[number % len(kinds)]
        exact = torch.randn(BLOCKS * TOKENS, WIDTH, generator=random)
        written = encode(exact * (1 + noise * torch.randn(exact.shape, generator=rounding)))
        layers[f"layer.{number}"] = written.contiguous().view(dtype).view(BLOCKS, TOKENS, -1)
    return layers


LAYERS_OF_A_KIND = 8
NOISES = [2**-9, 0.01, 0.03]
"""A step of bfloat16, what deep layers have of it, and more."""


# vLLM 0.33 has Octave's types for ROCm alone, where we were never tried.
CACHE_TYPES = [each for each in get_args(CacheDType) if not each.startswith("octave_")]


class TestCacheTypes:
    @pytest.mark.parametrize("cache_dtype", CACHE_TYPES)
    def test_rounding_is_no_difference_and_other_weights_are(self, cache_dtype: str) -> None:
        kind = FORMATS[cache_dtype]
        noises = [noise for noise in NOISES if kind[0] is not torch.float32]
        one = sketch_of(layers := layers_of(kind), one_by_one(layers))
        for noise in noises or [1e-3]:
            like = sketch_of(layers := layers_of(kind, noise=noise), one_by_one(layers))
            assert difference(one, like) is None
        unlike = sketch_of(layers := layers_of(kind, weights=1), one_by_one(layers))
        for layer in one:
            assert isinstance(difference({layer: one[layer]}, unlike), Difference)

    @pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_ds_mla"])
    def test_a_latent_and_its_indexer_are_two_layers_of_one_group(self, cache_dtype: str) -> None:
        """DeepSeek-V3.2 and GLM-5."""
        kinds = FORMATS[cache_dtype], INDEXER
        specs: dict[str, KVCacheSpec] = {
            name: MLAAttentionSpec(
                block_size=TOKENS, num_kv_heads=1, head_size=tensor.shape[-1], dtype=tensor.dtype
            )
            for name, tensor in layers_of(*kinds).items()
        }
        spec = UniformTypeKVCacheSpecs.from_specs(specs)
        assert spec is not None

        def made(**how: float) -> Sketch:
            layers = layers_of(*kinds, **how)  # type: ignore[arg-type]
            return sketch_of(layers, one_by_one(layers), spec)

        one = made()
        assert len(one) == 2 * LAYERS_OF_A_KIND * CELLS
        assert {dtype for dtype, _ in one.values()} == (
            {"bfloat16", "bytes"} if cache_dtype == "bfloat16" else {"bytes"}
        )
        assert difference(one, made(noise=0.01)) is None
        unlike = made(weights=1)
        assert all(difference({layer: one[layer]}, unlike) for layer in one)


class TestPlaces:
    def test_layers_that_share_a_block_are_sampled_within_their_own_pages(self) -> None:
        """Block-outermost caches: whatever else is in a block stays as it was."""

        def made(rest: float) -> Sketch:
            block = torch.full((BLOCKS, 4, TOKENS, 8), rest, dtype=torch.bfloat16)
            layers: dict[str, Tensor] = {}
            for number, layer in enumerate(LAYERS):
                layers[layer] = block[:, number + 1]
                layers[layer].copy_(caches()[layer][:, 0, :, 0])
            page = pages_of(block)
            ref = CanonicalKVCacheRef(0, page.page_size_bytes)
            return sketch_of(layers, CanonicalKVCaches([page], [[ref]]))

        assert made(rest=1.0) == made(rest=-1.0)
        assert len(made(rest=1.0)) == len(LAYERS) * CELLS

    def test_k_and_v_may_lie_apart(self) -> None:
        layers = {layer: tensor.movedim(1, 0).contiguous() for layer, tensor in caches().items()}
        halves = [pages_of(half) for tensor in layers.values() for half in tensor]
        refs = [CanonicalKVCacheRef(n, each.page_size_bytes) for n, each in enumerate(halves)]
        found = sketch_of(layers, CanonicalKVCaches(halves, [refs]))
        assert [*found][:2] == ["layer.0, part 0, worker 0", "layer.0, part 1, worker 0"]
        numbers = set(layers["layer.0"][1].float().flatten().tolist())
        assert set(found["layer.0, part 1, worker 0"][1]) <= numbers

    def test_the_states_of_a_recurrent_layer_have_types_of_their_own(self) -> None:
        """In the last block of the chunk."""
        raw = torch.full((BLOCKS, 400), -1, dtype=torch.int8)
        convolution = raw[:, :64].view(torch.bfloat16)
        state = raw[:, 64:320].view(torch.float32)
        convolution.copy_(torch.arange(BLOCKS)[:, None])
        state.copy_(100 + torch.arange(BLOCKS)[:, None])
        spec = MambaSpec(
            block_size=TOKENS, shapes=((32,), (64,)), dtypes=(torch.bfloat16, torch.float32)
        )
        pages = CanonicalKVCaches(
            [CanonicalKVCacheTensor(raw, 400)], [[CanonicalKVCacheRef(0, 320)]]
        )
        found = sketch_of({"layer.0": [convolution, state]}, pages, spec)
        assert found["layer.0, part 0, worker 1"] == ("bfloat16", [1.0] * SAMPLES)
        assert found["layer.0, part 1, worker 1"] == ("float32", [101.0] * SAMPLES)
