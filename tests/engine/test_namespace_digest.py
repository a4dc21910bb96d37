"""Replicas share within a namespace only: it must tell apart whatever makes bytes differ."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xinference_xavier.engine.namespace import digest, weights_fingerprint

INGREDIENTS = {"dtype": torch.float32, "layers": ["a", "b"], "chunk_tokens": 128, "none": None}
ROWS, COLUMNS = 300, 1000


def test_a_digest_is_the_same_in_every_process_and_order() -> None:
    code = (
        "import torch; from xinference_xavier.engine.namespace import digest;"
        "print(digest({'none': None, 'chunk_tokens': 128, 'layers': ['a', 'b'],"
        " 'dtype': torch.float32}))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == digest(INGREDIENTS)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"layers": ["b", "a"]},
        {"chunk_tokens": 256},
        {"none": 0},
        {"another": 1},
    ],
)
def test_every_ingredient_counts(other: dict[str, object]) -> None:
    assert digest(INGREDIENTS | other) != digest(INGREDIENTS)


def save(folder: Path, suffix: str, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    if suffix == ".safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / f"model{suffix}")
    return folder


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.rand(ROWS, COLUMNS, generator=generator),
        "small": torch.rand(3, generator=generator),
        "norm": torch.rand(COLUMNS, generator=generator),
    }


both_formats = pytest.mark.parametrize("suffix", [".safetensors", ".bin"])


@both_formats
def test_a_copy_in_another_folder_is_the_same_model(tmp_path: Path, suffix: str) -> None:
    original = save(tmp_path / "a", suffix, weights(0))
    shutil.copytree(original, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("not weights")
    assert weights_fingerprint(original) == weights_fingerprint(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("suffix", "tensor"),
    [
        (".safetensors", "embedding"),
        (".safetensors", "norm"),
        (".safetensors", "small"),
        (".bin", "embedding"),
        (".bin", "norm"),  # what is smaller than the steps through such a file may be missed
    ],
)
def test_fine_tunes_of_equal_size_differ(tmp_path: Path, suffix: str, tensor: str) -> None:
    """A fine-tune changes a tensor everywhere, if only a little."""
    tuned = weights(0)
    tuned[tensor] *= 1 + 2**-20
    one, other = save(tmp_path / "a", suffix, weights(0)), save(tmp_path / "b", suffix, tuned)
    sizes = [next(folder.iterdir()).stat().st_size for folder in (one, other)]
    assert sizes[0] == sizes[1]
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_weights_in_shards_and_subfolders_count(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", ".safetensors", weights(0))
    one = weights_fingerprint(folder)
    save(folder / "more", ".safetensors", weights(1))
    two = weights_fingerprint(folder)
    assert one != two
    shutil.rmtree(folder / "more")
    save(folder / "more", ".safetensors", weights(2))
    assert weights_fingerprint(folder) not in {one, two}


def test_a_model_may_be_one_file(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf"
    for file, content in ((one, b"x"), (other, b"y")):
        file.parent.mkdir()
        file.write_bytes(content * 10_000)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_models_on_a_hub_are_told_apart_by_their_names() -> None:
    assert weights_fingerprint(Path("org/one")) != weights_fingerprint(Path("org/other"))


def test_tensors_of_no_bytes_are_no_obstacle(tmp_path: Path) -> None:
    save(tmp_path / "a", ".safetensors", {"empty": torch.zeros(0), "one": torch.ones(1)})
    save(tmp_path / "b", ".safetensors", {"empty": torch.zeros(0), "one": torch.zeros(1)})
    assert weights_fingerprint(tmp_path / "a") != weights_fingerprint(tmp_path / "b")
