"""Parsers of the launch options.

Options come from Python, JSON and the command line, so numbers may be text. Each parser takes the
option's name and its raw value, and raises ConfigError with a reason and a remedy of its own.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from xinference_xavier.errors import ConfigError
from xinference_xavier.runtime.addresses import PORTS_PER_REPLICA, is_wildcard

_GLOO = "xinference_xavier.transfer.transports.gloo:GlooTransport"
_SHARED_MEMORY = "xinference_xavier.transfer.transports.shared_memory:SharedMemoryTransport"
Routing = Literal["auto", "backlog", "off"]
"""Requests go to the replica that answers first, to that with the smallest backlog, or in turn."""
Backend = Literal["extension", "builtin"]
"""This extension's Xavier, or the one built into xinference."""
Role = Literal["any", "prefill", "decode"]
"""A replica that prefills for others, one that answers and leaves long prefills to those, or one
that does both for itself."""
TRANSPORTS = {
    "auto": (_SHARED_MEMORY, _GLOO),
    "gloo": (_GLOO,),
    "shared_memory": (_SHARED_MEMORY,),
}
"""The transport classes that each name stands for, best first. Only transfer processes import
them."""
DEFAULT_FETCH_TIMEOUT = 5.0
LEAST_FETCH_TOKENS = 256  # the default: a fetch can delay its request by a whole step of the engine
DEFAULT_QUEUE = 100
DEFAULT_PIN_FRACTION = 0.5
DEFAULT_WARM_JOIN = 10.0
MAX_WARM_JOIN = 600.0  # seconds
MAX_QUEUE = 100_000  # requests
MAX_REPLICAS = 1000
MAX_FETCH_TIMEOUT = 3600.0  # seconds; peers refuse a longer one

