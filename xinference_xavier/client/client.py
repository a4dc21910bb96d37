"""How models share, asked over xinference's REST interface from Python.

    client = XavierClient("http://127.0.0.1:9997")
    print(client.status("my-model").totals.hits.ratio)

`AsyncXavierClient` is the same with `await`. Both raise `ApiError` for whatever goes wrong. They
need neither torch nor vLLM. A client may be used by one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import httpx

from xinference_xavier.errors import ApiError
from xinference_xavier.stats.answers import EventRecord, Explanation
from xinference_xavier.stats.reading import read
from xinference_xavier.stats.schema import ModelStatus

__all__ = ["AsyncXavierClient", "XavierClient"]

_TIMEOUT = 30.0
_EXPLAIN_TIMEOUT = 90.0
_SILENCE = 60.0
"""Seconds after which a stream that says nothing is given up: it says something every second."""

Messages = Sequence[Mapping[str, Any]]


class XavierClient:
    """`endpoint` is xinference's, `api_key` what it asks for where authentication is on."""

    def __init__(self, endpoint: str, api_key: str | None = None) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._http = httpx.Client(base_url=self._endpoint, headers=_headers(api_key))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[ModelStatus]:
        """All models that share, and whose tracker answers."""
        return [read(ModelStatus, each) for each in self.call("GET", "/v1/xavier")["models"]]

    def status(self, model_uid: str) -> ModelStatus:
        """How one model shares, at this moment."""
        return read(ModelStatus, self.call("GET", _path(model_uid)))

    def switch(self, model_uid: str, enabled: bool) -> ModelStatus:
        """Switch sharing on or off while the model runs."""
        return read(ModelStatus, self.call("POST", _path(model_uid), {"enabled": enabled}))

    def flush(self, model_uid: str) -> ModelStatus:
        """Have all replicas forget what they hold."""
        return read(ModelStatus, self.call("POST", _path(model_uid, "flush")))

    def explain(
        self, model_uid: str, prompt: str | None = None, *, messages: Messages | None = None
    ) -> Explanation:
        """Where the chunks of a prompt, or of a chat's messages, are, and what would be reused."""
        body = _question(prompt, messages)
        return Explanation.of(
            self.call("POST", _path(model_uid, "explain"), body, timeout=_EXPLAIN_TIMEOUT)
        )

    def events(self, model_uid: str) -> Iterator[EventRecord]:
        """What happened of late, then what happens, until the model ends."""
        for name, data in self._listen(model_uid):
            if name == "event":
                yield EventRecord.of(data)

    def watch(self, model_uid: str) -> Iterator[ModelStatus]:
        """The status, every second, until the model ends."""
        for name, data in self._listen(model_uid):
            if name == "status":
                yield read(ModelStatus, data)

    def cluster(self) -> dict[str, Any]:
        """What `doctor` looks at."""
        facts: dict[str, Any] = self.call("GET", "/v1/xavier_cluster", timeout=_EXPLAIN_TIMEOUT)
        return facts

    def call(
        self, method: str, path: str, body: object = None, *, timeout: float = _TIMEOUT
    ) -> Any:
        """One request; returns the decoded answer."""
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise _unreachable(self._endpoint, error) from error
        return _decoded(answer)

    def _listen(self, model_uid: str) -> Iterator[_Message]:
        stream: AbstractContextManager[httpx.Response] = self._http.stream(
            "GET", _path(model_uid, "events"), timeout=_SILENCE
        )
        try:
            with stream as answer:
                if answer.is_error:
                    answer.read()
                    _decoded(answer)
                parser = _Parser()
                for line in answer.iter_lines():
                    if (message := parser.feed(line)) is not None:
                        yield message
        except httpx.HTTPError as error:
            raise _unreachable(self._endpoint, error) from error


