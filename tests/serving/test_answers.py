"""Failures are HTTP answers, and an API key is only good for its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Request

from xinference_xavier.errors import ExplainError, NotFoundError
from xinference_xavier.serving.answers import answered_for, model_access


async def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (NotFoundError("no such model"), 404, "no such model"),
        (ExplainError("no replica is there"), 503, "no replica is there"),
        (ConnectionRefusedError("far away"), 503, "the tracker of 'm' does not answer"),
        (TimeoutError(), 503, "the tracker of 'm' does not answer"),
    ],
)
async def test_a_failure_is_an_answer(error: Exception, status: int, detail: str) -> None:
    with pytest.raises(HTTPException) as raised:
        await answered_for("m", fails(error))
    assert (raised.value.status_code, raised.value.detail) == (status, detail)
    assert ("x-xavier-not-found" in (raised.value.headers or {})) == (status == 404)


async def test_other_errors_pass() -> None:
    with pytest.raises(KeyError):
        await answered_for("m", fails(KeyError("bug")))


class Key(SimpleNamespace):
    def has_model_access(self, model_uid: str, model_type: str) -> bool:
        return (model_uid, model_type) == ("mine", "LLM")


class Service:
    """xinference's, up to 4.0 and later."""

    def validate_model_access(self, token: str, model_uid: str, model_type: str) -> bool:
        return (token, model_uid, model_type) == ("token", "mine", "LLM")


def request(**state: Any) -> Request:
    headers = [(b"authorization", b"Bearer token")]
    return Request({"type": "http", "headers": headers, "state": state})


@pytest.mark.parametrize("state", [{"authenticated_api_key": Key()}, {}])
def test_a_key_is_good_for_its_models_only(state: Any) -> None:
    check = model_access(SimpleNamespace(auth_enabled=True, auth_service=Service()))
    check(request(**state), "mine")
    with pytest.raises(HTTPException, match="the API key is not valid for model 'other'"):
        check(request(**state), "other")


def test_without_authentication_every_model_may_be_asked() -> None:
    check = model_access(SimpleNamespace(auth_enabled=False, auth_service=None))
    check(request(), "other")