_LOWEST_PORT, _HIGHEST_PORT = 1024, 65535
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_PATH = re.compile(r"[\w.]+:\w+", re.ASCII)  # module:name
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def parse_bool(option: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value is None:
        return False
    text = str(value).strip().lower() if isinstance(value, (str, int)) else ""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(option, value, "is neither true nor false", "use true or false")


def _parse_size(option: str, value: object) -> int:
    remedy = "use a positive number of bytes or a size like 4GiB or 512MiB"
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        if match is None or match[2] not in _UNITS:
            raise ConfigError(option, value, "is not a size", remedy)
        whole, _, fraction = match[1].partition(".")
        # In integers, because a float cannot hold every byte count.
        unit = _UNITS[match[2]]
        size = int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
    if size <= 0:
        raise ConfigError(option, value, "is not positive", remedy)
    return size


def _parse_int(option: str, value: object, remedy: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip(), re.ASCII):
        return int(value)
    raise ConfigError(option, value, "is not a whole number", remedy)


def _parse_number(option: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(option, value, "is not a number", remedy)
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ConfigError(option, value, "is not a number", remedy) from None


def _parse_chunk_tokens(option: str, value: object) -> int:
    remedy = "use a positive multiple of the model's block size, such as 128"
    tokens = _parse_int(option, value, remedy)
    if tokens <= 0:
        raise ConfigError(option, value, "is not positive", remedy)
    return tokens


def _parse_tokens(option: str, value: object) -> int:
    remedy = "use a number of tokens, 0 or more"
    tokens = _parse_int(option, value, remedy)
    if tokens < 0:
        raise ConfigError(option, value, "is negative", remedy)
    return tokens


def _parse_transport(option: str, value: object) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if name.lower() in TRANSPORTS:
        return name.lower()
    if _PATH.fullmatch(name):
        return name
    raise ConfigError(
        option,
        value,
        "is not a known transport",
        f"use one of {', '.join(TRANSPORTS)}, or module:Class for one of your own",
    )


def _parse_host(option: str, value: object) -> str:
    host = value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else ""
    if "/" in host:
        return _parse_network(option, host)
    if not re.fullmatch(r"[\w.:%-]+", host, re.ASCII):
        raise ConfigError(
            option, value, "is not a host", "use a host name or an IP address without a port"
        )
    if is_wildcard(host):
        raise ConfigError(
            option,
            value,
            "is not an address a peer can reach",
            "leave it out: replicas find their own",
        )
    if host.count(":") == 1:
        raise ConfigError(
            option,
            value,
            "carries a port",
            "give the host alone and the ports in xavier_port_range",
        )
    return host


def _parse_network(option: str, value: str) -> str:
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ConfigError(
            option, value, "is not a network", "use an address and a length, such as 10.0.0.0/8"
        ) from None
    if not network.prefixlen:
        raise ConfigError(
            option, value, "contains every address", "leave it out: replicas find their own"
        )
    return str(network)


def _parse_port_range(option: str, value: object) -> tuple[int, int]:
    remedy = (
        f"use LOW-HIGH within {_LOWEST_PORT}-{_HIGHEST_PORT}, such as 40000-40100, "
        f"with at least {PORTS_PER_REPLICA} ports for every replica of a host"
    )
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip(), re.ASCII)
        ports = [int(match[1]), int(match[2])] if match else []
    else:
        ports = list(value) if isinstance(value, (list, tuple)) else []
    if [type(port) for port in ports] != [int, int]:
        raise ConfigError(option, value, "is not a range of ports", remedy)
    low, high = ports
    if low > high:
        raise ConfigError(option, value, "ends below its start", remedy)
    if low < _LOWEST_PORT or high > _HIGHEST_PORT:
        raise ConfigError(option, value, "is outside the ports that users may take", remedy)
    if high - low + 1 < PORTS_PER_REPLICA:
        reason = "is too small for a replica's engine, transfer process and data link"
        raise ConfigError(option, value, reason, remedy)
    return low, high


def _parse_fetch_timeout(option: str, value: object) -> float:
    remedy = f"use seconds above 0, such as {DEFAULT_FETCH_TIMEOUT:g}"
    seconds = _parse_number(option, value, remedy)
    if seconds >= MAX_FETCH_TIMEOUT:
        raise ConfigError(option, value, "is an hour or more", remedy)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(option, value, "is not a positive, finite time", remedy)
    return seconds


def _parse_hooks(option: str, value: object) -> str:
    path = value.strip() if isinstance(value, str) else ""
    if _PATH.fullmatch(path):
        return path
    raise ConfigError(option, value, "does not name a function", "name one as module:function")


def _parse_routing(option: str, value: object) -> str:
    name = value.strip().lower() if isinstance(value, str) else ""
    if name in get_args(Routing):
        return name
    remedy = f"use one of {', '.join(get_args(Routing))}"
    raise ConfigError(option, value, "is not a way to route requests", remedy)


def parse_backend(option: str, value: object) -> Backend:
    name = value.strip().lower() if isinstance(value, str) else ""
    for backend in get_args(Backend):
        if name == backend:
            return cast(Backend, backend)
    remedy = f"use one of {', '.join(get_args(Backend))}"
    raise ConfigError(option, value, "is not a Xavier", remedy)


def _parse_queue(option: str, value: object) -> int:
    remedy = f"use a number of requests from 0 to {MAX_QUEUE}"
    length = _parse_int(option, value, remedy)
    if not 0 <= length <= MAX_QUEUE:
        raise ConfigError(option, value, "is out of range", remedy)
    return length


def _parse_pin_fraction(option: str, value: object) -> float:
    remedy = f"use a part of the pool from 0 to 1, such as {DEFAULT_PIN_FRACTION:g}"
    fraction = _parse_number(option, value, remedy)
    if not 0 <= fraction <= 1:
        raise ConfigError(option, value, "is out of range", remedy)
    return fraction


def parse_role(option: str, value: object) -> Role:
    for role in get_args(Role):
        if value == role:
            return cast(Role, role)
    raise ConfigError(option, value, "is not a role", f"use one of {', '.join(get_args(Role))}")


def _parse_roles(option: str, value: object) -> tuple[Role, ...]:
    """The role of each replica, in order."""
    remedy = "use numbers of replicas by role, such as prefill:1,decode:2"
    match = re.fullmatch(r"(\w+:\d+)(,\w+:\d+)*", "".join(str(value).split()), re.ASCII)
    if match is None:
        raise ConfigError(option, value, "is not a list of roles", remedy)
    roles: list[Role] = []
    for role, _, count in (each.partition(":") for each in match[0].split(",")):
        if int(count) > MAX_REPLICAS:
            raise ConfigError(option, value, f"has more than {MAX_REPLICAS} replicas", remedy)
        roles += [parse_role(option, role)] * int(count)
    if "prefill" in roles and set(roles) == {"prefill"}:
        raise ConfigError(
            option, value, "has no replica that answers", "add one, such as prefill:1,decode:1"
        )
    return tuple(roles)


def _parse_warm_join(option: str, value: object) -> float:
    remedy = f"use seconds from 0 (off) to {MAX_WARM_JOIN:g}, such as {DEFAULT_WARM_JOIN:g}"
    seconds = _parse_number(option, value, remedy)
    if not 0 <= seconds <= MAX_WARM_JOIN:
        raise ConfigError(option, value, "is out of range", remedy)
    return seconds


BASIC: dict[str, Callable[[str, object], Any]] = {
    "xavier_pool_bytes": _parse_size,
    "xavier_routing": _parse_routing,
    "xavier_roles": _parse_roles,
    "xavier_host": _parse_host,
    "xavier_port_range": _parse_port_range,
}
EXPERT: dict[str, Callable[[str, object], Any]] = {
    "xavier_chunk_tokens": _parse_chunk_tokens,
    "xavier_transport": _parse_transport,
    "xavier_fetch_timeout": _parse_fetch_timeout,
    "xavier_min_fetch_tokens": _parse_tokens,
    "xavier_queue": _parse_queue,
    "xavier_prefill_threshold": _parse_tokens,
    "xavier_pin_fraction": _parse_pin_fraction,
    "xavier_warm_join": _parse_warm_join,
    "xavier_audit": parse_bool,
    "xavier_hooks": _parse_hooks,
    "xavier_untested_vllm": parse_bool,
}
"""Options whose defaults suit most clusters."""
PARSERS = BASIC | EXPERT
