"""What a replica listens on, and what it tells its peers."""

import asyncio
import socket

import xoscar

from xinference_xavier.addresses import join_address, split_address
from xinference_xavier.cancels import mend_cancels
from xinference_xavier.errors import TransportError


def local_host_towards(address: str) -> str:
    """The own host as seen on the way to `address`: what peers on that network can reach."""
    host, port = split_address(address)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing
        probe.connect(target)
        return str(probe.getsockname()[0])


def free_ports(host: str, port_range: tuple[int, int], most: int = 100) -> int:
    """How many ports of the range could be listened on now; counts up to `most`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    free = 0
    for port in range(port_range[0], port_range[1] + 1):
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        free += 1
        if free == most:
            break
    return free


async def listen(host: str, port_range: tuple[int, int] | None) -> xoscar.MainActorPoolType:
    """An xoscar pool without sub-processes, on a free port of `host` within the range.

    Raises:
        TransportError: no port of the range is free, or `host` is not this machine's.
    """
    mend_cancels()
    ports = range(port_range[0], port_range[1] + 1) if port_range else (0,)
    error: OSError | None = None
    for port in ports:
        try:
            return await xoscar.create_actor_pool(
                join_address(host, port), n_process=0, use_uvloop=False
            )
        except OSError as e:
            error = e
            await asyncio.sleep(0)
    where = f"xavier_port_range={ports[0]}-{ports[-1]}" if port_range else f"xavier_host={host!r}"
    raise TransportError(
        f"{where} offers no port to listen on ({error}); choose a free one of this host"
    )
