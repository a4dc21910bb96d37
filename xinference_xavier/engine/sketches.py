"""Samples of the rows of one chunk, by which two engines notice that they compute differently.

Two engines with equal namespaces compare a chunk that both have computed. The samples are numbers
at fixed places of the pages, so they reveal another layout of equal size as well as other weights.
Processors and batches round differently; `TOLERANCE` allows for that.

The first worker describes its pages in the region's note (`describe_pages`); the scheduler's side
samples rows (`Sketcher`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_offload.base import CanonicalKVCaches

from xinference_xavier.engine.identity import tensors_of
from xinference_xavier.engine.worker import tensor_offsets
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.canary import Sketch

SAMPLES = 32
"""Per layer and worker."""
_STEP = 2_654_435_761  # spreads the places over a page: a large prime
_FP8 = {"fp8_e5m2": torch.float8_e5m2}


class _Part(NamedTuple):
    """One layer's numbers of one type, in bytes from the start of the worker's cell."""

    name: str
    dtype: str  # of torch
    offset: int
    size: int  # in one block
    stride: int  # between two blocks of the chunk
    only_last_block: bool  # a recurrent state


def describe_pages(
    groups: Mapping[int, KVCacheGroupSpec],
    layers: Mapping[str, torch.Tensor | list[torch.Tensor]],
    pages: CanonicalKVCaches,
    blocks_per_chunk: int,
    cache_dtype: str,
) -> dict[str, list[_Part]]:
    """JSON-able: the parts of each group by its number. `layers` are this worker's tensors."""
    offsets = tensor_offsets(pages, blocks_per_chunk)
    described = {}
    for (number, group), refs in zip(groups.items(), pages.group_data_refs, strict=True):
        names = [name for name in group.layer_names if name in layers]
        dtypes = {tensor.dtype for name in names for tensor in tensors_of(layers[name])}
        if len(dtypes) != 1:  # states of several types in one page: nothing says where each begins
            continue
        dtype = dtypes.pop()
        if dtype is torch.uint8:
            dtype = _FP8.get(cache_dtype, torch.float8_e4m3fn)
        described[str(number)] = [
            _Part(
                names[place] if len(names) == len(refs) else f"part {place}",
                str(dtype).removeprefix("torch."),
                offsets[ref.tensor_idx],
                ref.page_size_bytes,
                pages.tensors[ref.tensor_idx].page_size_bytes,
                isinstance(group.kv_cache_spec, MambaSpec),
            )
            for place, ref in enumerate(refs)
        ]
    return described


class Sketcher:
    """`described` comes from `describe_pages`. A row has `cells` of `cell_bytes` each."""

    def __init__(
        self,
        region: Region,
        pool: Pool,
        described: Mapping[str, Sequence[Sequence[Any]]],
        *,
        cells: int,
        cell_bytes: int,
        blocks_per_chunk: int,
    ) -> None:
        self._rows = region.array
        self._pool = pool
        self._places = {
            int(number).to_bytes(4): [
                (f"{part.name}, worker {cell}" if cells > 1 else part.name, part, places)
                for cell in range(cells)
                for part in (_Part(*values) for values in parts)
                for places in (_places(part, cell * cell_bytes, blocks_per_chunk),)
            ]
            for number, parts in described.items()
        }

    def sketch(self, key: bytes) -> Sketch | None:
        """Samples of the chunk's rows in all groups, by layer. None unless this engine computed
        them and still has them."""
        rows = [
            row
            for number in self._places
            for row in self._pool.pin_shared([key[: GROUP.start] + number])
        ]
        try:
            return self.sample([row for row in rows if row.origin is None]) or None
        finally:
            self._pool.unpin(rows)

    def sample(self, rows: Iterable[Row]) -> Sketch:
        """`rows` must not change meanwhile."""
        return {
            name: (part.dtype, self._read(row.slot, part, places))
            for row in rows
            for name, part, places in self._places.get(row.key[GROUP], ())
        }

    def _read(self, slot: int, part: _Part, places: torch.Tensor) -> list[float]:
        numbers = torch.from_numpy(self._rows[slot])[places].view(getattr(torch, part.dtype))
        samples: list[float] = numbers.flatten().float().tolist()
        return [number if math.isfinite(number) else 0.0 for number in samples]


def _places(part: _Part, cell: int, blocks_per_chunk: int) -> torch.Tensor:
    """The bytes in a row of each sample: shape (SAMPLES, bytes per number)."""
    width = getattr(torch, part.dtype).itemsize
    samples = torch.arange(SAMPLES)
    blocks = blocks_per_chunk - 1 if part.only_last_block else samples % blocks_per_chunk
    places = samples * _STEP % (part.size // width)
    starts: torch.Tensor = cell + part.offset + blocks * part.stride + places * width
    return starts[:, None] + torch.arange(width)
