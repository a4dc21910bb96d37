"""By which ids the engine of a `vllm serve` knows the requests of the text routes.

vLLM makes them of the header `x-request-id`. Only `/v1/responses` ignores it: there the body may
have an id, or else the first event of a streamed answer tells it.
"""

from __future__ import annotations

import re

HEADER = b"x-request-id"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_PATTERNS = {CHAT: "chatcmpl-{}", MESSAGES: "chatcmpl-{}", COMPLETIONS: "cmpl-{}-0"}
"""A completion of several prompts counts as known with the first of them."""
_CREATED = re.compile(rb'"id": ?"(resp_[\w-]{1,200})"')


def engine_ids(path: str, header: str, in_body: str) -> list[str]:
    """For a request with that id in its header, and that one in its body, perhaps empty."""
    if path == RESPONSES:
        return [_of_response(in_body)] if in_body else []
    return [_PATTERNS[path].format(header)] if path in _PATTERNS else []


def ids_in_answer(path: str, first: bytes) -> list[str]:
    """Those that the first bytes of the answer tell."""
    found = _CREATED.search(first) if path == RESPONSES else None
    return [_of_response(found[1].decode())] if found else []


def _of_response(request_id: str) -> str:
    return f"{request_id}_0"
