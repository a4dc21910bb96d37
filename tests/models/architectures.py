"""Small models with random weights, one for each kind of KV cache.

Weights are large enough for the answer to depend on the whole prompt.
"""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
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
    """A kind of model; `arguments` are vLLM's."""

    config: Callable[..., Any]
    sizes: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}
    finish: Callable[[Path], None] | None = None
    """Changes the model's folder at the end."""
    shares: bool = True
    chunk: int = 128
    """Tokens per chunk; more where vLLM enlarges blocks so that a recurrent state fits in one."""
    loads_all: bool = True
    """Whether vLLM loads whole prompts. With windows or states, it computes the last chunk."""
    all_but_a_token: bool = False
    """True if the last token of a whole prompt counts as a hit, although it is computed again."""
    pool_bytes: int = 7 << 20
    """Too few rows for the longest prompt, but enough for the others."""
    fills_pool: bool = True
    """Whether the longest prompt fills the pool. vLLM stores only a few chunks of windows and
    states."""
    tolerance: float = 1e-4
    """The largest difference of log-probabilities; more if weights are quantised."""
    common: bool = False
    """Always tested; the others only in `make test-long`."""
    runs_here: bool = True
    """True if vLLM's CPU build has a kernel for it on this processor, and all packages."""

    def arguments_for(self, folder: Path) -> dict[str, Any]:
        """`arguments` for the model in `folder`, which may be its own draft model."""
        filled: dict[str, Any] = json.loads(
            json.dumps(dict(self.arguments)).replace(FOLDER, str(folder))
        )
        return filled


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
    if architecture.finish is not None:
        architecture.finish(folder)
    return folder


