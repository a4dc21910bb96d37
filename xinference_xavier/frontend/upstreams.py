"""The HTTP servers of a model's replicas, and which of them gets a request that is not routed.

Threading: one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

import httpx

from xinference_xavier.frontend.model_router import CLOSED
from xinference_xavier.protocol.startup_errors import without_rank

Headers = Sequence[tuple[bytes, bytes]]

_CONNECT = 5.0  # seconds
_HEALTH = 5.0  # seconds
_IDLE = 2.0
"""Seconds for which a connection is kept. vLLM closes them after five: a request that meets that
moment would fail."""
_NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)


class UpstreamError(Exception):
    """The server did not answer. `reached` says whether it may have begun to."""

    def __init__(self, reason: str, reached: bool) -> None:
        self.reached = reached
        super().__init__(reason)


class NotHttpError(Exception):
    """What the client sent cannot be sent again, such as a header with control characters."""


class Upstream:
    """One server. `running` counts the requests that are there."""

    def __init__(self, name: str, url: str, transport: httpx.AsyncBaseTransport) -> None:
        self.name = name
        self.running = 0
        self.used = 0
        """The number of its latest request."""
        self.closed_until = 0.0
        self._url = httpx.URL(url)
        self._transport = transport

    async def send(
        self, method: str, target: str, headers: Headers, content: AsyncIterator[bytes] | None
    ) -> httpx.Response:
        """The beginning of the answer. Close it. Raises UpstreamError and NotHttpError.

        The request has no body if `content` is None.
        """
        try:
            # As part of a URL it would be normalized.
            whole = self._url.raw_path.rstrip(b"/") + target.encode("latin-1")
            timeout = httpx.Timeout(None, connect=_CONNECT).as_dict()
            extensions = {"timeout": timeout, "target": whole}
            request = httpx.Request(
                method, self._url, headers=headers, content=content, extensions=extensions
            )
            return await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise _failure(error) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise NotHttpError(f"the request cannot be passed on ({error})") from error

    async def healthy(self) -> bool:
        try:
            async with asyncio.timeout(_HEALTH):
                response = await self.send("GET", "/health", [], None)
                await response.aclose()
        except (UpstreamError, TimeoutError):
            return False
        return response.status_code == 200


def _failure(error: httpx.TransportError) -> UpstreamError | NotHttpError:
    if isinstance(error, httpx.LocalProtocolError):
        return NotHttpError(f"the request cannot be passed on ({error})")
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UpstreamError(reason, not isinstance(error, _NOT_REACHED))


async def read(response: httpx.Response) -> AsyncIterator[bytes]:
    """The answer's bytes as they come. Raises UpstreamError if the server breaks."""
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError as error:
        raise UpstreamError(f"{type(error).__name__}: {error}", True) from error


class Upstreams:
    """`urls` by the names by which the tracker knows the replicas. `clock` returns monotonic
    seconds."""

    def __init__(self, urls: Mapping[str, str], clock: Callable[[], float] = time.monotonic):
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE
        )
        self._transport = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._all = {name: Upstream(name, url, self._transport) for name, url in urls.items()}
        self._numbers = itertools.count(1)
        self._clock = clock

    @property
    def names(self) -> list[str]:
        return list(self._all)

    def named(self, replica: str) -> Upstream | None:
        """Of a replica, or of one engine of it."""
        return self._all.get(replica) or self._all.get(without_rank(replica))

    def serves(self, replica: str) -> bool:
        return self.named(replica) is not None

    def fewest(self, but: Collection[Upstream] = ()) -> Upstream | None:
        """That with the fewest requests, in turn among equals; one that failed a moment ago only if
        there is no other."""
        now = self._clock()
        left = [each for each in self._all.values() if each not in but]
        return min(
            left, key=lambda each: (each.closed_until > now, each.running, each.used), default=None
        )

    def begin(self, upstream: Upstream) -> None:
        """A request goes there."""
        upstream.running += 1
        upstream.used = next(self._numbers)

    def end(self, upstream: Upstream) -> None:
        upstream.running -= 1

    def close(self, upstream: Upstream) -> None:
        """It failed a request."""
        upstream.closed_until = self._clock() + CLOSED

    async def healthy(self) -> bool:
        """Whether any server says that it is."""
        asking = [asyncio.ensure_future(each.healthy()) for each in self._all.values()]
        try:
            for first in asyncio.as_completed(asking):
                if await first:
                    return True
            return False
        finally:
            for each in asking:
                each.cancel()

    async def aclose(self) -> None:
        await self._transport.aclose()
