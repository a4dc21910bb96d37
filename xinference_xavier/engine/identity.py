"""The namespace: a digest of everything that two engines must share before they may exchange bytes.

A chunk key covers tokens, adapters, images and salts. The namespace covers the model and the layout
of its cache. The digest is computed over canonical JSON, so it is the same on every host.

The layout includes how a worker's attention kernels arrange a page (`page_format`). Pages of equal
size can hold equal numbers in different orders: each backend has its own layout, the CPU backend
has one per instruction set, and a kernel may split a block into smaller ones. Only a worker with
its KV cache can tell.
"""

import dataclasses
import enum
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import vllm
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig
from vllm import envs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec

from xinference_xavier.engine import compat
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_GROUP_INDEX_BYTES = 4  # that vLLM appends to a block hash to make an offload key
_SAMPLE_BYTES = 64
_MAX_READABLE = 60  # characters
_SAMPLES = 1024  # per file, divided among its tensors
_MIN_SAMPLES_PER_TENSOR = 4
_NOT_SETTINGS = (
    ".",
    "__",
    "config.json",  # as vLLM has read it, it is part of its configuration
    "tokenizer",  # keys are of tokens, whatever text they stand for
    "tekken",
    "vocab",
    "added_tokens",
    "special_tokens_map",
    "chat_template",
)
_DRAFT, _NAMED = "draft_", "named"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def page_format(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]],
) -> list[dict[str, Any]]:
    """One JSON-able entry per KV-cache group. `kv_caches` are this worker's tensors by layer.

    The result does not depend on the number of blocks.
    """
    return [
        {
            "backends": _backends(vllm_config, group.layer_names),
            "kernels": _cpu_kernels(vllm_config, group.kv_cache_spec),
            "tensors": sorted(
                {
                    tensor_format(tensor, kv_cache_config.num_blocks)
                    for layer in group.layer_names
                    for tensor in tensors_of(kv_caches.get(layer))
                }
            ),
        }
        for group in kv_cache_config.kv_cache_groups
    ]


def tensor_format(tensor: torch.Tensor, blocks: int) -> str:
    """Type, shape and memory order of the dimensions, outermost first.

    The number of blocks is replaced by the number of kernel blocks per vLLM block.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: strides[axis], reverse=True)
    shape = [str(size) for size in tensor.shape]
    for axis in order:
        if tensor.shape[axis] >= blocks and tensor.shape[axis] % blocks == 0:
            shape[axis] = f"{tensor.shape[axis] // blocks} × blocks"
            break
    return f"{tensor.dtype} ({', '.join(shape)}) in the order {order}"


def _backends(vllm_config: VllmConfig, layers: list[str]) -> list[str]:
    return sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config, layers))


def _cpu_kernels(vllm_config: VllmConfig, spec: KVCacheSpec) -> list[str]:
    """The CPU backend's kernels. AMX packs K and V, VEC keeps K by column, NEON differs again."""
    if not current_platform.is_cpu():
        return []
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()  # by layer, if they differ
    return sorted(
        {
            compat.cpu_kernel(vllm_config, layer)
            for layer in specs
            if isinstance(layer, AttentionSpec)
        }
    )


def tensors_of(cache: torch.Tensor | list[torch.Tensor] | None) -> Iterable[torch.Tensor]:
    if cache is None:  # another worker's layer
        return ()
    return (cache,) if isinstance(cache, torch.Tensor) else cache


def key_bytes(vllm_config: VllmConfig) -> int:
    """Length of this engine's offload keys."""
    hash_block = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return len(hash_block(b"")) + _GROUP_INDEX_BYTES


def fingerprint_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
) -> dict[str, object]:
    """All that two engines must have in common, except `page_format`: vLLM's configuration by
    names such as "model.max_model_len", and what it does not say. Reads samples of the weights."""
    capability = current_platform.get_device_capability()
    groups = [
        {"layers": group.layer_names, "spec": repr(group.kv_cache_spec)}
        for group in kv_cache_config.kv_cache_groups
    ]
    return {
        **configuration_fields(vllm_config),
        **_model_files("", vllm_config.model_config, vllm_config.load_config),
        **_draft_files(vllm_config),
        "protocol": PROTOCOL_VERSION,  # so that two versions of ours never meet
        "vllm": vllm.__version__,
        "device": current_platform.device_type,
        "capability": capability and capability.as_version_str(),  # vLLM chooses kernels by it
        "model_runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "layout_environment": {
            name: value() for name, value in envs.environment_variables.items() if "LAYOUT" in name
        },
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "chunk_tokens": chunk_tokens,
        "groups": groups,
    }