def _quantise(folder: Path) -> None:
    """Eight bits per weight and a scale for each row, as llm-compressor writes them."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weights[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(-1, keepdim=True) / 127
            weights[name] = (tensor / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    description = json.loads((folder / "config.json").read_text())
    description["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(description))


def _random(*shape: int) -> torch.Tensor:
    made: torch.Tensor = torch.randn(*shape) * 2.0 * shape[-1] ** -0.5
    return made


def _add_head(folder: Path, layer: int, to: str, more: Mapping[str, tuple[int, ...]]) -> None:
    """A head that predicts the token after the next one: a layer like the model's `layer`, and
    `more` tensors by their shapes."""
    weights = load_file(folder / "model.safetensors")
    own = f"model.layers.{layer}."
    head = {
        f"{to}{name.removeprefix(own)}": tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(own)
    }
    head |= {
        name: _random(*shape) if len(shape) > 1 else torch.ones(*shape)
        for name, shape in more.items()
    }
    save_file(weights | head, folder / "model.safetensors", metadata={"format": "pt"})


def _glm4_moe_head(folder: Path) -> None:
    to = "model.layers.4."
    norms = {f"{to}{name}.weight": (128,) for name in ("enorm", "hnorm", "shared_head.norm")}
    tables = {
        f"{to}{name}.weight": (VOCABULARY, 128) for name in ("embed_tokens", "shared_head.head")
    }
    _add_head(folder, 3, to, norms | tables | {f"{to}eh_proj.weight": (128, 256)})


def _add_eagle(folder: Path) -> None:
    """A drafter of one layer, which reads the model's last hidden states."""
    eagle = folder / EAGLE
    config = transformers.LlamaConfig(**_SIZES | {"num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(eagle)
    shapes = {
        "embed_tokens": (VOCABULARY, 128),
        "fc": (128, 256),
        "layers.0.self_attn.q_proj": (128, 128),
        "layers.0.self_attn.k_proj": (64, 128),
        "layers.0.self_attn.v_proj": (64, 128),
        "layers.0.self_attn.o_proj": (128, 128),
        "layers.0.mlp.gate_proj": (256, 128),
        "layers.0.mlp.up_proj": (256, 128),
        "layers.0.mlp.down_proj": (128, 256),
    }
    weights = {f"{name}.weight": _random(*shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(128)
    save_file(weights, eagle / "model.safetensors", metadata={"format": "pt"})


EAGLE = "eagle"
_EAGLE = {"method": "eagle", "num_speculative_tokens": 2, "model": f"{FOLDER}/{EAGLE}"}
_MTP = {"method": "mtp", "num_speculative_tokens": 1}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "model": FOLDER}


ARCHITECTURES = {
    "llama": Architecture(transformers.LlamaConfig, common=True),
    "tied": Architecture(transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "mistral": Architecture(
        transformers.MistralConfig,
        {"sliding_window": 512},
        loads_all=False,
        fills_pool=False,
        common=True,
    ),
    "gemma2": Architecture(
        transformers.Gemma2Config,
        {"sliding_window": 256, "query_pre_attn_scalar": 32},
        loads_all=False,
        pool_bytes=7 << 19,
    ),
    "gemma3": Architecture(
        transformers.Gemma3TextConfig,
        {"sliding_window": 256, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2},
        loads_all=False,
        common=True,
        pool_bytes=7 << 19,
    ),
    "gemma4": Architecture(
        transformers.Gemma4TextConfig,
        {
            "sliding_window": 256, "global_head_dim": 64, "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        all_but_a_token=True,
        pool_bytes=7 << 19,
    ),
    "gpt_oss": Architecture(
        transformers.GptOssConfig,
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        loads_all=False,
        pool_bytes=7 << 19,
    ),
    "qwen3_moe": Architecture(
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "deepseek_v2": Architecture(
        transformers.DeepseekV2Config,
        {
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4,
            "first_k_dense_replace": 4, "num_key_value_heads": 4, "head_dim": 64,
        },
        # vLLM uses blocks of 16 tokens here. Its backend for AMX takes no float32.
        {"num_gpu_blocks_override": 512, "attention_backend": "CPU_MLA"},
        shares=False,
        fills_pool=False,
        common=True,
        pool_bytes=32 << 20,
    ),
    "qwen3_next": Architecture(
        transformers.Qwen3NextConfig,
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64, "linear_key_head_dim": 64,
            "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
        # The type of the states sizes the blocks, and vLLM's own choice depends on the processor.
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
        chunk=288,
        fills_pool=False,
        common=True,
        loads_all=False,
        pool_bytes=2 << 20,
    ),
    "qwen3_5": Architecture(
        transformers.Qwen3_5TextConfig,
        {
            "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
        chunk=288,
        fills_pool=False,
        loads_all=False,
        pool_bytes=2 << 20,
        # PyPI has it for CUDA only. vLLM imports it for images, and needs none of its operators.
        runs_here=find_spec("torchvision") is not None,
    ),
    "falcon_h1": Architecture(
        transformers.FalconH1Config,
        {
            "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_chunk_size": 64,
        },
        # On the CPU platform, vLLM itself fails if a step ends inside a block, and 0.31 has no
        # kernel for float32 with AVX-512.
        {
            "dtype": "bfloat16", "block_size": 128, "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 64,
        },
        loads_all=False,
        pool_bytes=7 << 19,
    ),
    "nemotron_h": Architecture(
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
            "chunk_size": 64,
        },
        {
            "dtype": "bfloat16", "block_size": 128, "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 64,
        },
        loads_all=False,
        fills_pool=False,
        pool_bytes=7 << 19,
    ),
    "fp8_cache": Architecture(
        transformers.LlamaConfig,
        arguments={"kv_cache_dtype": "fp8"},
        pool_bytes=7 << 18,
        runs_here=torch.cpu._is_avx512_supported(),
    ),
    "quantised": Architecture(transformers.LlamaConfig, finish=_quantise, tolerance=0.1),
    "ngram": Architecture(transformers.LlamaConfig, arguments={"speculative_config": _NGRAM}),
    "draft": Architecture(
        transformers.LlamaConfig, arguments={"speculative_config": _DRAFT}, pool_bytes=14 << 20
    ),
    "eagle": Architecture(
        transformers.LlamaConfig, arguments={"speculative_config": _EAGLE}, finish=_add_eagle
    ),
    "glm4_moe_mtp": Architecture(
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
        },
        {"speculative_config": _MTP},
        finish=_glm4_moe_head,
    ),
    "gpt_oss_eagle": Architecture(
        transformers.GptOssConfig,
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"speculative_config": _EAGLE, "num_gpu_blocks_override": 512},
        finish=_add_eagle,
        loads_all=False,
        pool_bytes=7 << 19,
    ),
    "unchunked": Architecture(
        transformers.LlamaConfig,
        arguments={"enable_chunked_prefill": False, "max_num_batched_tokens": CONTEXT},
    ),
}  # fmt: skip
