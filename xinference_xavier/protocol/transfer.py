"""The messages between replicas: between engines and transfer processes, and of a warm join.

A receiver checks each message before it does anything else, and uses what the check returns. A
check raises LinkError, and nothing else unless it says so, whatever it is given.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter
from pydantic_core import from_json

from xinference_xavier.errors import GrantRefusedError, LinkError, TransportError, shown
from xinference_xavier.options import MAX_FETCH_TIMEOUT
from xinference_xavier.protocol.tracker import checked, unpack
from xinference_xavier.runtime.validate import (
    MAX_KEY_BYTES,
    MAX_PORT,
    Address,
    Count,
    Identifier,
    first_reason,
    up_to,
)

PROTOCOL_VERSION = 4
TRANSFER_UID = "xavier-transfer"  # the uid of the actor in each transfer process
MAX_ROWS_PER_FETCH = 1 << 16
MAX_LINE = 1 << 16  # bytes of a line between an engine and its transfer process, at start
_SIGNATURE_BYTES = 32
_MAX_ROWS = (1 << 31) - 1
_MAX_CHECKSUM = (1 << 64) - 1
_T = TypeVar("_T")


def check_version(version: object) -> int:
    """Raises LinkError."""
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer speaks transfer protocol {shown(version)}, we speak {PROTOCOL_VERSION}; "
            "run the same version of xinference-xavier everywhere"
        )
    return version


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Turns ValueError into a LinkError that names the message."""
    try:
        yield
    except ValueError as error:
        raise LinkError(f"malformed {what}: {first_reason(error)}") from None


def _checked(adapter: TypeAdapter[_T], what: str, message: object) -> _T:
    with checking(what):
        return adapter.validate_python(message, strict=True)


def _check_not_too_many(keys: object) -> object:
    if isinstance(keys, tuple) and len(keys) > MAX_ROWS_PER_FETCH:
        raise GrantRefusedError("too many rows")
    return keys


# Fail fast, so that a long tuple does not become a long list of errors.
_Rows = Field(max_length=MAX_ROWS_PER_FETCH, fail_fast=True)
_Slots = Annotated[tuple[int, ...], _Rows, up_to(_MAX_ROWS)]
_Checksums = Annotated[tuple[int, ...], _Rows, up_to(_MAX_CHECKSUM)]
_Keys = Annotated[
    tuple[Annotated[bytes, Field(min_length=1, max_length=MAX_KEY_BYTES)], ...], _Rows
]
_Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
# pydantic passes on LinkError, so a wrong version is reported before anything else.
_Version = Annotated[int, PlainValidator(check_version)]


@dataclass(frozen=True)
class Startup:
    """The first message to a transfer process. `key` (hex) signs the engine's tickets. The engine
    must not outlive the process with the number `parent`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    version: _Version = field(default=PROTOCOL_VERSION, kw_only=True)
    incarnation: Identifier
    region_fd: Annotated[int, Field(ge=0, le=_MAX_ROWS)]
    rows: Annotated[int, Field(ge=1, le=_MAX_ROWS)]
    row_bytes: Annotated[int, Field(ge=1)]
    host: Identifier
    port_range: tuple[_Port, _Port] | None
    # "module:Class" of each Transport, best first
    transports: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    key: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$")]
    parent: Annotated[int, Field(ge=1, le=_MAX_ROWS)] | None = None

    def to_json(self) -> bytes:
        return _STARTUP.dump_json(self) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Startup:
        """Raises LinkError, also after an upgrade under a running engine."""
        with checking("start-up message"):
            return _STARTUP.validate_json(line, strict=True)


class Endpoint(NamedTuple):
    """Where a transfer process is. `host` is its `host_identity`; None if it shares no memory."""

    address: Address
    host: Identifier | None


def check_endpoint(endpoint: object) -> Endpoint:
    return _checked(_ENDPOINT, "endpoint", endpoint)


def parse_started(line: bytes) -> Endpoint:
    """The endpoint of a transfer process, from its answer to `Startup`. Raises TransportError, with
    the process's own words, if it could not start."""
    if not line:
        raise TransportError("it ended without an answer")
    try:
        answer = from_json(line)
        if isinstance(answer, dict) and "error" in answer:
            raise TransportError(str(answer["error"]))
        return check_endpoint(answer)
    except (ValueError, LinkError) as error:
        raise TransportError(str(error)) from None


class Ticket(NamedTuple):
    """Proves to a donor's transfer process that its engine granted rows to a consumer."""

    consumer: Identifier
    slots: _Slots
    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # time.monotonic() of its host
    signature: Annotated[bytes, Field(min_length=_SIGNATURE_BYTES, max_length=_SIGNATURE_BYTES)]

    @classmethod
    def sign(cls, key: bytes, consumer: str, slots: Sequence[int], expires: float) -> Ticket:
        return cls(consumer, tuple(slots), expires, _signature(key, consumer, slots, expires))

    def is_valid(self, key: bytes, now: float) -> bool:
        wanted = _signature(key, self.consumer, self.slots, self.expires)
        return now < self.expires and hmac.compare_digest(wanted, self.signature)