def _draft_files(vllm_config: VllmConfig) -> dict[str, object]:
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or draft.model == vllm_config.model_config.model:
        return {}
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return _model_files(_DRAFT, draft, load)


def _model_files(prefix: str, model: ModelConfig, load: LoadConfig) -> dict[str, object]:
    folder = _snapshot(model, load) if not os.path.exists(model.model) else Path(model.model)
    settings = _settings(folder) if folder is not None else {}
    fields: dict[str, object] = {f"{prefix}file {name}": settings[name] for name in settings}
    if folder is not None and _weights_files(folder):
        return {**fields, f"{prefix}weights": weights_fingerprint(folder)}
    return {**fields, f"{prefix}{_NAMED}": model.model, f"{prefix}revision": model.revision}


def known_by_name(fingerprint_fields: Mapping[str, object]) -> list[str]:
    """The models whose names stand for their weights, of which no files were found."""
    names = (fingerprint_fields.get(f"{prefix}{_NAMED}") for prefix in ("", _DRAFT))
    return [str(name) for name in names if name is not None]


def _snapshot(model: ModelConfig, load: LoadConfig) -> Path | None:
    """What the local cache has of a hub's model."""
    try:
        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except Exception as error:  # another hub's, another loader's, or no model's name
        logger.warning(
            "cannot find the model's files, so its name stands for them: model=%s error=%r",
            model.model,
            error,
        )
        return None
    return Path(found)


def _settings(folder: Path) -> dict[str, str]:
    """Digests of the files beside the weights that say how to compute: settings, and the model's
    own code."""
    files = [*folder.glob("*.json"), *folder.rglob("*.py")] if folder.is_dir() else []
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()[:32]
        for file in sorted(files)
        if file.is_file() and not file.name.startswith(_NOT_SETTINGS)
    }


def contents(path: Path) -> str:
    """A digest of the file at `path`, or of the model there; of the path itself, if there is
    neither."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    settings = _settings(path)
    if not settings:
        return str(path)
    return digest({**settings, "weights": weights_fingerprint(path)})


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
    size. Without weights there, it covers the path.
    """
    files = _weights_files(path)
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


def _weights_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in found if file.suffix in _WEIGHT_SUFFIXES and file.is_file()]


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


IRRELEVANT: dict[str, tuple[str, ...]] = {
    "belongs to one process": (
        "instance_id",
        "parallel_config.data_parallel_backend",
        "parallel_config.data_parallel_external_lb",
        "parallel_config.data_parallel_hybrid_lb",
        "parallel_config.data_parallel_size_local",
        "parallel_config.data_parallel_rank",
        "parallel_config.data_parallel_rank_local",
        "parallel_config.data_parallel_index",
        "parallel_config.rank",
        "parallel_config.node_rank",
        "parallel_config._api_process_count",
        "parallel_config._api_process_rank",
        "parallel_config.assigned_physical_gpu_ids",
        "parallel_config.numa_bind",
        "parallel_config.numa_bind_nodes",
        "parallel_config.numa_bind_cpus",
        "parallel_config.placement_group",
        "parallel_config.ray_runtime_env",
        "device_config",  # its kind counts by itself
    ),
    "is an address or a port": (
        "kv_transfer_config",  # its chunks count by themselves
        "kv_events_config",
        "ec_transfer_config",
        "weight_transfer_config",
        "parallel_config.data_parallel_master_ip",
        "parallel_config.data_parallel_master_port",
        "parallel_config._data_parallel_master_port_list",
        "parallel_config.data_parallel_rpc_port",
        "parallel_config._coord_store_port",
        "parallel_config.master_addr",
        "parallel_config.master_port",
    ),
    "depends on how much memory the host has": (
        "cache_config.gpu_memory_utilization",
        "cache_config.kv_cache_memory_bytes",
        "cache_config.num_gpu_blocks",
        "cache_config.num_gpu_blocks_override",
        "cache_config.num_cpu_blocks",
        "cache_config.kv_cache_size_tokens",
        "cache_config.kv_cache_max_concurrency",
        "cache_config.kv_offloading_size",
        "cache_config.simple_cpu_offload_num_blocks",
        "lora_config.max_cpu_loras",
        "model_config.multimodal_config.mm_processor_cache_gb",
        "model_config.multimodal_config.mm_processor_cache_type",
        "model_config.multimodal_config.mm_shm_cache_max_object_size_mb",
        "model_config.multimodal_config.skip_mm_profiling",
        "offload_config",
    ),
    "says where files are; what they contain counts": (
        "model_config.model",
        "model_config.served_model_name",
        "model_config.tokenizer",
        "model_config.revision",
        "model_config.hf_token",
        "model_config.allowed_local_media_path",
        "model_config.allowed_media_domains",
        "load_config.download_dir",
        "load_config.use_tqdm_on_load",
        "speculative_config.model",
        "speculative_config.revision",
    ),
    "counts in another field": (
        "model_config.hf_text_config",  # a part of hf_config
        "quant_config",  # made from the model's
        "cache_config.user_specified_block_size",
        "cache_config.user_specified_mamba_block_size",
        "cache_config._block_size_resolved",
        "speculative_config.target_model_config",
        "speculative_config.target_parallel_config",
    ),
    "decides when something is computed, which rounds differently at most": (
        "scheduler_config",
        "compilation_config",
        "optimization_level",
        "performance_mode",
        "model_config.enforce_eager",
        "parallel_config.distributed_executor_backend",
        "parallel_config.disable_custom_all_reduce",
        "parallel_config.max_parallel_loading_workers",
    ),
    "is about answers, not about the prompts they follow": (
        "model_config.seed",
        "model_config.max_logprobs",
        "model_config.logprobs_mode",
        "model_config.logits_processors",
        "structured_outputs_config",
        "reasoning_config",
        "watermark_config",
    ),
    "is for operators": (
        "observability_config",
        "logging_config",
        "profiler_config",
        "watchdog_config",
        "shutdown_timeout",
        "parallel_config.distributed_timeout_seconds",
        "parallel_config.cpu_distributed_timeout_seconds",
        "parallel_config.ray_workers_use_nsight",
    ),
}
"""Why a field changes no byte of a KV cache: those fields, or whole parts. Everything else counts.
So a field that a new vLLM brings parts replicas that differ in it, until somebody has thought about
it. A draft model's configuration is named like the model's."""

