"""The messages between replicas: between engines and transfer processes.

Peers run the same version, which a receiver checks first. Beyond that, it checks what reaches into
memory: numbers of rows, slots and sizes. Every check raises LinkError unless it says otherwise.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from pydantic import TypeAdapter

from xinference_xavier.errors import GrantRefusedError, LinkError, TransportError, shown

PROTOCOL_VERSION = 8
TRANSFER_UID = "xavier-transfer"  # the uid of the actor in each transfer process
MAX_ROWS_PER_FETCH = 1 << 16
MAX_LINE = 1 << 16  # bytes of a line between an engine and its transfer process, at start


def check_version(version: object) -> None:
    if version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer speaks transfer protocol {shown(version)}, we speak {PROTOCOL_VERSION}; "
            "run the same version of xinference-xavier everywhere"
        )


def prove(secret: bytes, link_id: str) -> bytes:
    """What a consumer sends to show that it knows the model's secret."""
    return hmac.digest(secret, link_id.encode(), "sha256")


def check_slots(slots: Sequence[int], rows: int) -> None:
    """Check the slots of a pool that has so many `rows`."""
    if slots and not 0 <= min(slots) <= max(slots) < rows:
        raise LinkError(
            f"slots from {min(slots)} to {max(slots)} are asked for, and the donor's pool has "
            f"{rows}; fetch from it again"
        )


@dataclass(frozen=True)
class Startup:
    """The first message to a transfer process. The engine must not outlive the process with the
    number `parent`."""

    version: int = field(default=PROTOCOL_VERSION, kw_only=True)
    incarnation: str
    region_fd: int
    rows: int
    row_bytes: int
    host: str
    port_range: tuple[int, int] | None
    # "module:Class" of each Transport, best first
    transports: tuple[str, ...]
    parent: int | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Startup:
        """Raises LinkError after an upgrade under a running engine."""
        fields = json.loads(line)
        check_version(fields["version"])
        return _STARTUP.validate_python(fields)


_STARTUP = TypeAdapter(Startup)


class Endpoint(NamedTuple):
    """A transfer process, and its answer to `Startup`."""

    address: str

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Endpoint:
        """Raises TransportError, with the process's own words, if it could not start."""
        if not line:
            raise TransportError("it ended without an answer")
        answer = json.loads(line)
        if "error" in answer:
            raise TransportError(answer["error"])
        return cls(**answer)


class GrantRequest(NamedTuple):
    """Asks a donor to keep the rows of these chunks for a consumer, which numbers its grants.

    It copies them, or loads them `in_place`.
    """

    version: int
    namespace: str
    consumer: str  # incarnation
    number: int
    keys: tuple[bytes, ...]
    in_place: bool


def check_request(request: GrantRequest) -> None:
    """Check a request. Also raises GrantRefusedError, for too many rows."""
    check_version(request.version)
    if len(request.keys) > MAX_ROWS_PER_FETCH:
        raise GrantRefusedError("too many rows")


class Grant(NamedTuple):
    """The donor keeps the rows of the first `len(slots)` keys until release, or until `expires`: if
    they are loaded in place, until the consumer's process has ended.

    `more_is_held` says that the donor holds the next key too. If not, it does not hold that key as
    of its publication `sequence`.
    """

    slots: tuple[int, ...]
    checksums: tuple[int, ...]
    expires: float  # time.monotonic() of the donor's host
    endpoint: Endpoint  # of the donor's transfer process
    more_is_held: bool
    sequence: int


def check_grant(grant: Grant, asked: int) -> None:
    """Check an answer to a request for so many rows (`asked`)."""
    if not len(grant.slots) == len(grant.checksums) <= asked:
        raise LinkError(
            f"malformed grant: {asked} rows were asked for, and it has {len(grant.slots)} slots "
            f"and {len(grant.checksums)} checksums"
        )


class PullOrder(NamedTuple):
    """Tells an engine's own transfer process to fetch rows."""

    donor: str  # incarnation
    endpoint: Endpoint  # of the donor's transfer process
    granted: tuple[int, ...]  # the donor's slots
    expires: float  # the grant; time.monotonic() of the donor's host
    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]
    slots: tuple[int, ...]  # ours, one for each that was granted
    timeout: float  # seconds


class PullResult(NamedTuple):
    """The first `verified` rows are complete. Nothing writes to the rows of the order any more."""

    verified: int
    reason: str | None  # why not all rows are verified
    transport: str | None = None  # None: there was no link
