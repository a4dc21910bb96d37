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
from safetensors.torch import load_file, save_file

FOLDER = "THE MODEL'S FOLDER"
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
    finish: Callable[[Path], None] | None = None
    """Changes the model's folder after all else."""
    shares: bool = True
    whole_hits: bool = True
    """Another engine reuses every whole chunk of 128 tokens."""
    least_hit: int = 0
    """Tokens of the largest prompt that hits nothing, without `whole_hits`."""
    pool_bytes: int = 7 << 20
    """Fewer rows than the longest prompt has chunks, and enough for the others."""
    tolerance: float = 1e-4
    """Of log-probabilities."""
    rare: bool = False

    def arguments_for(self, folder: Path) -> dict[str, Any]:
        """`arguments` of the model in `folder`, which may draft for itself."""
        filled: dict[str, Any] = json.loads(
            json.dumps(dict(self.arguments)).replace(FOLDER, str(folder))
        )
        return filled


def make(name: str, folder: Path) -> Path:
    """Write the model `name` to `folder` and return the folder."""
    architecture = ARCHITECTURES[name]
    config = architecture.config(**_SIZES | architecture.sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in parameter_name:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"dtype": "float32"}))
    if architecture.finish is not None:
        architecture.finish(folder)
    return folder


def _quantise(folder: Path) -> None:
    """Four bits per weight and a scale for every 64 of a row, as GPTQ writes them."""
    group, zero = 64, 8
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            weights[name] = tensor
            continue
        outputs, inputs = tensor.shape
        grouped = tensor.reshape(outputs, inputs // group, group)
        scales = grouped.abs().amax(-1) / (zero - 1)
        numbers = (grouped / scales[..., None]).round().clamp(1 - zero, zero - 1).int() + zero
        eights = numbers.reshape(outputs, inputs // 8, 8).permute(1, 0, 2).contiguous()
        weights[f"{layer}.qweight"] = _packed(eights)
        zeros = torch.full((inputs // group, outputs // 8, 8), zero - 1, dtype=torch.int32)
        weights[f"{layer}.qzeros"] = _packed(zeros)
        weights[f"{layer}.scales"] = scales.T.contiguous()
        weights[f"{layer}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // group
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    description = json.loads((folder / "config.json").read_text())
    description["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True,
        "lm_head": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(description))


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """The last axis, eight numbers of four bits, as one of 32."""
    shifted = numbers.long() << (4 * torch.arange(8))
    packed = shifted.sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": FOLDER}


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
        shares=False,
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
    "fp8_cache": Architecture(transformers.LlamaConfig, arguments={"kv_cache_dtype": "fp8"}),
    "quantised": Architecture(transformers.LlamaConfig, finish=_quantise),
    "ngram": Architecture(transformers.LlamaConfig, arguments={"speculative_config": _NGRAM}),
    "draft": Architecture(transformers.LlamaConfig, arguments={"speculative_config": _DRAFT}),
    "unchunked": Architecture(
        transformers.LlamaConfig,
        arguments={"enable_chunked_prefill": False, "max_num_batched_tokens": CONTEXT},
    ),
}  # fmt: skip
