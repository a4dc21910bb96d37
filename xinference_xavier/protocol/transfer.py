"""What engines and transfer processes say to each other.

Each message has a check, which its receiver calls before anything else. It raises LinkError for
what cannot be right, and nothing else, whatever it is given.
"""

import hmac
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json

from xinference_xavier.errors import GrantRefusedError, LinkError, TransportError, shown
from xinference_xavier.runtime.validate import (
    MAX_KEY_BYTES,
    MAX_PORT,
    Address,
    Count,
    Identifier,
    first_reason,
    up_to,
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
    """Turns ValueError into LinkError, which names the message that was wrong."""
    try:
        yield
    except ValueError as error:
        raise LinkError(f"malformed {what}: {first_reason(error)}") from None


def _checked(adapter: TypeAdapter[_T], what: str, message: object) -> _T:
    try:
        return adapter.validate_python(message, strict=True)
    except ValidationError as error:
        raise LinkError(f"malformed {what}: {first_reason(error)}") from None


def _check_not_too_many(keys: object) -> object:
    if isinstance(keys, tuple) and len(keys) > MAX_ROWS_PER_FETCH:
        raise GrantRefusedError("too many rows")
    return keys


# The first bad item ends the check, so that a long tuple does not become a long list of errors.
_Rows = Field(max_length=MAX_ROWS_PER_FETCH, fail_fast=True)
_Slots = Annotated[tuple[int, ...], _Rows, up_to(_MAX_ROWS)]
_Checksums = Annotated[tuple[int, ...], _Rows, up_to(_MAX_CHECKSUM)]
_Keys = Annotated[
    tuple[Annotated[bytes, Field(min_length=1, max_length=MAX_KEY_BYTES)], ...], _Rows
]
_Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
# Not a ValueError: pydantic lets LinkError through, so another version is named before all else.
_Version = Annotated[int, PlainValidator(check_version)]


@dataclass(frozen=True)
class Startup:
    """What an engine tells its transfer process. `key` (hex) signs the engine's tickets."""

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

    def to_json(self) -> bytes:
        return _STARTUP.dump_json(self) + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "Startup":
        """Raises LinkError; also if the engine still runs what was installed here before."""
        with checking("start-up message"):
            return _STARTUP.validate_json(line, strict=True)


class Endpoint(NamedTuple):
    """Where a transfer process is."""

    address: Address
    host: Identifier | None  # its `host_identity`, for who might have its memory; None: nobody may


def check_endpoint(endpoint: object) -> Endpoint:
    return _checked(_ENDPOINT, "endpoint", endpoint)


def parse_started(line: bytes) -> Endpoint:
    """Where a transfer process listens, from the line that it answers with.

    Raises:
        TransportError: it does not listen, with its own words for why.
    """
    if not line:
        raise TransportError("it ended without a word")
    try:
        answer = from_json(line)
        if isinstance(answer, dict) and "error" in answer:
            raise TransportError(str(answer["error"]))
        return check_endpoint(answer)
    except (ValueError, LinkError) as error:
        raise TransportError(str(error)) from None


class Ticket(NamedTuple):
    """A donor engine's word to its own transfer process that rows are granted to a consumer."""

    consumer: Identifier
    slots: _Slots
    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # time.monotonic() of its host
    signature: Annotated[bytes, Field(min_length=_SIGNATURE_BYTES, max_length=_SIGNATURE_BYTES)]

    @classmethod
    def sign(cls, key: bytes, consumer: str, slots: Sequence[int], expires: float) -> "Ticket":
        return cls(consumer, tuple(slots), expires, _signature(key, consumer, slots, expires))

    def is_valid(self, key: bytes, now: float) -> bool:
        wanted = _signature(key, self.consumer, self.slots, self.expires)
        return now < self.expires and hmac.compare_digest(wanted, self.signature)


def check_ticket(ticket: object, rows: int) -> Ticket:
    """`rows` is how many the donor has."""
    good = _checked(_TICKET, "ticket", ticket)
    _check_slots("ticket", good.slots, rows)
    return good


def _check_slots(what: str, slots: tuple[int, ...], rows: int) -> None:
    if max(slots, default=0) >= rows:
        raise LinkError(f"malformed {what}: slots has {max(slots)}, and the pool has {rows} rows")


def _signature(key: bytes, consumer: str, slots: Sequence[int], expires: float) -> bytes:
    return hmac.digest(key, json.dumps([consumer, list(slots), expires]).encode(), "sha256")


class GrantRequest(NamedTuple):
    """A consumer asks a donor to keep the rows of these chunks for it."""

    version: _Version
    namespace: Identifier
    consumer: Identifier  # incarnation
    keys: Annotated[_Keys, BeforeValidator(_check_not_too_many)]


def check_request(request: object) -> GrantRequest:
    """Also raises GrantRefusedError, for more than is granted at a time."""
    return _checked(_REQUEST, "request for a grant", request)


class Grant(NamedTuple):
    """The donor keeps the rows of the leading `len(checksums)` keys until released or expired."""

    grant_id: Count  # 0: it holds not even the first
    checksums: _Checksums
    ticket: Ticket
    address: Address  # of the donor's transfer process
    host: Identifier | None  # as in its Endpoint
    more_is_held: bool  # it holds the next key too, but grants no more at a time
    sequence: (
        Count  # the donor's last publication when it looked: what it lacks, it lacks as of then
    )


def check_grant(grant: object, asked: int) -> Grant:
    """`asked` is how many rows it was asked for."""
    good = _checked(_GRANT, "grant", grant)
    rows = len(good.checksums)
    if rows > asked:
        raise LinkError(f"malformed grant: it is of {rows} rows, and {asked} were asked for")
    if rows != len(good.ticket.slots):
        raise LinkError("malformed grant: it has a checksum more or less than it has rows")
    if bool(good.grant_id) != bool(rows):
        raise LinkError("malformed grant: it has an id without rows, or rows without an id")
    return good


class PullOrder(NamedTuple):
    """An engine orders its own transfer process to fetch rows."""

    donor: Identifier  # incarnation
    address: Address  # of the donor's transfer process
    host: Identifier | None  # as in its Endpoint
    ticket: Ticket
    keys: _Keys
    checksums: _Checksums
    slots: _Slots  # ours, one for each of the ticket's
    timeout: Annotated[float, Field(gt=0, lt=MAX_TIMEOUT)]  # seconds


def check_order(order: object, rows: int) -> PullOrder:
    """`rows` is how many we have."""
    good = _checked(_ORDER, "order", order)
    _check_slots("order", good.slots, rows)
    parts = (good.ticket.slots, good.keys, good.checksums, good.slots)
    if len({*map(len, parts), len(set(good.slots))}) != 1:
        raise LinkError("malformed order: its rows do not match one to one")
    return good


class PullResult(NamedTuple):
    """`verified` rows from the start are whole; nothing writes to any row of the order any more."""

    verified: int
    reason: str | None  # why not all of them
    transport: str | None = None  # by which they came; None: there was no link


_STARTUP = TypeAdapter(Startup)
_ENDPOINT = TypeAdapter(Endpoint)
_TICKET = TypeAdapter(Ticket)
_REQUEST = TypeAdapter(GrantRequest)
_GRANT = TypeAdapter(Grant)
_ORDER = TypeAdapter(PullOrder)
