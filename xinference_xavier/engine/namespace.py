"""A digest of everything that two engines must have in common before they may exchange bytes.

A chunk key covers tokens, adapters, images and salts. The namespace covers the model and the layout
of its cache. The digest is computed over canonical JSON, so it is the same on every host.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_cache_interface import KVCacheConfig

from xinference_xavier.engine import compat
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION

_GROUP_INDEX_BYTES = 4  # that vLLM appends to a block hash to make an offload key
_SAMPLE_BYTES = 64
_MAX_READABLE = 60  # characters
_SAMPLES = 1024  # per file, divided among its tensors
_MIN_SAMPLES_PER_TENSOR = 4
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def key_bytes(vllm_config: VllmConfig) -> int:
    """Length of this engine's offload keys."""
    hash_block = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return len(hash_block(b"")) + _GROUP_INDEX_BYTES


def fingerprint_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
) -> dict[str, object]:
    """All that two engines must have in common, except `page_format`. Reads samples of the
    weights."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    capability = current_platform.get_device_capability()
    architecture = model.hf_config.to_dict()  # includes what was overridden at launch
    architecture.pop("_name_or_path", None)  # differs between hosts
    groups = [
        {"layers": group.layer_names, "spec": repr(group.kv_cache_spec)}
        for group in kv_cache_config.kv_cache_groups
    ]
    return {
        "protocol": PROTOCOL_VERSION,  # so that two versions of ours never meet
        "vllm": vllm.__version__,
        "device": current_platform.device_type,
        "capability": capability and capability.as_version_str(),  # vLLM chooses kernels by it
        "model_runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "architecture": architecture,
        "weights": weights_fingerprint(Path(model.model)),
        "revision": model.revision,
        # Long RoPE chooses its factors by the longest possible prompt.
        "length": model.max_model_len if "longrope" in str(architecture) else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "layout": compat.cache_layout(cache),
        "layout_environment": {
            name: value() for name, value in envs.environment_variables.items() if "LAYOUT" in name
        },
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": compat.hash_seed(cache.prefix_caching_hash_algo),
        "block_tokens": cache.block_size,
        "chunk_tokens": chunk_tokens,
        "groups": groups,
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.world_size,
        ],
        "speculation": repr(vllm_config.speculative_config),
    }


def digest(fingerprint_fields: Mapping[str, object]) -> str:
    """32 hex digits."""
    text = json.dumps(fingerprint_fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def readable(fingerprint_fields: Mapping[str, object]) -> dict[str, str]:
    """Each field as a short text that people can compare; equal for equal values."""
    return {
        name: text
        if len(text := str(value)) <= _MAX_READABLE
        else f"digest {digest({name: value})[:12]}"
        for name, value in fingerprint_fields.items()
    }


def weights_fingerprint(path: Path) -> str:
    """32 hex digits over the sizes and samples of every tensor at `path`, a folder or one file.

    Two fine-tunes of one model differ. Reads a few hundred bytes per tensor, so it is fast for any
    size. Without weights there (the name of a model on a hub), it covers the name.
    """
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    files = [file for file in found if file.suffix in _WEIGHT_SUFFIXES]
    fingerprint = hashlib.sha256(b"" if files else str(path).encode())
    for file in files:
        fingerprint.update(f"{file.name}:{file.stat().st_size};".encode())
        # Without a buffer and read-ahead. On a network file system each of thousands of samples
        # would read a whole block of it, 1 MiB or more.
        with file.open("rb", buffering=0) as weights:
            os.posix_fadvise(weights.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
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


def _safetensors_header(weights: FileIO) -> tuple[bytes, list[tuple[int, int]]]:
    """The header's bytes, and the (start, end) of each tensor's bytes in the file."""
    length = int.from_bytes(weights.read(8), "little")
    header = weights.read(length)
    tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    offsets = (entry["data_offsets"] for entry in tensors)
    return header, [(8 + length + start, 8 + length + end) for start, end in offsets]


def _sample_offsets(start: int, end: int, samples: int) -> range:
    samples = max(_MIN_SAMPLES_PER_TENSOR, samples)
    step = max(1, (end - start - _SAMPLE_BYTES) // (samples - 1))
    return range(start, max(start + 1, end - _SAMPLE_BYTES + 1), step)
