"""Requests to the text routes, and where their answers say that they went."""

from collections.abc import Mapping
from typing import Any, Protocol

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT_ROUTES = (COMPLETIONS, CHAT, "/v1/messages", "/v1/responses")


def question(path: str, text: str) -> dict[str, Any]:
    """The part of a body that is about the prompt."""
    fields = {COMPLETIONS: {"prompt": text}, "/v1/responses": {"input": text}}
    return fields.get(path, {"messages": [{"role": "user", "content": text}]})


def body_of(path: str, model: str, text: str, tokens: int = 1, **more: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": model, limit: tokens, **question(path, text), **more}


class Answer(Protocol):
    @property
    def headers(self) -> Mapping[str, str]: ...


def route_of(answer: Answer) -> tuple[str, str]:
    """The replica that an answer names, and the reason."""
    route = answer.headers.get("x-xavier-route", "")
    return answer.headers.get("x-xavier-replica", ""), route.split(";")[0]
