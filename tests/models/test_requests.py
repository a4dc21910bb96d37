"""Every kind of request: what may be shared is shared, and the answer stays the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.make_model import VOCABULARY
from tests.models import architectures
from tests.models.adapters import write_adapter
from tests.models.sharing import (
    BLOCK,
    CHUNK,
    FIRST,
    PLAIN,
    SECOND,
    TOLERANCE,
    Engines,
    difference,
    kind,
    three,
    whole_chunks,
)
from tests.models.vision import IMAGE, IMAGE_TOKENS, make_vision_model, picture

pytestmark = pytest.mark.process

PROMPT = 700
ANSWER = 200
CONTEXT = 2048
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engines(model_folder: Path) -> Iterator[Engines]:
    """With a tokenizer, and room for hardly more than the longest prompt."""
    arguments = {
        "skip_tokenizer_init": False,
        "enable_prompt_embeds": True,
        "max_model_len": CONTEXT,
        "num_gpu_blocks_override": CONTEXT // BLOCK + 2,
    }
    with three(model_folder, kind(arguments, {"pool_bytes": 256 << 20}), VOCABULARY) as engines:
        yield engines


def test_only_requests_with_the_same_salt_share(engines: Engines) -> None:
    tokens = engines.prompts.fresh(PROMPT)

    def salted(salt: str) -> dict[str, Any]:
        return {"prompt_token_ids": tokens, "cache_salt": salt}

    mine = engines.share(salted("mine"))
    assert mine.remote == whole_chunks(PROMPT)
    assert mine.error < TOLERANCE
    before = engines.hits(SECOND)["remote"]
    other = engines.ask(SECOND, salted("other"))
    assert other[0].cached == 0
    assert engines.ask(SECOND, tokens)[0].cached == 0
    assert engines.hits(SECOND)["remote"] == before
    assert difference(other, mine.cold) < TOLERANCE


def test_several_answers_to_one_prompt(engines: Engines) -> None:
    sampling = {"n": 3, "temperature": 0.8, "seed": 7}
    shared = engines.share(engines.prompts.fresh(PROMPT), sampling=sampling)
    assert len({each.tokens for each in shared.cold}) == 3
    assert shared.remote >= whole_chunks(PROMPT)
    assert shared.error < TOLERANCE


def test_log_probabilities_of_several_tokens(engines: Engines) -> None:
    shared = engines.share(engines.prompts.fresh(PROMPT), sampling={"logprobs": 5})
    assert all(len(position) >= 5 for position in shared.second[0].logprobs)
    assert shared.remote == whole_chunks(PROMPT)
    assert shared.error < TOLERANCE


def test_log_probabilities_of_the_prompt_are_computed(engines: Engines) -> None:
    """vLLM reads no cache for such a request: it needs the whole prompt's logits."""
    shared = engines.share(engines.prompts.fresh(PROMPT), sampling={"prompt_logprobs": 0})
    assert len(shared.second[0].prompt_logprobs) == PROMPT
    assert (shared.remote, shared.second[0].cached) == (0, 0)
    assert shared.error < TOLERANCE


def test_an_answer_in_a_given_form(engines: Engines) -> None:
    sampling = {
        "structured": {"json": SCHEMA},
        "ignore_eos": False,
        "detokenize": True,
        "max_tokens": 120,
    }
    shared = engines.share(engines.prompts.fresh(PROMPT), sampling=sampling)
    assert set(json.loads(shared.second[0].text)) == {"name", "age"}
    assert shared.remote == whole_chunks(PROMPT)
    assert shared.error < TOLERANCE


def test_a_streamed_answer(engines: Engines) -> None:
    """All answers here are streamed; this one is seen to come token by token."""
    prompt = engines.prompts.fresh(PROMPT)
    engines.ask(FIRST, prompt)
    engines.settle()
    asked = engines.fleet[SECOND].ask(prompt, 8)
    assert len(asked.times) == 8
    assert asked.cached == whole_chunks(PROMPT)


