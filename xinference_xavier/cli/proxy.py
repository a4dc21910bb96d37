"""The proxy in a process of its own: its arguments, its tracker and its server."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
import xoscar

from xinference_xavier.cli.standalone import check_name, check_reachable
from xinference_xavier.client.client import check_url
from xinference_xavier.errors import ConfigError, NotFoundError
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.proxy import make_app
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.frontend.upstreams import Upstreams
from xinference_xavier.protocol.load import check_observation
from xinference_xavier.protocol.startup_errors import without_rank
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import join_address, without_brackets
from xinference_xavier.runtime.deadline import within

__all__ = ["check_reachable", "parse_replicas", "serve"]

logger = logging.getLogger(__name__)

_DEADLINE = 10.0  # seconds
_OPTION = "replica"


def parse_replicas(given: Sequence[str]) -> dict[str, str]:
    """URLs by name, of words such as `a=http://10.0.0.1:8000`. Raises ConfigError."""
    urls: dict[str, str] = {}
    for word in given:
        name, equals, url = word.partition("=")
        if not equals or not _is_url(url):
            raise ConfigError(
                _OPTION, word, "is not a name and a URL", "write for example a=http://10.0.0.1:8000"
            )
        check_name(_OPTION, name)
        if name in urls:
            raise ConfigError(_OPTION, name, "is given twice", "give each server its own name")
        urls[name] = url
    return urls


def _is_url(text: str) -> bool:
    try:
        url = check_url(_OPTION, text)
    except ConfigError:
        return False
    return not (url.userinfo or url.query or url.fragment)


class _Server(uvicorn.Server):
    """Its caller handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    model_uid: str,
    tracker: str,
    urls: Mapping[str, str],
    *,
    at: tuple[str, int],
    queue: int | None,
    listening: Callable[[str], object],
    until: asyncio.Event,
) -> None:
    """Serve the proxy at host and port until `until` is set and all answers are complete.

    `listening` is called once with its URL. Raises ConfigError if it cannot listen there.
    """

    async def find(uid: str) -> Any:
        address = without_brackets(tracker)
        try:
            return await within(_DEADLINE, xoscar.actor_ref(address, tracker_uid(uid)))
        except xoscar.ActorNotExist as error:
            raise NotFoundError(f"model {uid!r} does not share its cache here") from error

    upstreams = Upstreams(urls)
    routers = Routers(find, lambda: ModelRouter(queue=queue, serves=upstreams.serves))
    app = make_app(upstreams, lambda: routers.get(model_uid))
    # The headers of the servers are passed on instead of uvicorn's.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, date_header=False
    )
    server = _Server(config)
    with _listen(*at) as listener:
        checking = asyncio.ensure_future(_check_names(find, model_uid, urls))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        listening(_url(at[0], listener.getsockname()[1]))
        ending = asyncio.ensure_future(until.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        for task in (checking, ending):
            task.cancel()
        await routers.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((without_brackets(host), port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "address",
            join_address(host, port),
            f"cannot be used ({error})",
            "use a free port of this host",
        ) from None


def _url(host: str, port: int) -> str:
    plain = without_brackets(host)
    return f"http://[{plain}]:{port}" if ":" in plain else f"http://{plain}:{port}"


async def _check_names(find: Callable[[str], Any], model_uid: str, names: Collection[str]) -> None:
    """Warn of names that the tracker does not know."""
    try:
        tracker = await find(model_uid)
        missing = [name for name in names if not await _members_of(tracker, name)]
        if not missing:
            return
        observing = tracker.observe("", 0, 0, 0.0)
        loads = check_observation(await within(_DEADLINE, observing)).loads
        known = sorted({without_rank(each.replica) for each in loads})
    except NotFoundError:
        logger.warning("the tracker serves no model %s; requests go in turn", model_uid)
    except Exception as error:
        logger.warning("the tracker does not answer (%s); requests go in turn", error)
    else:
        logger.warning(
            "the tracker does not know %s yet; it knows %s",
            ", ".join(missing),
            ", ".join(known) or "no replica",
        )


async def _members_of(tracker: Any, name: str) -> list[Any]:
    members: list[Any] = await within(_DEADLINE, tracker.members_of(name))
    return members
