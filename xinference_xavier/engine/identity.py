"""What of a vLLM engine goes into its namespace."""

from pathlib import Path

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_cache_interface import KVCacheConfig

from xinference_xavier.engine import versions
from xinference_xavier.namespace import digest, weights_fingerprint
from xinference_xavier.transfer.messages import PROTOCOL_VERSION

_GROUP_INDEX_BYTES = 4  # what vLLM appends to a block hash to make an offload key


def key_bytes(vllm_config: VllmConfig) -> int:
    """Length of this engine's offload keys."""
    hash_block = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return len(hash_block(b"")) + _GROUP_INDEX_BYTES


def namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int) -> str:
    """The digest under which this engine shares."""
    return digest(ingredients(vllm_config, kv_cache_config, chunk_tokens))


def _capability() -> str | None:
    """Of a device that has one: by it vLLM chooses kernels."""
    capability = current_platform.get_device_capability()
    return None if capability is None else capability.as_version_str()


def ingredients(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
) -> dict[str, object]:
    """All that two engines must have in common to share, but for `page_format`. Reads samples of
    the weights."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    architecture = model.hf_config.to_dict()  # what was overridden at launch is in it
    architecture.pop("_name_or_path", None)  # another folder on another host
    groups = [
        {"layers": group.layer_names, "spec": repr(group.kv_cache_spec)}
        for group in kv_cache_config.kv_cache_groups
    ]
    return {
        "protocol": PROTOCOL_VERSION,  # so that other versions of ours never meet
        "vllm": vllm.__version__,
        "device": current_platform.device_type,
        "capability": _capability(),
        "model_runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "architecture": architecture,
        "weights": weights_fingerprint(Path(model.model)),
        "revision": model.revision,
        # Long RoPE chooses its factors by how long a prompt may be.
        "length": model.max_model_len if "longrope" in str(architecture) else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache_dtype": cache.cache_dtype,
        "layout": versions.cache_layout(cache),
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": versions.hash_seed(cache.prefix_caching_hash_algo),
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
