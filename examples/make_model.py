"""Write a small language model with random weights: `python examples/make_model.py DIR`.

It has the Qwen2 architecture (26 M parameters, 16k tokens of context) and a tokenizer trained on
generated text, so that nothing has to be downloaded to see replicas share a prefix. It knows
nothing, but its answers depend on every word of a prompt, as a test of a shared prefix requires;
`_weights` explains how. The same recipe gives the same bytes with the same versions installed.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

RECIPE = 1
"""Version of this recipe; a folder that another version made is made again."""

SEED = 20_25
VOCABULARY = 8192
HEAD = 64
CONTEXT = 16_384
ROPE_THETA = 10_000.0


class Shape(NamedTuple):
    """Sizes of a model, named as in its configuration."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int


SMALL = Shape(512, 8, 8, 4, 896)
LARGE = Shape(2048, 24, 32, 4, 5632)
"""1.1 billion parameters: with the small one, a GPU computes a document before it asks a peer."""

EMBEDDING = 0.5
SHARPNESS = 2.0
NEAR_BIAS = 1.5
HEAD_GAIN = 3.0
"""Sizes of the random weights: see `_weights`."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How a Qwen2 tokenizer splits text; transformers does so for this architecture anyway."""

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START_TURN}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END_TURN}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START_TURN}assistant\n{{% endif %}}"
)


def make_model(path: Path, shape: Shape = SMALL, *, tokenizer: bool = True) -> Path:
    """Write the model to the folder `path` and return `path`. If it is there, return at once.

    The folder appears complete or not at all. A model of an older recipe is replaced. Without a
    `tokenizer`, the model takes and returns token ids only.

    Raises:
        FileExistsError: `path` contains something else.
    """
    recipe = {"recipe": RECIPE, "tokenizer": tokenizer, **shape._asdict()}
    if (path / "recipe.json").is_file():
        if json.loads((path / "recipe.json").read_text()) == recipe:
            return path
        shutil.rmtree(path)
    elif path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} contains something else: name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        folder = Path(scratch) / path.name
        folder.mkdir()
        if tokenizer:
            _tokenizer().save(str(folder / "tokenizer.json"))
        weights = folder / "model.safetensors"
        save_file(dict(_weights(shape)), weights, metadata={"format": "pt"})
        weights.chmod(0o644)
        for name, content in (_configuration(shape) | {"recipe.json": recipe}).items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        folder.rename(path)
    return path


def _tokenizer() -> Tokenizer:
    """Byte-level BPE trained on prose and table rows; it can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the training text yields {tokenizer.get_vocab_size()} tokens only")
    return tokenizer


def _training_text() -> Iterator[str]:
    from faker import Faker  # here, because a model without a tokenizer does not need it

    fake = Faker("en_US")
    fake.seed_instance(SEED)
    for _ in range(1500):
        yield fake.text(400)
    for number in range(2400):
        fields = (
            str(number % 250),
            fake.name(),
            str(fake.random_int(18, 90)),
            fake.job(),
            fake.company(),
            fake.city(),
            fake.country(),
            fake.safe_email(),
            fake.phone_number(),
        )
        yield f"| {' | '.join(fields)} |\n"


def _weights(shape: Shape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors by their names in a Qwen2 checkpoint.

    Weights drawn as for training (a deviation of 0.02) give a model that attends to little but the
    last token. So every matrix keeps the size of its input. Queries and keys are somewhat larger,
    so that attention chooses a few positions instead of averaging over thousands. Embeddings are
    smaller than what attention adds to them. Such heads hardly ever attend to a question of 20
    tokens behind a document of 5,000, so in a quarter of them a constant bias of queries and keys,
    rotated by the rotary embedding, favours the near past.
    """
    random = np.random.default_rng(SEED)
    hidden, layers, heads, kv_heads, inner = shape

    def normal(rows: int, columns: int, deviation: float) -> NDArray[np.float32]:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(deviation)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return normal(rows, columns, gain / columns**0.5)

    def near(count: int) -> NDArray[np.float32]:
        bias = np.zeros((count, HEAD), dtype=np.float32)
        bias[: count // 4, : HEAD // 2] = NEAR_BIAS
        return bias.reshape(-1)

    yield "model.embed_tokens.weight", normal(VOCABULARY, hidden, EMBEDDING)
    for number in range(layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", np.ones(hidden, dtype=np.float32)
        yield f"{layer}.post_attention_layernorm.weight", np.ones(hidden, dtype=np.float32)
        yield f"{layer}.self_attn.q_proj.weight", matrix(heads * HEAD, hidden, SHARPNESS)
        yield f"{layer}.self_attn.k_proj.weight", matrix(kv_heads * HEAD, hidden, SHARPNESS)
        yield f"{layer}.self_attn.v_proj.weight", matrix(kv_heads * HEAD, hidden)
        yield f"{layer}.self_attn.o_proj.weight", matrix(hidden, heads * HEAD)
        yield f"{layer}.self_attn.q_proj.bias", near(heads)
        yield f"{layer}.self_attn.k_proj.bias", near(kv_heads)
        yield f"{layer}.self_attn.v_proj.bias", np.zeros(kv_heads * HEAD, dtype=np.float32)
        yield f"{layer}.mlp.gate_proj.weight", matrix(inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", matrix(inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", np.ones(hidden, dtype=np.float32)
    yield "lm_head.weight", matrix(VOCABULARY, hidden, HEAD_GAIN)


def _configuration(shape: Shape) -> dict[str, dict[str, object]]:
    """The JSON files beside weights and tokenizer, by name."""
    end, end_turn = 0, 2
    return {
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            **shape._asdict(),
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": ROPE_THETA,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "bos_token_id": end,
            "eos_token_id": end_turn,
            "dtype": "float32",
        },
        "generation_config.json": {
            "bos_token_id": end,
            "eos_token_id": [end_turn, end],
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "model_max_length": CONTEXT,
            "bos_token": END,
            "eos_token": END_TURN,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def main() -> None:
    """Make the model in the folder that the command line names."""
    parser = argparse.ArgumentParser(description="write a small language model with random weights")
    parser.add_argument("dir", type=Path, help="the folder to make")
    print(make_model(parser.parse_args().dir.resolve()))


if __name__ == "__main__":
    main()
