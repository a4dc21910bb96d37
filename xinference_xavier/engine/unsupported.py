"""What sharing cannot serve is refused by name when the engine starts: it would fail later, and
worse."""

import os
from operator import attrgetter

from vllm.config import VllmConfig

from xinference_xavier.errors import ConfigError

NEEDS_MORE_THAN_ROWS = {
    "aux_output_config.enable_return_routed_experts": (
        "returns the experts of each prompt token, which rows of another engine or from a disk do "
        "not have"
    ),
    # With it, vLLM 0.33 prepares loads in a later step than the HIT, which protects no row so long.
    "attention_config.hisparse_config": (
        "keeps the cache in host memory in its own way, which sharing does not support"
    ),
}
"""vLLM's switches of features that have a state of their own for each block, and why rows of the KV
cache are not enough for them. A test knows vLLM's other switches."""
_WITHOUT = "leave it out, or launch without enable_xavier"


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises ConfigError if vLLM is configured for something that sharing cannot serve."""
    nodes = vllm_config.parallel_config.nnodes
    if nodes > 1:
        raise ConfigError(
            "nnodes",
            nodes,
            "spreads one replica over several hosts, which sharing does not support",
            "use one host per replica, or launch without enable_xavier",
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "has a random seed in each process, so no two replicas would find the same chunk",
            "use sha256, or set PYTHONHASHSEED to the same number for all replicas",
        )
    for path, reason in NEEDS_MORE_THAN_ROWS.items():
        if value := attrgetter(path)(vllm_config):
            raise ConfigError(path.rpartition(".")[2], value, reason, _WITHOUT)
