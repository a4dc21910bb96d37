"""Engines that compute otherwise than their namespace says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.threads import ThreadTimes
from xinference_xavier.engine import namespace
from xinference_xavier.engine.worker.cpu import HostWorker


def tune_between_samples(folder: Path, copy: Path) -> Path:
    """A model with other weights wherever `weights_fingerprint` does not look."""
    shutil.copytree(folder, copy)
    (weights,) = copy.glob("*.safetensors")
    with weights.open("r+b", buffering=0) as file:
        _, spans = namespace._safetensors_header(file)
        for start, end in spans:
            file.seek(start)
            numbers = np.frombuffer(bytearray(file.read(end - start)), np.float32)
            changed = numbers * 1.7
            for offset in namespace._sample_offsets(start, end, namespace._SAMPLES // len(spans)):
                sampled = slice((offset - start) // 4, -(-(offset - start + 64) // 4))
                changed[sampled] = numbers[sampled]
            file.seek(start)
            file.write(changed.tobytes())
    return copy


def _copied_backwards(self: HostWorker, is_store: bool, placements: Iterator[Any]) -> int:
    """Both ways, so that the engine itself notices nothing."""
    copied = 0
    for group, block, slot, place in placements:
        row = self._rows[slot]
        for page in group:
            start = page.offset + place * page.stride
            in_row = row[start : start + page.size]
            in_cache = page.cache[block, : page.size]
            if is_store:
                in_row[:] = in_cache[::-1]
            else:
                in_cache[:] = in_row[::-1]
            copied += page.size
    return copied


class ReversedPages(ThreadTimes):
    """A worker whose rows hold each page backwards, as those of a kernel with another
    layout of equal size might."""

    def __new__(cls, *arguments: Any, **more: Any) -> Any:
        HostWorker._copy_blocks = _copied_backwards  # type: ignore[method-assign]
        return super().__new__(cls)