class AsyncXavierClient:
    """`XavierClient` for an event loop; see there."""

    def __init__(self, endpoint: str, api_key: str | None = None) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self._endpoint, headers=_headers(api_key))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[ModelStatus]:
        return [
            read(ModelStatus, each) for each in (await self.call("GET", "/v1/xavier"))["models"]
        ]

    async def status(self, model_uid: str) -> ModelStatus:
        return read(ModelStatus, await self.call("GET", _path(model_uid)))

    async def switch(self, model_uid: str, enabled: bool) -> ModelStatus:
        return read(ModelStatus, await self.call("POST", _path(model_uid), {"enabled": enabled}))

    async def flush(self, model_uid: str) -> ModelStatus:
        return read(ModelStatus, await self.call("POST", _path(model_uid, "flush")))

    async def explain(
        self, model_uid: str, prompt: str | None = None, *, messages: Messages | None = None
    ) -> Explanation:
        body = _question(prompt, messages)
        return Explanation.of(
            await self.call("POST", _path(model_uid, "explain"), body, timeout=_EXPLAIN_TIMEOUT)
        )

    async def events(self, model_uid: str) -> AsyncIterator[EventRecord]:
        async for name, data in self._listen(model_uid):
            if name == "event":
                yield EventRecord.of(data)

    async def watch(self, model_uid: str) -> AsyncIterator[ModelStatus]:
        async for name, data in self._listen(model_uid):
            if name == "status":
                yield read(ModelStatus, data)

    async def cluster(self) -> dict[str, Any]:
        facts: dict[str, Any] = await self.call(
            "GET", "/v1/xavier_cluster", timeout=_EXPLAIN_TIMEOUT
        )
        return facts

    async def call(
        self, method: str, path: str, body: object = None, *, timeout: float = _TIMEOUT
    ) -> Any:
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise _unreachable(self._endpoint, error) from error
        return _decoded(answer)

    async def _listen(self, model_uid: str) -> AsyncIterator[_Message]:
        stream: AbstractAsyncContextManager[httpx.Response] = self._http.stream(
            "GET", _path(model_uid, "events"), timeout=_SILENCE
        )
        try:
            async with stream as answer:
                if answer.is_error:
                    await answer.aread()
                    _decoded(answer)
                parser = _Parser()
                async for line in answer.aiter_lines():
                    if (message := parser.feed(line)) is not None:
                        yield message
        except httpx.HTTPError as error:
            raise _unreachable(self._endpoint, error) from error


class _Message(NamedTuple):
    name: str
    data: dict[str, Any]


class _Parser:
    """Server-sent events, line by line; of a message we need its name and its one line of data."""

    def __init__(self) -> None:
        self._name = self._data = ""

    def feed(self, line: str) -> _Message | None:
        field, _, value = line.partition(":")
        if field == "event":
            self._name = value.strip()
        elif field == "data":
            self._data = value.strip()
        elif not line and self._data:
            message = _Message(self._name, json.loads(self._data))
            self._name = self._data = ""
            return message
        return None


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _path(model_uid: str, action: str = "") -> str:
    path = f"/v1/xavier/{quote(model_uid, safe='')}"
    return f"{path}/{action}" if action else path


def _question(prompt: str | None, messages: Messages | None) -> dict[str, object]:
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    return {"messages": list(messages)} if messages is not None else {"prompt": prompt}


def _unreachable(endpoint: str, error: httpx.HTTPError) -> ApiError:
    return ApiError(
        f"{endpoint} does not answer ({type(error).__name__}: {error}); is xinference running "
        "there, and is this its endpoint?"
    )


def _decoded(answer: httpx.Response) -> Any:
    """The body of a good answer; raises ApiError for any other."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_success and body is not None:
        return body
    status = answer.status_code
    detail = body.get("detail") if isinstance(body, dict) else None
    # Without our routes, xinference answers these paths with its web page or a bare "Not Found".
    if (answer.is_success or status == 404) and detail in (None, "Not Found"):
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