_IRRELEVANT = frozenset(name for names in IRRELEVANT.values() for name in names)
_DRAFT = "speculative_config.draft_"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OWN_PATH = "_name_or_path"  # in a model's configuration
_MAX_DEPTH = 4


def configuration_fields(config: VllmConfig) -> dict[str, object]:
    """vLLM's configuration as JSON-able values by name, such as "model.max_model_len", without what
    is `IRRELEVANT`. A file or folder of this host counts by its `contents`."""
    fields = _fields(config, "")
    return {re.sub(r"^(\w+?)_config\b", r"\1", name): value for name, value in fields}


def _fields(part: object, prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in _members(part):
        path = prefix + name
        if is_irrelevant(path):
            continue
        if _is_part(value):
            yield from _fields(value, f"{path}.")
        else:
            yield path, _plain(value)


def is_irrelevant(path: str) -> bool:
    return path.removeprefix(_DRAFT) in _IRRELEVANT


def _is_part(value: object) -> bool:
    return isinstance(value, PretrainedConfig) or dataclasses.is_dataclass(value)


def _members(part: Any) -> list[tuple[str, object]]:
    if isinstance(part, PretrainedConfig):  # of which some fields are no dataclass's
        return [item for item in part.to_dict().items() if item[0] != _OWN_PATH]
    return [(field.name, getattr(part, field.name, None)) for field in dataclasses.fields(part)]


def _plain(value: object, depth: int = 0) -> object:
    """JSON-able; equal for equal values, in every process."""
    plain = partial(_plain, depth=depth + 1)
    match value:
        case None | bool() | int() | float():
            return value
        case str() | Path():
            text = str(value)
            return contents(Path(text)) if text.startswith("/") else text
        case enum.Enum():
            return value.name
        case Mapping():
            return {str(key): plain(value[key]) for key in value if key != _OWN_PATH}
        case list() | tuple():
            return [plain(each) for each in value]
        case Set():
            return sorted(map(str, map(plain, value)))
    return _described(value, plain, depth)


def _described(value: object, plain: Callable[[object], object], depth: int) -> object:
    """What is no plain value: by its type and members, or by its text."""
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    members = dict(_members(value)) if _is_part(value) else getattr(value, "__dict__", None)
    if not members or depth > _MAX_DEPTH:
        return _ADDRESS.sub("", repr(value))
    return {"type": type(value).__qualname__, **{name: plain(members[name]) for name in members}}
