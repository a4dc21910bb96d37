"""A small vision-language model with random weights: Blip-2, which needs no torchvision."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from examples.make_model import VOCABULARY, make_model

IMAGE_TOKENS = 160
"""Tokens that stand for an image at the beginning of a prompt."""
_PIXELS, _PATCH = 56, 14
_IMAGE = VOCABULARY
_WIDTH = 128


def make_vision_model(folder: Path) -> Path:
    """Write the model with its processor to `folder` and return the folder."""
    config = transformers.Blip2Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": _PIXELS,
            "patch_size": _PATCH,
        },
        qformer_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 64,
        },
        text_config={
            "model_type": "opt",
            "vocab_size": VOCABULARY + 64,
            "hidden_size": _WIDTH,
            "word_embed_proj_dim": _WIDTH,
            "ffn_dim": 2 * _WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
        },
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=_IMAGE,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).float()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {"dtype": "float32"}))
    words = make_model(folder.parent / f"{folder.name}-words")
    tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(words / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<image>"],
    )
    images = transformers.BlipImageProcessorPil(size={"height": _PIXELS, "width": _PIXELS})
    processor = transformers.Blip2Processor(images, tokenizer, IMAGE_TOKENS)  # type: ignore[no-untyped-call]
    processor.save_pretrained(folder)
    return folder


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (_PIXELS, _PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
