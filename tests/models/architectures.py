"""Small models with random weights, one for each kind of KV cache.

Weights are large enough for the answer to depend on the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

VOCABULARY = 512
CONTEXT = 4096
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Architecture(NamedTuple):
    """`arguments` are vLLM's."""

    config: Callable[..., Any]
    sizes: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}


def make(name: str, folder: Path) -> Path:
    """Write the model `name` to `folder` and return the folder."""
    architecture = ARCHITECTURES[name]
    config = architecture.config(**{**_SIZES, **architecture.sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in parameter_name:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"dtype": "float32"}))
    return folder


ARCHITECTURES = {
    "llama": Architecture(transformers.LlamaConfig),
    "tied": Architecture(transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "mistral": Architecture(transformers.MistralConfig, {"sliding_window": 512}),
    "gemma2": Architecture(
        transformers.Gemma2Config,
        {"sliding_window": 256, "query_pre_attn_scalar": 32},
    ),
    "gemma3": Architecture(
        transformers.Gemma3TextConfig,
        {"sliding_window": 256, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2},
    ),
    "gpt_oss": Architecture(
        transformers.GptOssConfig,
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": Architecture(
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "deepseek_v2": Architecture(
        transformers.DeepseekV2Config,
        {
            "kv_lora_rank": 64, "q_lora_rank": None, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": None,
            "first_k_dense_replace": 4, "num_key_value_heads": 4, "head_dim": 16,
        },
    ),
    "qwen3_next": Architecture(
        transformers.Qwen3NextConfig,
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
        {"dtype": "bfloat16"},
    ),
    "bamba": Architecture(
        transformers.BambaConfig,
        {
            "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 32,
            "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 64,
        },
    ),
    "falcon_h1": Architecture(
        transformers.FalconH1Config,
        {
            "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_chunk_size": 64,
        },
    ),
}  # fmt: skip
