"""Samples of what engines have computed, by which they notice that they compute differently.

Two engines with equal namespaces compute the same text, a canary, and sample each layer at the same
places. So a sketch reveals another layout of equal size as well as other weights, while processors
and batches round differently within `TOLERANCES`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from xinference_xavier.runtime.validate import check_json_size, first_reason

Sketch = Mapping[str, tuple[str, Sequence[float]]]
"""The type of the numbers and samples of them, by layer."""
Canaries = Mapping[str, Sketch]
"""By the names of the texts, which are the same in all engines."""

BYTES = "bytes"
"""The type of numbers that take a byte or less, or share bytes with their scales."""
TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.1, BYTES: 0.5}
"""How far samples may be apart, relative to their size: far above what rounding does to deep
layers, far below what another layout does, which is more than 1. Of bytes, the share that may be
unlike: rounding by 3 % changes a fifth of them, whatever vLLM packs into them, and other weights
change nine tenths."""
_ALIKE = 2
"""The most that bytes differ by if they stand for almost the same number."""
MAX_CANARIES_BYTES = 64 << 20
"""As JSON. Two canaries of 61 layers on 8 workers take 2 MB."""
_CANARIES = TypeAdapter(
    dict[
        str, dict[str, tuple[Literal["float32", "bfloat16", "float16", "bytes"], list[FiniteFloat]]]
    ]
)


class Difference(NamedTuple):
    layer: str
    amount: float  # as in TOLERANCES; infinite if the layers cannot be compared

    def __str__(self) -> str:
        apart = "in type or size" if math.isinf(self.amount) else f"by {self.amount:.0%}"
        return f"{self.layer} {apart}"


def difference(own: Sketch, other: Sketch) -> Difference | None:
    """The first layer that differs by more than its tolerance, among those of which both have
    samples: one may lack a KV-cache group."""
    for layer, (dtype, samples) in own.items():
        if layer not in other:
            continue
        other_dtype, other_samples = other[layer]
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
    return check_json_size("canaries", canaries, MAX_CANARIES_BYTES)


def unpack_canaries(packed: bytes) -> Canaries:
    """Raises ValueError."""
    if len(packed) > MAX_CANARIES_BYTES:
        raise ValueError(f"canaries have {len(packed)} bytes, more than {MAX_CANARIES_BYTES}")
    try:
        return _CANARIES.validate_json(packed, strict=True)
    except ValidationError as error:
        raise ValueError(f"malformed canaries: {first_reason(error)}") from None
