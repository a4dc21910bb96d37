"""The parts of the examples that need no running model; `tests/e2e` runs them with one."""

import json

import pytest

from examples.asking import Answer, streamed
from examples.documents import document, people, questions
from examples.retrieval import PASSAGES_PER_QUESTION, retrieve
from xinference_xavier.stats.schema import Hits

LIBRARY = [document(seed, 20) for seed in range(5)]


def event(**choice: object) -> str:
    return "data: " + json.dumps({"choices": [choice]})


def test_the_first_piece_is_the_first_with_text() -> None:
    """A chat begins with its role, and a token may be half of a character."""
    stream = [
        event(delta={"role": "assistant"}),
        "",
        ": still there",
        event(delta={"content": ""}),
        event(delta={"content": "To"}),
        event(text="day"),
        "data: [DONE]",
    ]
    assert list(streamed(iter(stream))) == ["To", "day"]


def test_a_failure_within_the_stream_ends_the_program_with_its_reason() -> None:
    with pytest.raises(SystemExit, match="out of memory"):
        list(streamed(iter(['data: {"error": "out of memory"}'])))


def test_an_answer_shows_where_its_prompt_came_from() -> None:
    shown = str(Answer("x", 0.5, "m-rep1", Hits(local_pool=128, remote=5_120, computed=52)))
    assert "0.500 s to the first token, 5,300 tokens" in shown
    assert "128 local pool, 0 disk, 5,120 remote, 52 computed (m-rep1)" in shown


@pytest.mark.parametrize("seed", range(5))
def test_the_passage_that_answers_is_among_those_found(seed: int) -> None:
    for question in questions(seed, 20):
        assert seed in retrieve(LIBRARY, question), question


def test_passages_come_in_the_same_order_whichever_ranks_first() -> None:
    first, second = people(1, 20)[0], people(3, 20)[0]
    for most, least in ((first, second), (second, first)):
        question = f"{most.name}, {most.email}, {most.phone}, or {least.name}?"
        assert retrieve(LIBRARY, question) == [1, 3]
    assert PASSAGES_PER_QUESTION == 2
