"""Small LoRA adapters with random weights, as PEFT writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
_MODULES = ("q_proj", "v_proj")
_SIZE = 0.3  # large enough for the answer to depend on it


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter for the Llama-like `model`, replacing an existing one."""
    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head = shape.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head, "v_proj": shape["num_key_value_heads"] * head}
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for module in _MODULES:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{prefix}.lora_A.weight"] = _normal(random, RANK, hidden)
            weights[f"{prefix}.lora_B.weight"] = _normal(random, outputs[module], RANK)
    folder.mkdir(exist_ok=True)
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(_MODULES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    written = folder / "new"
    save_file(weights, written, metadata={"format": "pt"})
    written.rename(folder / "adapter_model.safetensors")
    return folder


def _normal(random: np.random.Generator, *shape: int) -> Any:
    return (random.standard_normal(shape) * _SIZE).astype(np.float32)
