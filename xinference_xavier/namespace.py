"""What must be the same before two replicas may exchange bytes, as one digest.

A chunk key covers tokens, adapters, images and salts, but neither the model nor how its cache is
laid out; those belong here. The digest is of canonical JSON, so that it is the same on every host.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

_SAMPLE_BYTES = 64
_MAX_READABLE = 60  # characters
_SAMPLES = 1024  # per file, shared out among its tensors
_MIN_SAMPLES_PER_TENSOR = 4
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def digest(ingredients: Mapping[str, object]) -> str:
    """32 hex digits over JSON-able `ingredients`."""
    text = json.dumps(ingredients, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def readable(ingredients: Mapping[str, object]) -> dict[str, str]:
    """Each ingredient as short text, equal for equal values, for people who compare them."""
    return {name: _readable(name, value) for name, value in ingredients.items()}


def _readable(name: str, value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_READABLE else f"digest {digest({name: value})[:12]}"


def weights_fingerprint(path: Path) -> str:
    """32 hex digits over the sizes and samples of every tensor at `path`, a folder or one file.

    Reads a few hundred bytes per tensor, so it is quick for any size. Two fine-tunes of one model
    differ in it. Where there are no weights (the name of a model on a hub), the name has to do.
    """
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in found if file.suffix in _WEIGHT_SUFFIXES]
    fingerprint = hashlib.sha256(b"" if files else str(path).encode())
    for file in files:
        fingerprint.update(f"{file.name}:{file.stat().st_size};".encode())
        with file.open("rb") as weights:
            if file.suffix == ".safetensors":
                header, spans = _safetensors_header(weights)
                fingerprint.update(header)
            else:
                spans = [(0, file.stat().st_size)]
            for start, end in spans:
                for offset in _sample_offsets(start, end, _SAMPLES // len(spans)):
                    weights.seek(offset)
                    fingerprint.update(weights.read(min(_SAMPLE_BYTES, end - offset)))
    return fingerprint.hexdigest()[:32]


def _safetensors_header(weights: BinaryIO) -> tuple[bytes, list[tuple[int, int]]]:
    """The header's bytes, and where each tensor's bytes begin and end in the file."""
    length = int.from_bytes(weights.read(8), "little")
    header = weights.read(length)
    tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    offsets = (entry["data_offsets"] for entry in tensors)
    return header, [(8 + length + start, 8 + length + end) for start, end in offsets]


def _sample_offsets(start: int, end: int, samples: int) -> range:
    samples = max(_MIN_SAMPLES_PER_TENSOR, samples)
    step = max(1, (end - start - _SAMPLE_BYTES) // (samples - 1))
    return range(start, max(start + 1, end - _SAMPLE_BYTES + 1), step)
