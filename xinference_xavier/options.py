"""The launch options: what each accepts, and what a refusal says.

Options come from Python, JSON and the command line, so numbers may be text.
"""

import ipaddress
import os
import re
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import pydantic
from pydantic import BeforeValidator, Field

from xinference_xavier.errors import ConfigError
from xinference_xavier.runtime.addresses import PORTS_PER_REPLICA, is_wildcard
from xinference_xavier.runtime.validate import MAX_PORT

_GLOO = "xinference_xavier.transfer.transports.gloo:GlooTransport"
_NIXL = "xinference_xavier.transfer.transports.nixl:NixlTransport"
Routing = Literal["auto", "backlog", "off"]
"""Requests go to the replica that answers first, to the one with the smallest backlog, or
round-robin."""
Backend = Literal["extension", "builtin"]
"""This extension's Xavier, or the one built into xinference."""
Saved = Literal["reused", "all"]
"""The chunks that are saved on a disk: those that were used twice, or all."""
Role = Literal["any", "prefill", "decode"]
"""A replica that prefills for others, one that answers and leaves long prefills to those, or one
that does both for itself."""
TRANSPORTS = {
    "auto": (_NIXL, _GLOO),
    "gloo": (_GLOO,),
    "nixl": (_NIXL,),
    "shared_memory": (),
}
"""The transport classes that each name stands for, best first. Only transfer processes import
them. What neighbours hold needs none."""
LEAST_FETCH_TOKENS = 256  # the default: a fetch can delay its request by a whole step of the engine
MAX_WARM_JOIN = 600.0  # seconds
DEFAULT_DRAIN = 30.0
MAX_DRAIN = 3600.0  # seconds
MAX_QUEUE = 100_000  # requests
MAX_REPLICAS = 1000
MAX_FETCH_TIMEOUT = 3600.0  # seconds; peers refuse a longer one

_LOWEST_PORT = 1024
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_PATH = re.compile(r"[\w.]+:\w+", re.ASCII)  # module:name
_LEAVE_OUT = "leave it out: replicas find their own"


class Option(NamedTuple):
    """`kind` is a type for pydantic, whose validators may raise ValueError with a reason of their
    own and, as its second argument, a remedy of their own."""

    kind: Any
    remedy: str

    def __call__(self, name: str, value: object) -> Any:
        """The parsed value. Raises ConfigError, in which the option has this `name`."""
        try:
            return pydantic.TypeAdapter(self.kind).validate_python(value)
        except pydantic.ValidationError as error:
            fault = error.errors()[0]
        if fault["type"] == "value_error":
            reason, remedy = (*fault["ctx"]["error"].args, self.remedy)[:2]
            raise ConfigError(name, value, reason, remedy)
        reason = _REASONS.get(fault["type"], f"is malformed ({fault['msg']})")
        raise ConfigError(name, value, reason, self.remedy)


_REASONS = {
    **dict.fromkeys(["int_type", "int_parsing", "int_from_float"], "is not a whole number"),
    **dict.fromkeys(["float_type", "float_parsing", "finite_number"], "is not a number"),
    **dict.fromkeys(["bool_type", "bool_parsing"], "is neither true nor false"),
    **dict.fromkeys(["greater_than", "greater_than_equal"], "is too small"),
    **dict.fromkeys(["less_than", "less_than_equal"], "is too large"),
    "literal_error": "is not a choice",
}
"""Reasons by pydantic's name of the error."""


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


def _no_bool(value: object) -> object:
    """Refuse true, which is 1 to pydantic."""
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def _bytes(value: object) -> int:
    # pydantic's ByteSize ignores what follows a size, and reads 4,5GiB as four bytes.
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError("is not a size")
    whole, _, fraction = match[1].partition(".")
    # In integers, because a float cannot hold every byte count.
    unit = _UNITS[match[2]]
    size: int = int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
    return size


def _transport(value: object) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if name.lower() in TRANSPORTS:
        return name.lower()
    if _PATH.fullmatch(name):
        return name
    raise ValueError("is not a known transport")


