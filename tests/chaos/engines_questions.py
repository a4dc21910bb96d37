"""The questions to the replicas, and the answers of an engine that shares nothing."""

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import requests

from examples.documents import document, prompt, questions
from examples.local_cluster import Completion, LocalCluster, greedy

DOCUMENTS = 10
ROWS = 24
"""Rows of a document's table: 1,200 tokens, nine chunks and a part."""
TOKENS = 8
"""Length of an answer."""
LOGPROB_TOLERANCE = 1e-3
MARGIN = 1e-2
"""The least difference between the log-probabilities of an answer's token and the runner-up. A
random model has near ties, which rounding decides; a question with one is not asked."""
_ASKING = 4
_TIMEOUT = 120.0


class Question(NamedTuple):
    document: int
    text: str


class Expected(NamedTuple):
    """`margin` is the least difference between a token's log-probability and the runner-up's."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    margin: float

    def matches(self, answer: Completion) -> bool:
        return self.tokens == answer.tokens and all(
            abs(expected - found) <= LOGPROB_TOLERANCE
            for expected, found in zip(self.logprobs, answer.logprobs, strict=True)
        )


def all_questions(seed: int) -> list[Question]:
    """Three questions about each document; the documents depend on the seed."""
    found = []
    for number in range(DOCUMENTS):
        table = 1000 + 100 * seed + number
        text = document(table, ROWS)
        asked = random.Random(table).sample(questions(table, ROWS), 3)
        found += [Question(number, prompt(text, question)) for question in asked]
    return found


def generation(**more: object) -> dict[str, Any]:
    """The parameters of each request: a greedy answer of a fixed length."""
    return greedy(TOKENS, **{"logprobs": 2, **more})


def ask_for_reference(
    cluster: LocalCluster, model_uid: str, asked: Sequence[Question]
) -> Mapping[Question, Expected]:
    """Ask a model that shares nothing; return the answers that have no near tie."""

    def ask(question: Question) -> Expected:
        body = generation(model=model_uid, prompt=question.text)
        answer = requests.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=_TIMEOUT)
        answer.raise_for_status()
        return _expected(answer.json())

    with ThreadPoolExecutor(_ASKING) as pool:
        answers = dict(zip(asked, pool.map(ask, asked), strict=True))
    return {question: answer for question, answer in answers.items() if answer.margin > MARGIN}


def _expected(answer: dict[str, Any]) -> Expected:
    completion = Completion.from_json(answer, 0.0)
    margins = []
    for likely in answer["choices"][0]["logprobs"]["top_logprobs"]:
        first, second = sorted(likely.values(), reverse=True)[:2]
        margins.append(first - second)
    return Expected(completion.tokens, completion.logprobs, min(margins))
