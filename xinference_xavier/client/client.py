"""Watch and steer the sharing of models over xinference's REST interface.

    client = XavierClient("http://127.0.0.1:9997")
    print(client.status("my-model").totals.hits.ratio)

The client raises `ApiError` for every failure, and needs neither torch nor vLLM. It may be used by
one thread at a time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

from xinference_xavier.client.login import stored_token
from xinference_xavier.errors import (
    NOT_FOUND_HEADER,
    ApiError,
    ConfigError,
    ModelNotFoundError,
    UnknownPrefixError,
    shown,
)
from xinference_xavier.limits import TICK
from xinference_xavier.stats.answers import (
    ENDED,
    SALT_HEADER,
    EventRecord,
    Explanation,
    ModelList,
    NamedPrefix,
    is_part_of_path,
)
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import ModelStatus

_TIMEOUT = 30.0
_LONG_TIMEOUT = 90.0
ANSWER_TIMEOUT = 300.0
_MAX_PORT = 65535
_NO_HEADERS: Mapping[str, str] = {}
Messages = Sequence[Mapping[str, Any]]
_NOT_FOUND = {"model": ModelNotFoundError, "prefix": UnknownPrefixError}
_T = TypeVar("_T")


class XavierClient:
    """`endpoint` is xinference's. Without `api_key`, which may be a token, too, requests carry the
    token that `xinference login` has stored for this endpoint. Raises ConfigError if either cannot
    be one."""

    def __init__(self, endpoint: str, api_key: str | None = None) -> None:
        _check_endpoint(endpoint)
        key = stored_token(endpoint) if api_key is None else api_key
        self._http = httpx.Client(base_url=endpoint, headers=_headers(key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> ModelList:
        """How each model shares now, or why that is not known."""
        return self._send("GET", "/v1/xavier", lambda answer: read(ModelList, answer))

    def status(self, model_uid: str) -> ModelStatus:
        """How one model shares now."""
        return self._send("GET", _path(model_uid), _model)

    def switch(self, model_uid: str, enabled: bool, *, for_s: float | None = None) -> ModelStatus:
        """Switch sharing on or off while the model runs. With `for_s`, the server puts back all
        that was changed for some time, after so many seconds from the last such change."""
        change = {"enabled": enabled, "for_s": for_s}
        return self._send("PATCH", _path(model_uid), _model, change)

    def set_routing(
        self, model_uid: str, routing: str, *, for_s: float | None = None
    ) -> ModelStatus:
        """Change how requests find a replica while the model runs: "auto", "backlog" or "off".
        `for_s` is as in `switch`."""
        change = {"routing": routing, "for_s": for_s}
        return self._send("PATCH", _path(model_uid), _model, change)

    def set_weights_version(self, model_uid: str, version: str) -> ModelStatus:
        """Let the replicas that were reset share again with those whose weights have the same
        `version`. `raw["answers"]` has the incarnations that "joined", those that were "not_reset"
        and those that are "unreachable"."""
        return self._send("PUT", _path(model_uid, "/weights"), _model, {"version": version})

    def flush(self, model_uid: str) -> ModelStatus:
        """Empty the pools of all replicas."""
        return self._send("POST", _path(model_uid, "/flush"), _model)

    def explain(
        self,
        model_uid: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Messages | None = None,
        cache_salt: str | None = None,
    ) -> Explanation:
        """The places of the chunks of a prompt or a chat, for a tenant or for none."""
        if (prompt is None) == (messages is None):
            raise ValueError("give either a prompt or messages")
        fields = {"prompt": prompt, "messages": messages, "tools": tools, "cache_salt": cache_salt}
        question = {name: value for name, value in fields.items() if value is not None}
        path = _path(model_uid, "/explain")
        return self._send("POST", path, Explanation.from_json, question, _LONG_TIMEOUT)

    def add_prefix(
        self,
        model_uid: str,
        name: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Messages | None = None,
        ttl: str | float = "1h",
        copies: int | str = 1,
        retention: str = "soft",
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> NamedPrefix:
        """Let replicas compute and keep a prompt, or messages and tools, under a name, for an
        adapter or none. One of the same name and `cache_salt` is replaced. Each use begins its
        lifetime anew."""
        fields = {
            **{"name": name, "prompt": prompt, "messages": messages, "tools": tools},
            **{"ttl": ttl, "copies": copies, "retention": retention, "cache_salt": cache_salt},
            "lora_name": lora_name,
        }
        body = {key: value for key, value in fields.items() if value is not None}
        return self._send(
            "POST", _path(model_uid, "/prefixes"), NamedPrefix.from_json, body, _LONG_TIMEOUT
        )

    def prefixes(self, model_uid: str, cache_salt: str | None = None) -> list[NamedPrefix]:
        """The model's named prefixes with this `cache_salt`, or without one."""
        return self._send(
            "GET",
            _path(model_uid, "/prefixes"),
            lambda answer: [*map(NamedPrefix.from_json, answer["prefixes"])],
            headers=_tenant(cache_salt),
        )

    def prefix(self, model_uid: str, name: str, cache_salt: str | None = None) -> NamedPrefix:
        """A named prefix. Raises UnknownPrefixError."""
        path, headers = _prefix_path(model_uid, name), _tenant(cache_salt)
        return self._send("GET", path, NamedPrefix.from_json, headers=headers)

    def watch_prefix(
        self, model_uid: str, name: str, cache_salt: str | None = None
    ) -> Iterator[NamedPrefix]:
        """The named prefix every second, until it is kept or has failed. Raises
        UnknownPrefixError."""
        while (latest := self.prefix(model_uid, name, cache_salt)).state not in ENDED:
            yield latest
            time.sleep(TICK)
        yield latest

    def change_prefix(
        self,
        model_uid: str,
        name: str,
        cache_salt: str | None = None,
        *,
        ttl: str | float | None = None,
        copies: int | str | None = None,
        retention: str | None = None,
    ) -> NamedPrefix:
        """Change the terms that are not None. Raises UnknownPrefixError."""
        fields = {"ttl": ttl, "copies": copies, "retention": retention}
        terms = {key: value for key, value in fields.items() if value is not None}
        path, headers = _prefix_path(model_uid, name), _tenant(cache_salt)
        return self._send("PATCH", path, NamedPrefix.from_json, terms, headers=headers)

    def remove_prefix(self, model_uid: str, name: str, cache_salt: str | None = None) -> None:
        """Forget a named prefix. Raises UnknownPrefixError."""
        path, headers = _prefix_path(model_uid, name), _tenant(cache_salt)
        return self._send("DELETE", path, lambda answer: None, headers=headers)

    def complete(self, model_uid: str, prompt: str, *, max_tokens: int) -> dict[str, Any]:
        """xinference's answer to a prompt: greedy, and always `max_tokens` long."""
        body = {
            **{"model": model_uid, "prompt": prompt, "max_tokens": max_tokens},
            **{"temperature": 0, "ignore_eos": True},
        }
        return self._send("POST", "/v1/completions", dict[str, Any], body, ANSWER_TIMEOUT)

    def cluster(self) -> dict[str, Any]:
        """What `doctor` examines."""
        return self._send("GET", "/v1/cluster/xavier", dict[str, Any], timeout=_LONG_TIMEOUT)

    def events(self, model_uid: str) -> Iterator[EventRecord]:
        """Recent events, then new ones as they happen, until the model ends."""
        path, after = _path(model_uid, "/events"), 0

        def look() -> list[EventRecord]:
            nonlocal after
            last, new = self._send("GET", f"{path}?after={after}", _events)
            after = last
            return new

        for new in self._each_second(look):
            yield from new

    def watch(self, model_uid: str) -> Iterator[ModelStatus]:
        """The status every second, until the model ends."""
        path, known = _path(model_uid), _NO_HEADERS
        status: ModelStatus

        def look() -> ModelStatus:
            nonlocal known, status
            answer = self._request("GET", path, headers=known)
            if answer.status_code != HTTPStatus.NOT_MODIFIED:
                status = _read(_model, _decoded(answer))
                known = {"If-None-Match": answer.headers.get("etag", "")}
            return status

        return self._each_second(look)

    def _send(
        self,
        method: str,
        path: str,
        read_answer: Callable[[Any], _T],
        body: object = None,
        timeout: float = _TIMEOUT,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> _T:
        answer = self._request(method, path, body, timeout, headers)
        return _read(read_answer, _decoded(answer))

    def _request(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: float = _TIMEOUT,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> httpx.Response:
        with _failures(self._http.base_url):
            return self._http.request(method, path, json=body, timeout=timeout, headers=headers)

    def _each_second(self, look: Callable[[], _T]) -> Iterator[_T]:
        """What `look` returns, until the model ends. Raises ModelNotFoundError if it never was."""
        yield look()
        while True:
            time.sleep(TICK)
            try:
                found = look()
            except ModelNotFoundError:
                return
            yield found


def _read(kind: Callable[[Any], _T], answer: Any) -> _T:
    """Raises ApiError for an answer that is of no such kind."""
    try:
        return kind(answer)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ApiError(
            f"the answer {shown(answer)} cannot be read ({type(error).__name__}: {error}); use the "
            "same version of xinference-xavier here and there"
        ) from error


def _model(answer: Any) -> ModelStatus:
    return read(ModelStatus, answer)


def _events(answer: Any) -> tuple[int, list[EventRecord]]:
    """The number of the last one, and events."""
    return int(answer["last"]), [*map(EventRecord.from_json, answer["events"])]


def _path(model_uid: str, action: str = "") -> str:
    """Raises ModelNotFoundError for what can be no model's uid here."""
    return f"/v1/xavier/{_part(model_uid, ModelNotFoundError)}{action}"


def _prefix_path(model_uid: str, name: str) -> str:
    """Raises UnknownPrefixError, too."""
    return _path(model_uid, f"/prefixes/{_part(name, UnknownPrefixError)}")


def _part(name: str, not_found: type[ApiError]) -> str:
    if not is_part_of_path(name):
        raise not_found(f"{name!r} is not found: names here have no slash, and not only dots", 404)
    return quote(name, safe="")


def _tenant(cache_salt: str | None) -> dict[str, str]:
    """The headers that name the tenant."""
    return {} if cache_salt is None else {SALT_HEADER: quote(cache_salt, safe="")}


def _check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for what cannot be a server's URL."""
    try:
        url = httpx.URL(endpoint)
        url.host.encode("idna")  # as whoever looks it up does
    except (httpx.InvalidURL, UnicodeError):
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > _MAX_PORT:
        raise ConfigError(
            "endpoint", endpoint, "is not a server's URL", "write for example http://10.0.0.1:9997"
        )


def _headers(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    odd = "".join(each for each in api_key if not " " < each <= "~")
    if odd:
        raise ConfigError("api_key", odd, "is no part of a key", "copy the key again")
    return {"Authorization": f"Bearer {api_key}"}


@contextmanager
def _failures(endpoint: httpx.URL) -> Iterator[None]:
    """Raises ApiError where nothing answers."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ApiError(
            f"{str(endpoint).rstrip('/')} does not answer ({type(error).__name__}: {error}); is "
            "xinference running there, and is this its endpoint?"
        ) from error


def _decoded(answer: httpx.Response) -> Any:
    """The body of a good answer; raises ApiError for any other."""
    try:
        body = answer.json()
    except (RecursionError, ValueError):
        body = None
    status = answer.status_code
    detail = body.get("detail") if isinstance(body, dict) else None
    if answer.is_success and body is not None:
        return body
    if NOT_FOUND_HEADER in answer.headers:
        found = answer.headers[NOT_FOUND_HEADER]
        raise _NOT_FOUND.get(found, ModelNotFoundError)(str(detail), status)
    # Without our routes, xinference answers these paths with its web page or a 404 of its own.
    if answer.is_success or status == 404:
        raise ApiError(
            f"xinference at {answer.url.host} runs without this extension; start it with "
            "XINFERENCE_EXTENSIONS=xinference_xavier:extension",
            status,
        )
    if status in (401, 403):
        raise ApiError(
            f"xinference refuses it ({detail or answer.reason_phrase}); give an API key that has "
            "the rights, or log in with `xinference login`",
            status,
        )
    raise ApiError(str(detail or f"{status} {answer.reason_phrase}"), status)