def _function(value: object) -> str:
    path = value.strip() if isinstance(value, str) else ""
    if not _PATH.fullmatch(path):
        raise ValueError("does not name a function")
    return path


def _folder(value: object) -> str:
    folder = value.strip() if isinstance(value, str) else ""
    if not os.path.isabs(folder):
        raise ValueError("is not an absolute path")
    return folder


def _host(value: object) -> str:
    host = value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else ""
    if "/" in host:
        return _network(host)
    if not re.fullmatch(r"[\w.:%-]+", host, re.ASCII):
        raise ValueError("is not a host")
    if is_wildcard(host):
        raise ValueError("is not an address a peer can reach", _LEAVE_OUT)
    if host.count(":") == 1:
        raise ValueError("carries a port", "give the host alone and the ports in xavier_port_range")
    return host


def _network(value: str) -> str:
    try:
        network = ipaddress.ip_network(value, strict=False)
    except ValueError:
        remedy = "use an address and a length, such as 10.0.0.0/8"
        raise ValueError("is not a network", remedy) from None
    if not network.prefixlen:
        raise ValueError("contains every address", _LEAVE_OUT)
    return str(network)


def _port_range(value: object) -> tuple[int, int]:
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip(), re.ASCII)
        ports = [int(match[1]), int(match[2])] if match else []
    else:
        ports = list(value) if isinstance(value, (list, tuple)) else []
    if [type(port) for port in ports] != [int, int]:
        raise ValueError("is not a range of ports")
    low, high = ports
    if low > high:
        raise ValueError("ends below its start")
    if low < _LOWEST_PORT or high > MAX_PORT:
        raise ValueError("is outside the ports that users may take")
    if high - low + 1 < PORTS_PER_REPLICA:
        raise ValueError("is too small for a replica's engine, transfer process and data link")
    return low, high


def _roles(value: object) -> tuple[str, ...]:
    """The role of each replica, in order."""
    if isinstance(value, (list, tuple)):  # parsed already
        value = ",".join(f"{role}:1" for role in value)
    match = re.fullmatch(r"(\w+:\d+)(,\w+:\d+)*", "".join(str(value).split()), re.ASCII)
    if match is None:
        raise ValueError("is not a list of roles")
    roles: list[str] = []
    for role, _, count in (each.partition(":") for each in match[0].split(",")):
        if role not in get_args(Role):
            raise ValueError(f"has an unknown role, {role}")
        if int(count) > MAX_REPLICAS:
            raise ValueError(f"has more than {MAX_REPLICAS} replicas")
        roles += [role] * int(count)
    if set(roles) == {"prefill"}:
        raise ValueError("has no replica that answers", "add one, such as prefill:1,decode:1")
    return tuple(roles)


def _one_of(choices: Any) -> str:
    return f"use one of {', '.join(get_args(choices))}"


_Size = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
_Whole = Annotated[int, BeforeValidator(_no_bool)]
_Number = Annotated[float, BeforeValidator(_no_bool)]
_Switch = Annotated[bool, BeforeValidator(_word)]
RULES = pydantic.ConfigDict(extra="forbid", strict=True)


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=RULES)
class LaunchOptions:
    """What a launch, or the cluster's environment, says of all its replicas.

    `pool_bytes` is the total over a replica's engines, several with data parallelism, and their
    vLLM workers. None stands for the size of the KV cache, if memory allows. `chunk_tokens` None
    stands for 128, rounded up to the model's block size. Only the engine knows both. With
    `min_fetch_tokens` None the engine measures whether a run of `LEAST_FETCH_TOKENS` or more is
    worth a fetch. `disk` is a folder of the replica's host: rows take at most `disk_bytes` there,
    with None a tenth of its file system; `disk_save` says which. `from_environment` are the fields
    whose values are the cluster's defaults.
    """

    pool_bytes: _Size | None = None
    routing: Annotated[Routing, BeforeValidator(_word)] = "auto"
    roles: Annotated[tuple[Role, ...], BeforeValidator(_roles)] | None = None
    host: Annotated[str, BeforeValidator(_host)] | None = None
    port_range: Annotated[tuple[int, int], BeforeValidator(_port_range)] | None = None
    chunk_tokens: Annotated[_Whole, Field(gt=0)] | None = None
    transport: Annotated[str, BeforeValidator(_transport)] = "auto"
    fetch_timeout: Annotated[_Number, Field(gt=0, lt=MAX_FETCH_TIMEOUT)] = 5.0
    min_fetch_tokens: Annotated[_Whole, Field(ge=0)] | None = None
    queue: Annotated[_Whole, Field(ge=0, le=MAX_QUEUE)] = 100
    pin_fraction: Annotated[_Number, Field(ge=0, le=1)] = 0.5
    warm_join: Annotated[_Number, Field(ge=0, le=MAX_WARM_JOIN)] = 10.0
    drain: Annotated[_Number, Field(ge=0, le=MAX_DRAIN)] = DEFAULT_DRAIN
    disk: Annotated[str, BeforeValidator(_folder)] | None = None
    disk_bytes: _Size | None = None
    disk_save: Annotated[Saved, BeforeValidator(_word)] = "reused"
    audit: _Switch = True
    hooks: Annotated[str, BeforeValidator(_function)] | None = None
    untested_vllm: _Switch = False
    from_environment: Annotated[tuple[str, ...], pydantic.Strict(False)] = ()


