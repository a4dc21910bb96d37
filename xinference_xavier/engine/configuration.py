"""vLLM's configuration as plain values by name, without what changes no byte of a KV cache.

Everything counts unless `IRRELEVANT` names it. So a field that a new vLLM brings parts replicas
that differ in it, until somebody has thought about it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from vllm.config import VllmConfig

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
"""Why a field does not matter: those fields, or whole parts. A draft model's configuration is named
like the model's."""

_IRRELEVANT = frozenset(name for names in IRRELEVANT.values() for name in names)
_DRAFT = "speculative_config.draft_"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OWN_PATH = "_name_or_path"  # in a model's configuration
_MAX_DEPTH = 4


def fields(config: VllmConfig, contents: Callable[[Path], object]) -> dict[str, object]:
    """JSON-able values by name, such as "model.max_model_len". A file or folder of this host counts
    by its `contents`."""
    return {
        re.sub(r"^(\w+?)_config\b", r"\1", name): value
        for name, value in _fields(config, "", contents)
    }


def _fields(
    part: object, prefix: str, contents: Callable[[Path], object]
) -> Iterator[tuple[str, object]]:
    for name, value in _members(part):
        path = prefix + name
        if is_irrelevant(path):
            continue
        if _is_part(value):
            yield from _fields(value, f"{path}.", contents)
        else:
            yield path, _plain(value, contents)


def is_irrelevant(path: str) -> bool:
    return path.removeprefix(_DRAFT) in _IRRELEVANT


def _is_part(value: object) -> bool:
    return isinstance(value, PretrainedConfig) or dataclasses.is_dataclass(value)


def _members(part: Any) -> list[tuple[str, object]]:
    if isinstance(part, PretrainedConfig):  # of which some fields are no dataclass's
        return [item for item in part.to_dict().items() if item[0] != _OWN_PATH]
    return [(field.name, getattr(part, field.name, None)) for field in dataclasses.fields(part)]


def _plain(value: object, contents: Callable[[Path], object], depth: int = 0) -> object:
    """JSON-able; equal for equal values, in every process."""

    def plain(each: object) -> object:
        return _plain(each, contents, depth + 1)

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
