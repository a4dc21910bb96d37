"""The small model is the same every time, and its answers depend on all of a prompt."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.documents import document, prompt, questions
from examples.make_model import make_model

Predict = Callable[[list[int]], torch.Tensor]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tokens(model_folder: Path) -> Callable[[str], list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    return lambda text: tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def predict(model_folder: Path) -> Predict:
    """Log-probabilities of the token after a prompt, in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    assert model.dtype == torch.float32

    def last(prompt_tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_tokens]), logits_to_keep=1).logits
        return torch.log_softmax(logits[0, -1], dim=-1)

    return last


def test_two_runs_write_the_same_bytes_and_nothing_else(model_folder: Path, tmp_path: Path) -> None:
    assert digests(make_model(tmp_path / "again")) == digests(model_folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["again"]


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear reader")
    with pytest.raises(FileExistsError, match="name another folder"):
        make_model(tmp_path)
    assert (tmp_path / "letter").read_text() == "Dear reader"


def test_a_model_of_another_recipe_is_made_again(model_folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "recipe.json").write_text('{"recipe": 0}')
    assert digests(make_model(old)) == digests(model_folder)


@pytest.mark.process
def test_one_word_early_in_a_long_prompt_changes_the_answer(
    tokens: Callable[[str], list[int]], predict: Predict
) -> None:
    text = document(3, 80)
    name = text.splitlines()[4].split("|")[2].split()[-1]
    changed = text.replace(name, "Xavier", 1)
    question = questions(3, 80)[4]
    first, second = (tokens(prompt(table, question)) for table in (text, changed))
    assert len(first) > 3_900
    assert (predict(first) - predict(second)).abs().max() > 0.1


@pytest.mark.process
def test_most_documents_and_questions_have_first_tokens_of_their_own(
    tokens: Callable[[str], list[int]], predict: Predict
) -> None:
    first_tokens = [
        int(predict(tokens(prompt(document(seed, 25), question))).argmax())
        for seed in (1, 2, 3)
        for question in questions(seed, 25)[:4]
    ]
    assert len(set(first_tokens)) > len(first_tokens) / 2