_BYTES = "use a positive number of bytes or a size like 4GiB or 512MiB"
BASIC = {
    "xavier_pool_bytes": _BYTES,
    "xavier_routing": _one_of(Routing),
    "xavier_roles": "use numbers of replicas by role, such as prefill:1,decode:2",
    "xavier_host": "use a host name or an IP address without a port",
    "xavier_port_range": f"use LOW-HIGH within {_LOWEST_PORT}-{MAX_PORT}, such as 40000-40100, "
    f"with at least {PORTS_PER_REPLICA} ports for every replica of a host",
}
EXPERT = {
    "xavier_chunk_tokens": "use a positive multiple of the model's block size, such as 128",
    "xavier_transport": f"use one of {', '.join(TRANSPORTS)}, or module:Class for one of your own",
    "xavier_fetch_timeout": "use seconds above 0 and below an hour, such as 5",
    "xavier_min_fetch_tokens": "use a number of tokens, 0 or more",
    "xavier_queue": f"use a number of requests from 0 to {MAX_QUEUE}",
    "xavier_pin_fraction": "use a part of the pool from 0 to 1, such as 0.5",
    "xavier_warm_join": f"use seconds from 0 (off) to {MAX_WARM_JOIN:g}, such as 10",
    "xavier_drain": f"use seconds from 0 (off) to {MAX_DRAIN:g}, such as {DEFAULT_DRAIN:g}",
    "xavier_disk": "name a folder on a local disk of each worker, such as /var/cache/xavier",
    "xavier_disk_bytes": _BYTES,
    "xavier_disk_save": _one_of(Saved),
    "xavier_audit": "use true or false",
    "xavier_hooks": "name one as module:function",
    "xavier_untested_vllm": "use true or false",
}
"""Options whose defaults suit most clusters. Each has its remedy."""
_KINDS = get_type_hints(LaunchOptions, include_extras=True)
PARSERS = {
    name: Option(_KINDS[name.removeprefix("xavier_")], remedy)
    for name, remedy in (BASIC | EXPERT).items()
}
parse_backend = Option(Annotated[Backend, BeforeValidator(_word)], _one_of(Backend))
RETIRED = {
    "xavier_prefill_threshold": "prefills go to a prefill replica where that is forecast to pay",
}
"""Options of earlier versions, and what has replaced them."""
ONLY_UNDER_XINFERENCE = (
    "xavier_routing",
    "xavier_roles",
    "xavier_queue",
    "xavier_pin_fraction",
    "xavier_warm_join",
    "xavier_drain",
    "xavier_hooks",
)
"""Without it, nobody routes requests, names prefixes, or starts and removes replicas. Hooks are an
option of the tracker's command."""


def parse_bool(option: str, value: object) -> bool:
    """The value of a switch; false if it is not given. Raises ConfigError."""
    return value is not None and bool(Option(_Switch, "use true or false")(option, value))
