"""The transfer process: `python -m xinference_xavier.transfer FD`, started by the engine.

FD is one end of a socket pair. The process reads its `Startup` from it and answers with its
`Endpoint`, each a line of JSON. It ends when the other end closes, however the engine ended. It
also kills an engine that outlives its own parent.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time

import xoscar

from xinference_xavier.errors import LinkError, XavierError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import MAX_LINE, TRANSFER_UID, Endpoint, Startup
from xinference_xavier.runtime.host import GRACE, await_end
from xinference_xavier.runtime.net import listen
from xinference_xavier.transfer.actor import TransferActor, load_transport
from xinference_xavier.transfer.transports.selection import TransportSelector

logger = logging.getLogger(__name__)


async def _serve(engine: socket.socket, startup: Startup) -> None:
    region = Region(startup.region_fd, startup.rows, startup.row_bytes)
    try:
        transports = [
            load_transport(path)(region, startup.host, startup.port_range)
            for path in startup.transports
        ]
        pool = await listen(startup.host, startup.port_range)
    except XavierError as error:
        _give_up(engine, error)
        return
    # Modules stay loaded: searching them for garbage would delay fetches by 0.1 s.
    gc.freeze()
    selector = TransportSelector(transports)
    await xoscar.create_actor(
        TransferActor, startup, region, selector, address=pool.external_address, uid=TRANSFER_UID
    )
    endpoint = Endpoint(pool.external_address, selector.host)
    engine.sendall(json.dumps(endpoint._asdict()).encode() + b"\n")
    threading.Thread(target=region.populate, name="xavier-populate", daemon=True).start()
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


main()
