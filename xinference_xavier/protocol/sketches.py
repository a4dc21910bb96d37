"""Samples of what engines have computed, by which they notice that they compute differently.

Two engines with equal namespaces compute the same text, a canary, and sample each layer at the same
places. So a sketch reveals another layout of equal size as well as other weights, while processors
and batches round differently within `TOLERANCES`.
"""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from xinference_xavier.runtime.validate import first_reason

Sketch = Mapping[str, tuple[str, Sequence[float]]]
"""The type of the numbers and samples of them, by layer."""
Canaries = Mapping[str, Sketch]
"""Sketches by the names of the texts, which are the same in all engines."""

BYTES = "bytes"
"""The type of numbers that take a byte or less, or share bytes with their scales."""
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, BYTES: 0.5}
"""How far samples may be apart, relative to their size: far above what rounding does to deep
layers, far below what another layout does, which is more than 1. Of bytes, the share that may be
unlike: rounding by 3 % changes a fifth of them, whatever vLLM packs into them, and other weights
change nine tenths."""
_ALIKE = 2
"""The most that bytes differ by if they stand for almost the same number."""
MAX_CANARIES_BYTES = 4 << 20
"""Bytes when packed. Two canaries of 61 layers on 8 workers take 0.2 MB, twice that in 8 bits."""
_HEADER = TypeAdapter(
    dict[str, dict[str, tuple[Literal["float32", "bfloat16", "float16", "bytes"], NonNegativeInt]]]
)


class Difference(NamedTuple):
    layer: str
    amount: float  # as in TOLERANCES; infinite if there is nothing to compare

    def __str__(self) -> str:
        apart = (
            f"by {self.amount:.0%}" if math.isfinite(self.amount) else "in type, size or presence"
        )
        return f"{self.layer} {apart}"


_NONE: tuple[str, Sequence[float]] = ("", ())


def difference(own: Sketch, other: Sketch) -> Difference | None:
    """The first layer that differs by more than its tolerance, or that only one of them has."""
    for layer in {**own, **other}:
        dtype, samples = own.get(layer, _NONE)
        other_dtype, other_samples = other.get(layer, _NONE)
        if (dtype, len(samples)) != (other_dtype, len(other_samples)):
            return Difference(layer, math.inf)
        measure = _unlike if dtype == BYTES else _distance
        amount = measure(samples, other_samples)
        if amount > TOLERANCES[dtype]:
            return Difference(layer, amount)
    return None


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    size = max(math.hypot(*one), math.hypot(*other))
    return math.dist(one, other) / size if size else 0.0


def _unlike(one: Sequence[float], other: Sequence[float]) -> float:
    apart = (abs(a - b) for a, b in zip(one, other, strict=True))
    return sum(_ALIKE < each < 256 - _ALIKE for each in apart) / len(one)


def pack_canaries(canaries: Canaries) -> bytes:
    """A line of JSON with the layers, and their samples behind it: as JSON, these would hold up the
    tracker's loop for thirty times as long."""
    header = {
        name: {layer: (dtype, len(samples)) for layer, (dtype, samples) in sketch.items()}
        for name, sketch in canaries.items()
    }
    numbers = array("f")
    for sketch in canaries.values():
        for _, samples in sketch.values():
            numbers.extend(samples)
    return json.dumps(header).encode() + b"\n" + numbers.tobytes()


def unpack_canaries(packed: bytes) -> Canaries:
    """Raises ValueError."""
    if len(packed) > MAX_CANARIES_BYTES:
        raise ValueError(f"canaries have {len(packed)} bytes, more than {MAX_CANARIES_BYTES}")
    line, _, data = packed.partition(b"\n")
    try:
        header = _HEADER.validate_json(line, strict=True)
    except ValidationError as error:
        raise ValueError(f"malformed canaries: {first_reason(error)}") from None
    sizes = [size for layers in header.values() for _, size in layers.values()]
    if len(data) != 4 * sum(sizes):
        raise ValueError(f"malformed canaries: {len(data)} bytes of {sum(sizes)} samples")
    numbers = array("f", data)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("malformed canaries: a sample is not finite")
    left = iter(numbers)
    return {
        name: {layer: (dtype, [*islice(left, size)]) for layer, (dtype, size) in layers.items()}
        for name, layers in header.items()
    }
