"""Reads from a request to a text route what its prompt is made of and whether to keep it.

What only decides where a request goes never fails: what cannot be read has no text, and the request
goes by backlog alone. What decides what the model is given is read, or refused.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from xinference_xavier.errors import shown
from xinference_xavier.frontend.model_router import NO_TEXT
from xinference_xavier.protocol.prefixes import LORA
from xinference_xavier.routing.texts import PIECE, Text, text_of
from xinference_xavier.runtime.aio import in_thread

MAX_TEXT = 4 << 20
"""Characters. Hashing a longer text would take longer than the choice may take. What is no text
counts as a piece, however long it is."""
MAX_PARTS = 200_000
"""Items of lists and objects, such as the ids of tokens; to read so many takes 0.1 s."""
SALT = "cache_salt"
"""The field that names a tenant."""
_FIELDS = (SALT, LORA, "tools", "system", "instructions", "prompt", "messages", "input")
"""What the keys of a prompt depend on. Tools come first, as in the templates of Qwen3.5 and GLM; in
others, such as Qwen3's, the system prompt does."""
_ANSWER_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""What limits an answer. The first one counts, as in xinference."""
_MAX_ANSWER = 1 << 31
"""Tokens. More than any context is no limit, and may be too large for a float."""
_MEDIA = {"audio", "audio_url", "image", "image_url", "input_audio", "video", "video_url"}
"""Types of what is no text in a message."""
RETENTIONS = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}
"""Seconds, by OpenAI's `prompt_cache_retention`."""
_LONG = 64 << 10
"""Bytes of a body that is read by another thread."""


class Question(NamedTuple):
    """What the router needs to know of a request."""

    text: Text
    session: str
    """The session named by the client; empty without one."""
    request_id: str
    """The request id given by the client; empty without one."""
    max_tokens: int
    """Most tokens of the answer that the client asks for; 0 if it does not say."""


async def read_question(
    request: Mapping[str, Any],
    size: int,
    session: str | None,
    before: Mapping[str, Any] | None = None,
    chat: Mapping[str, Any] | None = None,
) -> Question:
    """`size` is that of the request's body. `session` is the one that a header names, `before` the
    content of a named prefix with which the request begins, `chat` what the model gets of a request
    that is translated for it."""

    def read() -> Question:
        whole = request if chat is None else {**chat, SALT: request.get(SALT)}
        text = prompt_text(whole if before is None else with_prefix(whole, before))
        named = request.get("request_id")
        request_id = named if isinstance(named, str) else ""
        return Question(text, session_of(request, session), request_id, _max_tokens(request))

    short = size < _LONG and before is None  # a named text may have megabytes
    return read() if short else await in_thread(read)


class Keep(NamedTuple):
    """What a request says about keeping its prefix."""

    name: str = ""
    """The named prefix with which the request begins."""
    tenant: str = ""
    """The request's `cache_salt`."""
    prompt_s: float = 0.0
    """Seconds for which its whole prompt is to be kept; 0 if it does not say so."""
    marks: bool = False
    """True if parts of it may be marked, as in Anthropic's API."""


def read_keep(request: Mapping[str, Any], header: str | None, marks: bool) -> Keep:
    """`header` is the value of `x-xavier-prefix`; `cache_salt` is valid. Raises ValueError."""
    name = header or request.get("prefix_name")
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(
            f"prefix_name={shown(name)} is not the name of a prefix; give a text, or leave it out"
        )
    retention = request.get("prompt_cache_retention")
    if request.get("request_id"):  # by which its client may abort it: it must stay as it is
        retention = None
    seconds = RETENTIONS.get(retention, 0.0) if isinstance(retention, str) else 0.0
    return Keep(name or "", request.get(SALT) or "", seconds, marks)


def with_prefix(request: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """The request as if its client had sent the content of a named prefix, too."""
    found = dict(request)
    for field in ("prompt", "input"):
        if isinstance(prompt := request.get(field), str):
            found[field] = content.get("prompt", "") + prompt
    for field in ("messages", "tools"):
        if isinstance(items := request.get(field, []), list):
            found[field] = [*content.get(field, ()), *items]
    return found


def prompt_text(request: Mapping[str, Any]) -> Text:
    parts = _parts({name: request[name] for name in _FIELDS if request.get(name)})
    return NO_TEXT if parts is None else text_of(parts)


def _parts(request: Mapping[str, Any]) -> list[str | bytes] | None:
    """All texts and numbers in it, with the names of their fields; those of media as bytes. A block
    of text is its text, whatever is noted beside it, such as `cache_control`. None if they are too
    long or too many."""
    parts, length, seen = list[str | bytes](), 0, 0
    rest: list[tuple[object, bool]] = [(request, False)]  # the next one last, and if it is media
    while rest:
        value, media = rest.pop()
        if isinstance(value, (list, dict)):
            seen += len(value)
            if seen > MAX_PARTS:
                return None
        if isinstance(value, list):
            rest += [(item, media) for item in reversed(value)]
            continue
        if isinstance(value, dict):
            kind = value.get("type")
            if kind == "text" and isinstance(text := value.get("text"), str):
                value = text
            elif isinstance(kind, str) and kind in _MEDIA:
                rest += [(item, True) for item in reversed(value.values())]
                value = kind
            else:
                for name, item in reversed(value.items()):
                    rest += [(item, media), (name, media)]
                continue
        if value is None:
            continue
        part = str(value)
        inline = part.startswith("data:") and ";base64," in part[:100]
        medium = media or inline
        length += PIECE if medium else len(part) + 1
        if length > MAX_TEXT:
            return None
        parts.append(part.encode("utf-8", "surrogatepass") if medium else part)
    return parts


def session_of(request: Mapping[str, Any], header: str | None) -> str:
    """The session that a client names; empty if it names none."""
    named = (header, request.get("prompt_cache_key"), _session_of_user(request.get("metadata")))
    return next((each[:256] for each in named if each and isinstance(each, str)), "")


def _max_tokens(request: Mapping[str, Any]) -> int:
    given = (request.get(name) for name in _ANSWER_FIELDS)
    return next((each for each in given if type(each) is int and 0 < each <= _MAX_ANSWER), 0)


def _session_of_user(metadata: object) -> str:
    """The session in the id of the user that Claude Code sends; a user alone is no session."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str):
        return ""
    if "_session_" in user:
        return user.rpartition("_session_")[2]
    try:  # as later versions put it
        named = json.loads(user)
    except (ValueError, RecursionError):
        return ""
    session = named.get("session_id") if isinstance(named, dict) else None
    return session if isinstance(session, str) else ""