def check_ticket(ticket: object, rows: int) -> Ticket:
    """`rows` is the number of rows in the donor's pool."""
    good = _checked(_TICKET, "ticket", ticket)
    _check_slots("ticket", good.slots, rows)
    return good


def _check_slots(what: str, slots: tuple[int, ...], rows: int) -> None:
    if max(slots, default=0) >= rows:
        raise LinkError(f"malformed {what}: slots has {max(slots)}, and the pool has {rows} rows")


def _signature(key: bytes, consumer: str, slots: Sequence[int], expires: float) -> bytes:
    return hmac.digest(key, json.dumps([consumer, list(slots), expires]).encode(), "sha256")


class GrantRequest(NamedTuple):
    """Asks a donor to keep the rows of these chunks for a consumer."""

    version: _Version
    namespace: Identifier
    consumer: Identifier  # incarnation
    keys: Annotated[_Keys, BeforeValidator(_check_not_too_many)]


def check_request(request: object) -> GrantRequest:
    """Also raises GrantRefusedError, for too many rows."""
    return _checked(_REQUEST, "request for a grant", request)


class Grant(NamedTuple):
    """The donor keeps the rows of the first `len(checksums)` keys until release or expiry.

    `more_is_held` says that the donor holds the next key too. If not, it does not hold that key as
    of its publication `sequence`.
    """

    grant_id: Count  # 0: without rows
    checksums: _Checksums
    ticket: Ticket
    address: Address  # of the donor's transfer process
    host: Identifier | None  # as in its Endpoint
    more_is_held: bool
    sequence: Count


def check_grant(grant: object, asked: int) -> Grant:
    """`asked` is the number of rows in the request."""
    good = _checked(_GRANT, "grant", grant)
    rows = len(good.checksums)
    if rows > asked:
        raise LinkError(f"malformed grant: it has {rows} rows, and {asked} were asked for")
    if rows != len(good.ticket.slots):
        raise LinkError("malformed grant: the numbers of rows and checksums differ")
    if bool(good.grant_id) != bool(rows):
        raise LinkError("malformed grant: it has an id without rows, or rows without an id")
    return good


class PullOrder(NamedTuple):
    """Tells an engine's own transfer process to fetch rows."""

    donor: Identifier  # incarnation
    address: Address  # of the donor's transfer process
    host: Identifier | None  # as in its Endpoint
    ticket: Ticket
    keys: _Keys
    checksums: _Checksums
    slots: _Slots  # ours, one for each of the ticket's
    timeout: Annotated[float, Field(gt=0, lt=MAX_FETCH_TIMEOUT)]  # seconds


def check_order(order: object, rows: int) -> PullOrder:
    """`rows` is the number of rows in our pool."""
    good = _checked(_ORDER, "order", order)
    _check_slots("order", good.slots, rows)
    parts = (good.ticket.slots, good.keys, good.checksums, good.slots)
    if len({*map(len, parts), len(set(good.slots))}) != 1:
        raise LinkError("malformed order: its rows do not correspond one to one")
    return good


class PullResult(NamedTuple):
    """The first `verified` rows are complete. Nothing writes to the rows of the order any more."""

    verified: int
    reason: str | None  # why not all rows are verified
    transport: str | None = None  # None: there was no link


_STARTUP = TypeAdapter(Startup)
_ENDPOINT = TypeAdapter(Endpoint)
_TICKET = TypeAdapter(Ticket)
_REQUEST = TypeAdapter(GrantRequest)
_GRANT = TypeAdapter(Grant)
_ORDER = TypeAdapter(PullOrder)


MAX_HOT = MAX_ROWS_PER_FETCH
"""Chunks of one answer."""


class HotChunks(NamedTuple):
    """The chunks with which a replica's latest prompts began, the most important ones first, and
    each behind those before it in its prompt.

    `keys` are packed; `uses` says how many prompts had each. The first `named` of them belong to
    named prefixes.
    """

    keys: bytes
    uses: Annotated[tuple[int, ...], Field(max_length=MAX_HOT), up_to(1 << 31)]
    named: Count


_HOT = TypeAdapter(HotChunks)


def check_hot(answer: object, key_bytes: int) -> tuple[HotChunks, list[bytes]]:
    """The answer, and its keys of `key_bytes` each. Raises LinkError."""
    try:
        hot = checked(_HOT, "hot chunks", answer)
        keys = unpack(hot.keys, key_bytes)
    except ValueError as error:
        raise LinkError(str(error)) from None
    if len(keys) != len(hot.uses):
        raise LinkError(f"malformed hot chunks: {len(keys)} keys have {len(hot.uses)} uses")
    return hot, keys
