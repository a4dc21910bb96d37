"""Usage is completed in answers and events, and everything else goes on as it came."""

from __future__ import annotations

import json

import pytest

from xinference_xavier.serving.prefixes.usage import counted


async def everything() -> float:
    return 1.0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"data: [DONE]\r\n\r\n",
        b'data: {"error": "prompt_tokens"}\r\n\r\n',
        b'data: {"prompt_tokens": 1',
        b'"prompt_tokens"',
        b'{"usage": {"prompt_tokens": null}}',
        b'{"usage": [{"prompt_tokens": 3}]}',
        '{"text": "\\"prompt_tokens\\": 1"}',
    ],
)
async def test_what_has_no_usage_is_left_alone(answer: bytes | str) -> None:
    assert await counted(answer, everything) == answer  # type: ignore[type-var]


async def test_an_answer_keeps_its_kind_and_its_other_fields() -> None:
    answer = json.dumps({"text": "é", "usage": {"prompt_tokens": 3}, "id": 1})
    found = await counted(answer, everything)
    assert json.loads(found) == {
        "text": "é",
        "usage": {"prompt_tokens": 3, "cache_creation_input_tokens": 3},
        "id": 1,
    }
    assert await counted(answer.encode(), everything) == found.encode()
