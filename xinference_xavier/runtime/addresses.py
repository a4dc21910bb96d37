"""Addresses of actors: `host:port`, IPv6 hosts in brackets, and a uid."""

from __future__ import annotations

import ipaddress

PORTS_PER_REPLICA = 3
"""Engine, transfer process, Gloo."""


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or (":" in host and not bracketed):
        raise ValueError(f"address {address!r} is not of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """True for an address that means "every interface" and that nobody can connect to elsewhere."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """True for an address that is of this host only, wherever it is used."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_address(address: str, via: str | None = None) -> str:
    """``address`` with a wildcard host replaced by one that can be connected to.

    ``via`` is an address at which the same host is known to be reached. Where that is a wildcard
    too, or missing, both ends are on this host: the loopback of the wildcard's family is taken.
    """
    host, port = split_address(address)
    if not is_wildcard(host):
        return address
    if via is not None:
        via_host, _ = split_address(via)
        if not is_wildcard(via_host):
            return join_address(via_host, port)
    return join_address("::1" if ":" in host else "127.0.0.1", port)


def replica_uid(incarnation: str) -> str:
    """The uid of a replica's actor at its engine's address."""
    return f"xavier-replica-{incarnation}"
