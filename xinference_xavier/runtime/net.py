"""Hosts and ports to listen on, and actor pools that do."""

import asyncio
import functools
import ipaddress
import logging
import socket
from typing import Any

import psutil
import xoscar

from xinference_xavier.errors import TransportError
from xinference_xavier.runtime.addresses import join_address, split_address

logger = logging.getLogger(__name__)

_PATCHED = "_xavier_patched"


def own_host(host: str | None, tracker_address: str) -> str:
    """The address to listen on: `host`, or our own in the network `host`, such as 10.0.0.0/8, or
    our own on the route to the tracker. Raises TransportError if we have none in the network."""
    if host is None:
        return local_host_towards(tracker_address)
    return _address_in(host) if "/" in host else host


def _address_in(network: str) -> str:
    """The lowest of our addresses in `network`, so that a restart finds the same one."""
    wanted = ipaddress.ip_network(network)
    interfaces = psutil.net_if_addrs().values()
    own = [
        ipaddress.ip_address(address.address)
        for interface in interfaces
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    found = [address for address in own if address.version == wanted.version and address in wanted]
    if not found:
        known = ", ".join(map(str, own))
        raise TransportError(
            f"xavier_host={network!r} contains no address of this host ({known}); "
            "name a network that all hosts of the replicas are on"
        )
    return str(min(found))


def local_host_towards(address: str) -> str:
    """Our own address on the route to `address`, which peers on that network can reach."""
    host, port = split_address(address)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # `connect` sends nothing over UDP
        probe.connect(target)
        return str(probe.getsockname()[0])


async def listen(host: str, port_range: tuple[int, int] | None) -> xoscar.MainActorPoolType:
    """Start an xoscar pool without sub-processes, on a free port of `host` within the range. Raises
    TransportError if the range has no free port, or this machine has no address `host`."""
    patch_cancels()
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
        f"{where} offers no port to listen on ({error}); choose an address and free ports of this "
        "host"
    )


def patch_cancels() -> None:
    """Make main pools of this process forward a cancel to their own sub-pools only. Idempotent;
    also ends loops that run already.

    A caller that abandons an xoscar call, as at our deadlines, sends a cancel message to the
    actor's pool. The main pool of xoscar 0.12 forwards a cancel for any address but its own to a
    sub-pool. If it listens on 0.0.0.0 and was reached at 127.0.0.1 or the host's address, it
    forwards the message to itself, forever, and occupies up to a whole core.
    """
    try:
        from xoscar.backends.indigen.pool import MainActorPool
        from xoscar.backends.message import MessageType

        handlers = MainActorPool._message_handler
        original = handlers[MessageType.cancel]
    except (ImportError, AttributeError, KeyError) as error:
        logger.warning(
            "cannot patch this xoscar: cancelled calls to a pool on 0.0.0.0 may occupy a core; "
            "start xinference with -H and the host's own address: error=%r",
            error,
        )
        return
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    async def cancel(pool: Any, message: Any) -> Any:
        if message.address not in pool.sub_processes:
            message.address = pool.external_address
        return await original(pool, message)

    setattr(cancel, _PATCHED, True)
    handlers[MessageType.cancel] = cancel
