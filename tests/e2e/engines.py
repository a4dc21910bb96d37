"""Engines that are always short of room."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.e2e.gates import FOLDER
from tests.harness.engines import CHUNK, Kind

CHUNKS = 5
"""Whole chunks of a prompt, unless a test says otherwise; with its tail it takes 6 blocks."""
KV_BLOCKS = 20
"""Blocks of an engine's own KV cache: three prompts, as vLLM keeps one block for itself."""
POOL_ROWS = 25
"""Rows of an engine's pool: four prompts, and what engines store to compare themselves."""
CONTEXT = 2048
FETCH_TIMEOUT = 10.0
"""Seconds; longer than a test keeps a gate closed."""
ROW_BYTES = 2 << 20
"""Bytes of a chunk: 8 layers, keys and values, 4 heads of 64 float32 numbers."""


def prompt(seed: int, *, chunks: int = CHUNKS, tail: int = 40) -> list[int]:
    """A prompt of whole chunks and a tail. With one seed, the chunks of a prompt begin those of
    every longer one."""
    random = np.random.default_rng(seed)
    tokens: list[int] = random.integers(300, 8000, chunks * CHUNK).tolist()
    return [*tokens, *np.random.default_rng(seed + 1).integers(300, 8000, tail).tolist()]


def fine_tune(folder: Path, to: Path) -> Path:
    """A model of the same shape with other weights in each layer."""
    shutil.copytree(folder, to)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "v_proj.weight" in name or "k_proj.weight" in name:
            weights[name] = np.ascontiguousarray(tensor[::-1])
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def gated(gates: Path, *, asynchronous: bool) -> Kind:
    """An engine that is short of room. Its copies and sends wait at the gates in the folder `gates`
    while they are closed."""
    gates.mkdir()
    options = {
        "pool_bytes": POOL_ROWS * ROW_BYTES,
        "fetch_timeout": FETCH_TIMEOUT,
        "min_fetch_tokens": 256,
    }
    return Kind(
        transport="tests.e2e.gates:GatedGloo",
        arguments=_short_of_room(asynchronous),
        options=options,
        asynchronous=asynchronous,
        environment={FOLDER: str(gates)},
        extra={"spec_name": "GatedSpec", "spec_module_path": "tests.e2e.gated_copies"},
    )


def alone() -> Kind:
    """An engine that is short of room and shares nothing."""
    return Kind(transport=None, arguments=_short_of_room(False) | {"enable_prefix_caching": False})


def _short_of_room(asynchronous: bool) -> dict[str, Any]:
    import torch

    arguments: dict[str, Any] = {
        "max_model_len": CONTEXT,
        "num_gpu_blocks_override": KV_BLOCKS,
        "kv_cache_memory_bytes": KV_BLOCKS * ROW_BYTES,
        "max_num_batched_tokens": CONTEXT,
    }
    if torch.cuda.is_available():  # three engines share a card
        arguments |= {"gpu_memory_utilization": 0.2, "async_scheduling": asynchronous}
    return arguments
