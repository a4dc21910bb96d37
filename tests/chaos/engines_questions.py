"""What replicas are asked, and what an engine that shares nothing answers to it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import requests

from examples.documents import document, prompt, questions
from examples.local_cluster import Completion, LocalCluster

DOCUMENTS = 10
ROWS = 24
"""Of a document's table: 1,200 tokens, nine chunks and a bit."""
TOKENS = 8
"""Of an answer."""
LOGPROB_TOLERANCE = 1e-3
MARGIN = 1e-2
"""By which each token of an answer must have been more likely than any other: a random model has
near ties, which rounding alone decides, and a question with one is not asked."""
_ASKING = 4
_TIMEOUT = 120.0


class Question(NamedTuple):
    document: int
    text: str


class Expected(NamedTuple):
    """`margin`: the least by which a token was more likely than the second."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    margin: float

    def matches(self, answer: Completion) -> bool:
        return self.tokens == answer.tokens and all(
            abs(expected - found) <= LOGPROB_TOLERANCE
            for expected, found in zip(self.logprobs, answer.logprobs, strict=True)
        )


def all_questions(seed: int) -> list[Question]:
    """Three about each of the documents, which are other ones for another seed."""
    found = []
    for number in range(DOCUMENTS):
        table = 1000 + 100 * seed + number
        text = document(table, ROWS)
        asked = random.Random(table).sample(questions(table, ROWS), 3)
        found += [Question(number, prompt(text, question)) for question in asked]
    return found


def generation(**more: object) -> dict[str, Any]:
    """What is asked for with each question: a greedy answer, always of the same length."""
    return {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 2, **more}


def ask_for_reference(
    cluster: LocalCluster, model_uid: str, asked: Sequence[Question]
) -> Mapping[Question, Expected]:
    """The answers of a model that shares nothing, to those questions whose answer is certain."""

    def ask(question: Question) -> Expected:
        body = generation(model=model_uid, prompt=question.text)
        answer = requests.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=_TIMEOUT)
        answer.raise_for_status()
        return _expected(answer.json())

    with ThreadPoolExecutor(_ASKING) as pool:
        answers = dict(zip(asked, pool.map(ask, asked), strict=True))
    return {question: answer for question, answer in answers.items() if answer.margin > MARGIN}


def _expected(answer: dict[str, Any]) -> Expected:
    completion = Completion.of(answer, 0.0)
    margins = []
    for likely in answer["choices"][0]["logprobs"]["top_logprobs"]:
        first, second = sorted(likely.values(), reverse=True)[:2]
        margins.append(first - second)
    return Expected(completion.tokens, completion.logprobs, min(margins))
