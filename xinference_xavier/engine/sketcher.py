"""Samples of the rows of one chunk, by which two engines notice that they compute differently.

The samples are numbers at fixed places of the pages: see `protocol.sketches`. Each layer says what
its numbers are, and where: groups may have layers of several types, and a recurrent layer several
states. A type of one byte says little: it may be a number, two, or a part of one beside its scale.
So bytes are compared as such.

Each stage of a pipeline describes its layers (`describe_pages`). The first worker hands that over
with the region, and the scheduler's side samples rows (`Sketcher`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor

from xinference_xavier.engine.identity import tensors_of
from xinference_xavier.engine.worker_side import tensor_offsets
from xinference_xavier.pool.pool import Row
from xinference_xavier.pool.region import Memory
from xinference_xavier.protocol.sketches import BYTES, TOLERANCES, Sketch
from xinference_xavier.protocol.tracker import GROUP

SAMPLES = 32
"""Samples of each part and worker. Of bytes there are twice as many, because each says only whether
it is alike."""
_STEP = 2_654_435_761  # spreads the places over a page: a large prime


class _Part(NamedTuple):
    """Numbers of one type and layer, in bytes from the start of the worker's cell."""

    name: str
    dtype: str  # of torch, or BYTES
    offset: int
    size: int  # in one block
    stride: int  # between two blocks of the chunk
    only_last_block: bool  # a recurrent state


Described = dict[str, list[_Part]]
"""The parts of each group by its number, without groups that have no layers in this stage of the
pipeline. A part may be any sequence, as JSON has it."""


def describe_pages(
    groups: Mapping[int, KVCacheGroupSpec],
    layers: Mapping[str, torch.Tensor | list[torch.Tensor]],
    pages: CanonicalKVCaches,
    blocks_per_chunk: int,
) -> Described:
    """What a worker has in its cell. `layers` are its tensors."""
    offsets = tensor_offsets(pages, blocks_per_chunk)
    described = {}
    for (number, group), refs in zip(groups.items(), pages.group_data_refs, strict=True):
        if not group.layer_names:
            continue
        places = [(offsets[ref.tensor_idx], pages.tensors[ref.tensor_idx]) for ref in refs]
        described[str(number)] = [
            part
            for layer in group.layer_names
            for name, numbers in _numbers(layer, layers.get(layer), pages)
            for part in _located(name, numbers, places, isinstance(group.kv_cache_spec, MambaSpec))
        ]
    return described


def _numbers(
    layer: str, cache: torch.Tensor | list[torch.Tensor] | None, pages: CanonicalKVCaches
) -> Iterator[tuple[str, torch.Tensor]]:
    """A layer's tensors with the blocks first, by names: K and V may lie apart."""
    blocks = pages.tensors[0].tensor.shape[0]
    tensors = [
        each
        for tensor in tensors_of(cache)
        for each in ([tensor] if tensor.shape[0] % blocks == 0 else tensor.unbind())
    ]
    for number, tensor in enumerate(tensors):
        yield f"{layer}, part {number}" if len(tensors) > 1 else layer, tensor


def _located(
    name: str,
    numbers: torch.Tensor,
    places: Iterable[tuple[int, CanonicalKVCacheTensor]],
    is_state: bool,
) -> Iterator[_Part]:
    """The page that it is in may have other layers' numbers, too, or nobody's."""
    for offset, page in places:
        within = numbers.data_ptr() - page.tensor.data_ptr()
        if 0 <= within < page.page_size_bytes:
            size = numbers.nbytes // page.tensor.shape[0]
            stride, dtype = page.page_size_bytes, str(numbers.dtype).removeprefix("torch.")
            dtype = dtype if dtype in TOLERANCES else BYTES
            yield _Part(name, dtype, offset + within, size, stride, is_state)


class Sketcher:
    """`stages` are what `describe_pages` says of each stage of the pipeline. A row has the `cells`
    of all workers, stage by stage, of so many bytes each."""

    def __init__(
        self,
        rows: Memory,
        stages: Sequence[Described],
        cells: Sequence[int],
        blocks_per_chunk: int,
    ) -> None:
        self._rows = rows
        self._places: dict[bytes, list[tuple[str, _Part, torch.Tensor]]] = {}
        self.unlocated: set[int] = set()
        """The groups of which nothing says where they have numbers."""
        for cell, start in enumerate(accumulate(cells[:-1], initial=0)):
            suffix = f", worker {cell}" if len(cells) > 1 else ""
            for number, described in stages[cell * len(stages) // len(cells)].items():
                parts = [_Part(*values) for values in described]
                self._places.setdefault(int(number).to_bytes(4), []).extend(
                    (part.name + suffix, part, _places(part, start, blocks_per_chunk))
                    for part in parts
                )
                if not parts:
                    self.unlocated.add(int(number))
        self.layers = {name for places in self._places.values() for name, _, _ in places}
        """What a whole sketch has."""

    def sample(self, rows: Iterable[Row]) -> Sketch:
        """Samples by layer. `rows` must not change meanwhile."""
        return {
            name: (part.dtype, self._read(row.slot, part, places))
            for row in rows
            for name, part, places in self._places.get(row.key[GROUP], ())
        }

    def _read(self, slot: int, part: _Part, places: torch.Tensor) -> list[float]:
        found = torch.from_numpy(self._rows[slot])[places]
        numbers = found if part.dtype == BYTES else found.view(getattr(torch, part.dtype))
        samples: list[float] = numbers.flatten().float().tolist()
        return [number if math.isfinite(number) else 0.0 for number in samples]


def _places(part: _Part, cell: int, blocks_per_chunk: int) -> torch.Tensor:
    """The bytes in a row of each sample: shape (samples, bytes per number)."""
    width = 1 if part.dtype == BYTES else getattr(torch, part.dtype).itemsize
    samples = torch.arange(2 * SAMPLES if part.dtype == BYTES else SAMPLES)
    blocks = blocks_per_chunk - 1 if part.only_last_block else samples % blocks_per_chunk
    places = samples * _STEP % (part.size // width)
    starts: torch.Tensor = cell + part.offset + blocks * part.stride + places * width
    return starts[:, None] + torch.arange(width)
