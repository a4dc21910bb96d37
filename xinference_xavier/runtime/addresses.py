"""Addresses of actors: `host:port`, and a uid.

xoscar has no brackets around IPv6 hosts; people may write them.
"""

import ipaddress

PORTS_PER_REPLICA = 3  # of the engine, its transfer process and Gloo


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isdecimal() or (":" in host and _parsed(host) is None):
        raise ValueError(f"address {address!r} is not of the form host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"{host}:{port}"


def without_brackets(address: str) -> str:
    """The form that xoscar accepts."""
    return address.replace("[", "").replace("]", "")


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_wildcard(host: str) -> bool:
    """True if the address stands for all interfaces, so that other hosts cannot connect to it."""
    ip = _parsed(host)
    return ip is not None and ip.is_unspecified


def is_loopback(host: str) -> bool:
    """True if the address always refers to the host that uses it."""
    ip = _parsed(host)
    return host == "localhost" if ip is None else ip.is_loopback


def reachable_address(address: str, via: str | None = None) -> str:
    """``address`` with a wildcard host replaced by one to connect to.

    ``via`` is another address of the same host. If that is a wildcard too, or missing, both ends
    are on this host, and the loopback address of the same family replaces the wildcard.
    """
    host, port = split_address(address)
    if not is_wildcard(host):
        return without_brackets(address)
    if via is not None:
        via_host, _ = split_address(via)
        if not is_wildcard(via_host):
            return join_address(via_host, port)
    return join_address("::1" if ":" in host else "127.0.0.1", port)


def replica_uid(incarnation: str) -> str:
    """The uid of a replica's actor at its engine's address."""
    return f"xavier-replica-{incarnation}"