def test_a_chat_whose_history_has_what_another_engine_generated(engines: Engines) -> None:
    question = engines.prompts.fresh(PROMPT)
    (said,) = engines.ask(FIRST, question, sampling={"max_tokens": ANSWER})
    history = question + list(said.tokens)
    second_turn = history + engines.prompts.fresh(50)
    shared = engines.share(second_turn)
    assert shared.first[0].cached >= len(history) // BLOCK * BLOCK - BLOCK
    assert shared.remote == whole_chunks(len(second_turn))
    assert shared.error < TOLERANCE


def test_a_second_turn_copies_generated_chunks_that_nobody_asked_for_again(
    engines: Engines,
) -> None:
    question = engines.prompts.fresh(PROMPT)
    (said,) = engines.ask(FIRST, question, sampling={"max_tokens": ANSWER})
    engines.settle()
    history = question + list(said.tokens)
    second_turn = history + engines.prompts.fresh(50)
    cold = engines.ask(PLAIN, second_turn)
    answer = engines.ask(SECOND, second_turn)
    assert answer[0].cached == (len(history) - 1) // CHUNK * CHUNK > PROMPT
    assert difference(cold, answer) < TOLERANCE


def test_a_chat_whose_history_drops_the_thoughts(engines: Engines) -> None:
    """The chunks behind what is dropped are no longer those that the engine has computed."""
    question = engines.prompts.fresh(PROMPT)
    (said,) = engines.ask(FIRST, question, sampling={"max_tokens": ANSWER})
    engines.settle()
    thoughts = ANSWER // 2
    second_turn = question + list(said.tokens[thoughts:]) + engines.prompts.fresh(50)
    cold = engines.ask(PLAIN, second_turn)
    answer = engines.ask(SECOND, second_turn)
    assert answer[0].cached == PROMPT // CHUNK * CHUNK
    assert difference(cold, answer) < TOLERANCE


def test_requests_that_push_each_other_out(engines: Engines) -> None:
    """Blocks for three prompts and four requests: vLLM preempts and computes or loads again."""
    prompts = [engines.prompts.fresh(600) for _ in range(4)]
    cold = [engines.ask(PLAIN, prompt, sampling={"max_tokens": ANSWER})[0] for prompt in prompts]
    metric = "vllm:num_preemptions"
    for name in (FIRST, SECOND):
        before = engines.fleet[name].do("counted", metric)
        answers = engines.fleet[name].do("answers", prompts, ANSWER)
        assert engines.fleet[name].do("counted", metric) > before
        assert [each.tokens for each in answers] == [each.tokens for each in cold]
        engines.settle()
    assert engines.hits(SECOND)["remote"] > 0


def test_embeddings_instead_of_tokens(engines: Engines) -> None:
    """The keys cover the embeddings: the same ones share, other ones do not."""
    width = 512
    random = np.random.default_rng(0)
    values = (random.standard_normal((PROMPT, width)) * 0.5).astype(np.float32)
    changed = values.copy()
    changed[3, 5] += 1.0
    shared = engines.share({"prompt_embeds": values})
    assert shared.remote == whole_chunks(PROMPT)
    assert shared.error < TOLERANCE
    before = engines.hits(SECOND)["remote"]
    other = engines.ask(SECOND, {"prompt_embeds": changed})
    assert (other[0].cached, engines.hits(SECOND)["remote"]) == (0, before)
    assert difference(other, engines.ask(PLAIN, {"prompt_embeds": changed})) < TOLERANCE
    assert difference(other, shared.cold) > 10 * TOLERANCE


# -- adapters ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = architectures.make("llama", tmp_path_factory.mktemp("base"))
    arguments = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with three(folder, kind(arguments), architectures.VOCABULARY) as engines:
        yield engines


@pytest.fixture(scope="module")
def base(adapting: Engines) -> Path:
    model = adapting.fleet.model
    assert model is not None
    return model


