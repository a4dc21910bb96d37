"""Engines that compute other rows than their namespace suggests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xinference_xavier.engine import identity
from xinference_xavier.engine.worker_side import HostWorker


def tune_between_samples(folder: Path, copy: Path) -> Path:
    """A copy of a model with other weights wherever `weights_fingerprint` does not look."""
    shutil.copytree(folder, copy)
    (weights,) = copy.glob("*.safetensors")
    with weights.open("r+b", buffering=0) as file:
        _, spans = identity._safetensors_header(file)
        for start, end in spans:
            file.seek(start)
            numbers = np.frombuffer(bytearray(file.read(end - start)), np.float32)
            changed = numbers * 1.7
            for offset in identity._sample_offsets(start, end, identity._SAMPLES // len(spans)):
                sampled = slice((offset - start) // 4, -(-(offset - start + 64) // 4))
                changed[sampled] = numbers[sampled]
            file.seek(start)
            file.write(changed.tobytes())
    return copy


_copy_blocks = HostWorker._copy_blocks


def _copy_reversed(self: HostWorker, is_store: bool, placements: Iterator[Any]) -> int:
    """Reverse pages in both directions, so that the engine itself notices nothing."""
    reversed_pages = (
        placement._replace(
            group=[
                page._replace(cache=page.cache[:, : page.size][:, ::-1]) for page in placement.group
            ]
        )
        for placement in placements
    )
    return _copy_blocks(self, is_store, reversed_pages)


REVERSED = "PLANTED_REVERSED"
"""An environment variable, since the configuration of the two must be equal."""


class PerhapsReversedPages:
    """A worker whose rows hold each page backwards if `REVERSED` is set, like a kernel with another
    layout of equal size."""

    def __new__(cls, *arguments: Any, **more: Any) -> Any:
        if REVERSED in os.environ:
            HostWorker._copy_blocks = _copy_reversed  # type: ignore[method-assign]
        return super().__new__(cls)
