"""What engines and transfer processes say to each other.

Each message has a check, which its receiver calls before anything else. It raises LinkError for
what cannot be right, and nothing else, whatever it is given.
"""

import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

from xinference_xavier.errors import GrantRefusedError, LinkError, TransportError, shown
from xinference_xavier.runtime.validate import (
    MAX_PORT,
    check_address,
    check_count,
    check_counts,
    check_identifier,
    check_keys,
    check_seconds,
    parse_object,
)

PROTOCOL_VERSION = 3
TRANSFER_UID = "xavier-transfer"
"""Of the actor in every transfer process."""
MAX_ROWS_PER_FETCH = 1 << 16
MAX_TIMEOUT = 3600.0
MAX_LINE = 1 << 16
"""Bytes of a line between an engine and its transfer process."""
_SIGNATURE_BYTES = 32
_MAX_ROWS = (1 << 31) - 1
_MAX_CHECKSUM = (1 << 64) - 1


def check_version(version: object) -> None:
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer speaks transfer protocol {shown(version)}, we speak {PROTOCOL_VERSION}; "
            "run the same version of xinference-xavier everywhere"
        )


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Says in which message something was wrong."""
    try:
        yield
    except ValueError as error:
        raise LinkError(f"malformed {what}: {error}") from None


@dataclass(frozen=True)
class Startup:
    """What an engine tells its transfer process. `key` (hex) signs the engine's tickets."""

    incarnation: str
    region_fd: int
    rows: int
    row_bytes: int
    host: str
    port_range: tuple[int, int] | None
    transports: tuple[str, ...]  # "module:Class" of each Transport, best first
    key: str

    def to_json(self) -> bytes:
        return json.dumps({"version": PROTOCOL_VERSION} | asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Startup":
        """Raises LinkError; also if the engine still runs what was installed here before."""
        with checking("start-up message"):
            fields = parse_object("it", text, MAX_LINE)
            check_version(fields.pop("version", None))
            if fields.keys() != cls.__dataclass_fields__.keys():
                raise ValueError(f"it has the fields {shown(sorted(fields))}")
            for name in ("incarnation", "host"):
                check_identifier(name, fields[name])
            if not isinstance(fields["transports"], list) or not fields["transports"]:
                raise ValueError(f"transports={shown(fields['transports'])} names none")
            for path in fields["transports"]:
                check_identifier("transport", path)
            fields["transports"] = tuple(fields["transports"])
            check_count("region_fd", fields["region_fd"], 0, _MAX_ROWS)
            check_count("rows", fields["rows"], 1, _MAX_ROWS)
            check_count("row_bytes", fields["row_bytes"], 1)
            if fields["port_range"] is not None:
                if not isinstance(fields["port_range"], list) or len(fields["port_range"]) != 2:
                    raise ValueError(f"port_range={shown(fields['port_range'])} has not two ends")
                fields["port_range"] = tuple(fields["port_range"])
                check_counts("port_range", fields["port_range"], 2, MAX_PORT)
            check_identifier("key", fields["key"])
            bytes.fromhex(fields["key"])
        return cls(**fields)


class Endpoint(NamedTuple):
    """Where a transfer process is."""

    address: str
    host: str | None  # its `host_identity`, for who might have its memory; None: nobody may


def check_endpoint(address: object, host: object) -> None:
    check_address("address", address)
    if host is not None:
        check_identifier("host", host)


def parse_started(line: bytes) -> Endpoint:
    """Where a transfer process listens, from the line that it answers with.

    Raises:
        TransportError: it does not listen, with its own words for why.
    """
    if not line:
        raise TransportError("it ended without a word")
    try:
        answer = parse_object("its answer", line, MAX_LINE)
        if "error" in answer:
            raise TransportError(str(answer["error"]))
        endpoint = Endpoint(answer.get("address", ""), answer.get("host"))
        check_endpoint(*endpoint)
    except ValueError as error:
        raise TransportError(str(error)) from None
    return endpoint


class Ticket(NamedTuple):
    """A donor engine's word to its own transfer process that rows are granted to a consumer."""

    consumer: str
    slots: tuple[int, ...]
    expires: float  # time.monotonic() of the donor's host
    signature: bytes

    @classmethod
    def sign(cls, key: bytes, consumer: str, slots: Sequence[int], expires: float) -> "Ticket":
        return cls(consumer, tuple(slots), expires, _signature(key, consumer, slots, expires))

    def is_valid(self, key: bytes, now: float) -> bool:
        wanted = _signature(key, self.consumer, self.slots, self.expires)
        return now < self.expires and hmac.compare_digest(wanted, self.signature)


def check_ticket(ticket: object, rows: int = _MAX_ROWS) -> None:
    """`rows` is how many the donor has."""
    with checking("ticket"):
        if not isinstance(ticket, Ticket):
            raise ValueError(f"it is {type(ticket).__name__}")
        check_identifier("consumer", ticket.consumer)
        check_counts("slots", ticket.slots, MAX_ROWS_PER_FETCH, rows - 1)
        check_seconds("expires", ticket.expires)
        if type(ticket.signature) is not bytes or len(ticket.signature) != _SIGNATURE_BYTES:
            raise ValueError("its signature is not text")


def _signature(key: bytes, consumer: str, slots: Sequence[int], expires: float) -> bytes:
    return hmac.digest(key, json.dumps([consumer, list(slots), expires]).encode(), "sha256")


class GrantRequest(NamedTuple):
    """A consumer asks a donor to keep the rows of these chunks for it."""

    version: int
    namespace: str
    consumer: str  # incarnation
    keys: tuple[bytes, ...]


def check_request(request: object) -> None:
    """Also raises GrantRefusedError, for more than is granted at a time."""
    with checking("request for a grant"):
        if not isinstance(request, GrantRequest):
            raise ValueError(f"it is {type(request).__name__}")
        check_version(request.version)
        check_identifier("namespace", request.namespace)
        check_identifier("consumer", request.consumer)
        if type(request.keys) is tuple and len(request.keys) > MAX_ROWS_PER_FETCH:
            raise GrantRefusedError("too many rows")
        check_keys("keys", request.keys, MAX_ROWS_PER_FETCH)


class Grant(NamedTuple):
    """The donor keeps the rows of the leading `len(checksums)` keys until released or expired."""

    grant_id: int  # 0: it holds not even the first
    checksums: tuple[int, ...]
    ticket: Ticket
    address: str  # of the donor's transfer process
    host: str | None  # as in its Endpoint
    more_is_held: bool  # it holds the next key too, but grants no more at a time
    sequence: int  # the donor's last publication when it looked: what it lacks, it lacks as of then


def check_grant(grant: object, asked: int) -> None:
    """`asked` is how many rows it was asked for."""
    with checking("grant"):
        if not isinstance(grant, Grant):
            raise ValueError(f"it is {type(grant).__name__}")
        check_ticket(grant.ticket)
        check_count("grant_id", grant.grant_id, 0)
        check_count("sequence", grant.sequence, 0)
        check_counts("checksums", grant.checksums, asked, _MAX_CHECKSUM)
        if len(grant.checksums) != len(grant.ticket.slots):
            raise ValueError("it has a checksum more or less than it has rows")
        if bool(grant.grant_id) != bool(grant.checksums):
            raise ValueError("it has an id without rows, or rows without an id")
        if grant.grant_id:
            check_endpoint(grant.address, grant.host)
        if type(grant.more_is_held) is not bool:
            raise ValueError("more_is_held is neither True nor False")


class PullOrder(NamedTuple):
    """An engine orders its own transfer process to fetch rows."""

    donor: str  # incarnation
    address: str  # of the donor's transfer process
    host: str | None  # as in its Endpoint
    ticket: Ticket
    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]
    slots: tuple[int, ...]  # ours, one for each of the ticket's
    timeout: float  # seconds


def check_order(order: object, rows: int) -> None:
    """`rows` is how many we have."""
    with checking("order"):
        if not isinstance(order, PullOrder):
            raise ValueError(f"it is {type(order).__name__}")
        check_identifier("donor", order.donor)
        check_endpoint(order.address, order.host)
        check_ticket(order.ticket)
        check_keys("keys", order.keys, MAX_ROWS_PER_FETCH)
        check_counts("checksums", order.checksums, MAX_ROWS_PER_FETCH, _MAX_CHECKSUM)
        check_counts("slots", order.slots, MAX_ROWS_PER_FETCH, rows - 1)
        check_seconds("timeout", order.timeout, MAX_TIMEOUT)
        parts = (order.ticket.slots, order.keys, order.checksums, order.slots)
        if len({len(part) for part in parts}) != 1 or len(set(order.slots)) != len(order.slots):
            raise ValueError("its rows do not match one to one")


class PullResult(NamedTuple):
    """`verified` rows from the start are whole; nothing writes to any row of the order any more."""

    verified: int
    reason: str | None  # why not all of them
    transport: str | None = None  # by which they came; None: there was no link
