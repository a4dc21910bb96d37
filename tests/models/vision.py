"""A small vision-language model with random weights: Llava's, with CLIP's eye and a Llama."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from examples.make_model import VOCABULARY, make_model

PIXELS, PATCH = 112, 8
IMAGE_TOKENS = (PIXELS // PATCH) ** 2
"""Of a prompt, for each image."""
IMAGE = VOCABULARY
"""The token that stands for an image."""


def make_vision_model(folder: Path) -> Path:
    """Write the model with its processor to `folder` and return the folder."""
    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY + 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PATCH,
        projection_dim=64,
    )
    config = transformers.LlavaConfig(
        vision, text, image_token_index=IMAGE, image_seq_length=IMAGE_TOKENS
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"dtype": "float32"}))
    _processor(folder).save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _processor(folder: Path) -> transformers.LlavaProcessor:
    words = make_model(folder.parent / f"{folder.name}-words")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(words / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<image>"],
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