def load(engines: Engines, lora: dict[str, Any]) -> None:
    """Have all engines load the adapter and read its files, by a prompt too short to share."""
    for name in (FIRST, SECOND, PLAIN):
        for _ in range(2):
            engines.ask(name, engines.prompts.fresh(20), lora=lora)


def test_each_adapter_shares_with_itself_only(
    adapting: Engines, base: Path, tmp_path: Path
) -> None:
    prompt = adapting.prompts.fresh(PROMPT)
    answers = [adapting.share(prompt)]
    for number in (1, 2):
        folder = write_adapter(tmp_path / str(number), base, seed=number)
        lora = {"lora_name": f"adapter{number}", "lora_int_id": number, "lora_path": str(folder)}
        load(adapting, lora)
        answers.append(adapting.share(prompt, lora=lora))
        assert answers[-1].first[0].cached == 0
    assert [each.remote for each in answers] == [whole_chunks(PROMPT)] * 3
    assert max(each.error for each in answers) < TOLERANCE
    for one, other in itertools.pairwise(answers):
        assert difference(one.cold, other.cold) > 100 * TOLERANCE


def test_an_adapter_replaced_in_place_shares_nothing_with_the_old_one(
    adapting: Engines, base: Path, tmp_path: Path
) -> None:
    prompt = adapting.prompts.fresh(PROMPT)
    folder = write_adapter(tmp_path / "replaced", base, seed=3)
    lora = {"lora_name": "replaced", "lora_int_id": 3, "lora_path": str(folder)}
    load(adapting, lora)
    old = adapting.ask(FIRST, prompt, lora=lora)
    adapting.settle()
    write_adapter(folder, base, seed=4)
    lora["load_inplace"] = True
    load(adapting, lora)
    del lora["load_inplace"]
    for name in (FIRST, SECOND, PLAIN):
        adapting.forget(name)  # vLLM's own cache knows the adapter's name only
    before = adapting.hits(SECOND)["remote"]
    new = adapting.ask(SECOND, prompt, lora=lora)
    assert (new[0].cached, adapting.hits(SECOND)["remote"]) == (0, before)
    cold = adapting.ask(PLAIN, prompt, lora=lora)
    assert difference(new, cold) < TOLERANCE
    assert difference(new, old) > 100 * TOLERANCE
    adapting.settle()
    again = adapting.ask(FIRST, prompt, lora=lora)
    assert again[0].cached == whole_chunks(PROMPT)
    assert difference(again, cold) < TOLERANCE


# -- images -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = make_vision_model(tmp_path_factory.mktemp("vision") / "model")
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    with three(folder, kind(arguments), VOCABULARY) as engines:
        yield engines


def test_prompts_with_the_same_image_share_and_others_do_not(seeing: Engines) -> None:
    text = seeing.prompts.fresh(300)

    def about(seed: int) -> dict[str, Any]:
        return {"prompt_token_ids": [IMAGE, *text], "multi_modal_data": {"image": picture(seed)}}

    tokens = IMAGE_TOKENS + len(text)
    shared = seeing.share(about(1))
    assert shared.remote == whole_chunks(tokens)
    assert shared.error < TOLERANCE
    other = seeing.share(about(2))
    assert (other.first[0].cached, other.remote) == (0, whole_chunks(tokens))
    assert other.error < TOLERANCE
    assert difference(shared.cold, other.cold) > 10 * TOLERANCE


def test_only_what_stands_before_another_image_is_shared(seeing: Engines) -> None:
    text = seeing.prompts.fresh(300)

    def about(seed: int) -> dict[str, Any]:
        return {"prompt_token_ids": [*text, IMAGE], "multi_modal_data": {"image": picture(seed)}}

    seeing.ask(FIRST, about(3))
    seeing.settle()
    answer = seeing.ask(SECOND, about(4))
    assert answer[0].cached == len(text) // CHUNK * CHUNK
    assert difference(answer, seeing.ask(PLAIN, about(4))) < TOLERANCE
