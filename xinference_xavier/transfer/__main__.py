"""The transfer process: `python -m xinference_xavier.transfer FD`, started by the engine.

FD is one end of a socket pair. The process reads its `Startup` from it and answers with its
`Endpoint`, each a line of JSON. Then its actor moves rows, so that the engine does not have to. It
ends when the other end closes, however the engine ended. It also kills an engine that outlives its
own parent.

Threading: an event loop. Blocking calls run on threads that all links share.
"""

import asyncio
import gc
import json
import logging
import os
import pkgutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import xoscar

from xinference_xavier.errors import LinkError, XavierError
from xinference_xavier.pool.region import Region, populate
from xinference_xavier.protocol.transfer import (
    MAX_LINE,
    TRANSFER_UID,
    Endpoint,
    Startup,
)
from xinference_xavier.runtime.host import GRACE, await_end
from xinference_xavier.runtime.net import listen
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.transfer.links import LinkContext, Receiver, Sender
from xinference_xavier.transfer.transports.base import Transport

logger = logging.getLogger(__name__)


class TransferActor(xoscar.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Pulls rows for its own engine, and sends rows that the engine granted to peers."""

    def __init__(
        self,
        startup: Startup,
        region: Region,
        transports: Sequence[Transport],
        unusable: Mapping[str, str],
    ) -> None:
        super().__init__()
        by_name = {transport.name: transport for transport in transports}
        log = RateLimitedLog(logger)
        self._context = LinkContext(startup.incarnation, region, by_name, unusable, log)
        self._receiver = Receiver(self._context)
        self._sender = Sender(self._context)
        # Called by our engine:
        self.pull = self._receiver.pull
        self.try_link = self._receiver.try_link
        # Called by a peer's transfer process:
        self.open_link = self._sender.open_link
        self.serve = self._sender.serve

    async def configure(self, secret: bytes) -> None:
        """Set the model's secret, which is new with every tracker."""
        self._context.secret = secret

    async def stats(self) -> dict[str, Any]:
        """`transport` names the transports with open links; all transports if there is no link."""
        linked_to = self._receiver.linked_to()
        links = [*linked_to.values(), *self._sender.transports()]
        names = [*self._context.transports]
        return {
            "transport": ", ".join([name for name in names if name in links] or names),
            "bytes_sent": self._context.bytes_sent,
            "links": len(links),
            "linked_to": linked_to,
            "obstacles": self._receiver.obstacles(),
        }

    async def close_links_except(self, members: frozenset[str]) -> None:
        """Close the links with replicas that are not members."""
        await self._receiver.close_links_except(members)
        await self._sender.close_links_except(members)


def load_transport(path: str) -> type[Transport]:
    """The class at "module:Class". Raises TypeError if it is not a Transport."""
    loaded = pkgutil.resolve_name(path)
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise TypeError(f"{path} is not a Transport")
    return loaded


def usable(startup: Startup, region: Region) -> tuple[list[Transport], dict[str, str]]:
    """The transports that work on this host, and why better ones do not. There may be none to
    begin with. Raises TransportError: the last one does not work."""
    kinds = [*map(load_transport, startup.transports)]
    found: list[Transport] = []
    unusable: dict[str, str] = {}
    for kind in kinds[:-1]:
        try:
            reason = kind.unfit()
            if reason is None:
                found.append(kind(region, startup.host, startup.port_range))
        except Exception as error:  # whatever it is, another one may work
            logger.warning("cannot use %s: error=%r", kind.name, error)
            reason = str(error) or type(error).__name__
        if reason is not None:
            unusable[kind.name] = reason
    found += [last(region, startup.host, startup.port_range) for last in kinds[-1:]]
    return found, unusable


async def _serve(engine: socket.socket, startup: Startup) -> None:
    region = Region(startup.region_fd, startup.rows, startup.row_bytes)
    try:
        transports, unusable = usable(startup, region)
        pool = await listen(startup.host, startup.port_range)
    except XavierError as error:
        _give_up(engine, error)
        return
    # Modules stay loaded: searching them for garbage would delay fetches by 0.1 s.
    gc.freeze()
    address = pool.external_address
    await xoscar.create_actor(
        TransferActor,
        startup,
        region,
        transports,
        unusable,
        address=address,
        uid=TRANSFER_UID,
    )
    engine.sendall(Endpoint(address).to_json())
    work = partial(populate, region.array)
    threading.Thread(target=work, name="xavier-populate", daemon=True).start()
    await asyncio.Event().wait()


def _give_up(engine: socket.socket, error: XavierError) -> None:
    engine.sendall(json.dumps({"error": str(error)}).encode() + b"\n")


def _end_with(engine: socket.socket) -> None:
    try:
        engine.recv(1)
    finally:  # recv raises if the engine ended without reading our answer
        os._exit(0)


def _end_engine_after(parent: int) -> None:
    """The engine ends by itself unless it hangs in C, perhaps with Python's lock."""
    try:
        engine = os.pidfd_open(os.getppid())
        await_end(parent)
    except OSError as error:
        logger.warning("cannot watch the engine's parent process: pid=%d error=%r", parent, error)
        return
    time.sleep(GRACE)
    logger.warning("the engine outlives its parent process, killing it: pid=%d", os.getppid())
    signal.pidfd_send_signal(engine, signal.SIGKILL)


def main() -> None:
    engine = socket.socket(fileno=int(sys.argv[1]))
    logging.basicConfig(format="%(asctime)s xavier-transfer %(levelname)s %(message)s")
    try:
        startup = Startup.from_json(engine.makefile("rb").readline(MAX_LINE + 1))
    except LinkError as error:
        _give_up(engine, error)
        return
    threading.Thread(target=_end_with, args=(engine,), daemon=True).start()
    if startup.parent is not None:
        watching = (startup.parent,)
        threading.Thread(target=_end_engine_after, args=watching, daemon=True).start()
    asyncio.run(_serve(engine, startup))


if __name__ == "__main__":
    main()
