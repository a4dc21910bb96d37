"""The ids by which a vLLM server reports requests are those that the router expects."""

from __future__ import annotations

import pytest

from tests.frontend.cluster import SERVING
from xinference_xavier.engine.workload import _own_id
from xinference_xavier.frontend.asked import ROUTES
from xinference_xavier.frontend.vllm_ids import engine_ids, ids_in_answer
from xinference_xavier.protocol.load import Load, check_load, reported_id

HEADERS = ["1234", "0123456789abcdef" * 2, "b8c1e4d2-0000-4000-8000-0123456789ab", "7_x", "x-0"]


def reported(request: str) -> list[str]:
    """What the engine's side makes of vLLM's ids: with digits at the end, and of two answers."""
    return [_own_id(each) for each in (f"{request}-1a2b3c4d", f"1_{request}-1a2b3c4d")]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("/v1/chat/completions", "chatcmpl-{}"),
        ("/v1/messages", "chatcmpl-{}"),
        ("/v1/completions", "cmpl-{}-0"),
    ],
)
def test_vllm_makes_its_id_of_the_header(path: str, made: str, header: str) -> None:
    (name,) = engine_ids(path, header, "ignored")
    assert reported(made.format(header)) == [name, name]


def test_responses_have_the_id_in_their_body_or_tell_it() -> None:
    path = "/v1/responses"
    assert engine_ids(path, "ignored", "") == []
    (name,) = engine_ids(path, "ignored", "resp_mine")
    assert reported("resp_mine_0") == [name, name]
    event = b'event: response.created\ndata: {"response":{"id":"resp_0a1b","created_at":1}}\n\n'
    (told,) = ids_in_answer(path, event)
    assert reported("resp_0a1b_0") == [told, told]
    assert ids_in_answer("/v1/completions", event) == []
    assert ids_in_answer(path, b'{"id": 5}') == []


def test_every_text_route_but_one_is_covered_by_the_header() -> None:
    assert [path for path in ROUTES if not engine_ids(path, "x", "")] == ["/v1/responses"]
    assert engine_ids("/v1/embeddings", "x", "y") == []


def test_a_client_may_choose_an_id_of_any_length() -> None:
    """It must not void the replica's whole report."""
    (name,) = engine_ids("/v1/chat/completions", "x" * 10_000, "")
    known = _own_id(f"{name}-1a2b3c4d")
    assert known == reported_id(name)
    assert check_load(Load(SERVING, 0, 0.0, 1, known=(known,))).known == (known,)
