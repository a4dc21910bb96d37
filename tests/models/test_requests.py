"""Every kind of request: chunks are shared wherever possible, and the answer stays the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    """Engines with a tokenizer and little more room than the longest prompt needs."""
    arguments = {
        "skip_tokenizer_init": False,
        "enable_prompt_embeds": True,
        "max_model_len": CONTEXT,
        "num_gpu_blocks_override": CONTEXT // BLOCK + 2,
    }
    with three(model_folder, kind(arguments, {"pool_bytes": 256 << 20})) as engines:
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


def test_log_probabilities_of_the_prompt_are_computed(engines: Engines) -> None:
    """vLLM uses no cache for such a request, because it needs the logits of the whole prompt."""
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
    """All answers here are streamed; this test checks that tokens arrive one by one."""
    prompt = engines.prompts.fresh(PROMPT)
    engines.ask(FIRST, prompt)
    engines.settle()
    asked = engines[SECOND].timed(prompt, 8)
    assert len(asked.times) == 8
    assert asked.cached == whole_chunks(PROMPT)


@pytest.mark.parametrize(
    ("thoughts", "reused"),
    [(0, (PROMPT + ANSWER - 1) // CHUNK * CHUNK), (ANSWER // 2, PROMPT // CHUNK * CHUNK)],
    ids=["with all of the answer", "without the thoughts"],
)
def test_a_second_turn_copies_generated_chunks_up_to_what_it_drops(
    engines: Engines, thoughts: int, reused: int
) -> None:
    """Nobody asked for them since. Chunks after a dropped part have other keys than those that the
    engine computed."""
    question = engines.prompts.fresh(PROMPT)
    (said,) = engines.ask(FIRST, question, sampling={"max_tokens": ANSWER})
    engines.settle()
    second_turn = question + list(said.tokens[thoughts:]) + engines.prompts.fresh(50)
    cold = engines.ask(PLAIN, second_turn)
    answer = engines.ask(SECOND, second_turn)
    assert answer[0].cached == reused
    assert difference(cold, answer) < TOLERANCE


def test_requests_that_push_each_other_out(engines: Engines) -> None:
    """Four requests, blocks for three: vLLM preempts them, and computes or loads them again."""
    prompts = [engines.prompts.fresh(600) for _ in range(4)]
    cold = [engines.ask(PLAIN, prompt, sampling={"max_tokens": ANSWER})[0] for prompt in prompts]
    metric = "vllm:num_preemptions"
    for name in (FIRST, SECOND):
        before = engines[name].call("counted", metric)
        answers = engines[name].call("answers", prompts, ANSWER)
        assert engines[name].call("counted", metric) > before
        assert [each.tokens for each in answers] == [each.tokens for each in cold]
        engines.settle()
    assert engines.hits(SECOND)["remote"] > 0


def test_embeddings_instead_of_tokens(engines: Engines) -> None:
    """The keys cover the embeddings: equal ones share, different ones do not."""
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
