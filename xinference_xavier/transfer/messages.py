"""What engines and transfer processes say to each other."""

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from xinference_xavier.errors import LinkError

PROTOCOL_VERSION = 1
MAX_ROWS_PER_FETCH = 1 << 16


def check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise LinkError(
            f"the peer speaks transfer protocol {version}, we speak {PROTOCOL_VERSION}; "
            "run the same version of xinference-xavier everywhere"
        )


@dataclass(frozen=True)
class Startup:
    """What an engine tells its transfer process. `key` (hex) signs the engine's tickets."""

    incarnation: str
    region_fd: int
    rows: int
    row_bytes: int
    host: str
    port_range: tuple[int, int] | None
    transport: str  # "module:Class" of a Transport
    key: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Startup":
        fields = json.loads(text)
        if fields["port_range"] is not None:
            fields["port_range"] = tuple(fields["port_range"])
        return cls(**fields)


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


def _signature(key: bytes, consumer: str, slots: Sequence[int], expires: float) -> bytes:
    return hmac.digest(key, json.dumps([consumer, list(slots), expires]).encode(), "sha256")


class GrantRequest(NamedTuple):
    """A consumer asks a donor to keep the rows of these chunks for it."""

    version: int
    namespace: str
    consumer: str  # incarnation
    keys: tuple[bytes, ...]


class Grant(NamedTuple):
    """The donor keeps the rows of the leading `len(checksums)` keys until released or expired."""

    grant_id: int  # 0: it holds not even the first
    checksums: tuple[int, ...]
    ticket: Ticket
    address: str  # of the donor's transfer process
    more_is_held: bool  # it holds the next key too, but grants no more at a time
    sequence: int  # the donor's last publication when it looked: what it lacks, it lacks as of then


class PullOrder(NamedTuple):
    """An engine orders its own transfer process to fetch rows."""

    donor: str  # incarnation
    address: str  # of the donor's transfer process
    ticket: Ticket
    keys: tuple[bytes, ...]
    checksums: tuple[int, ...]
    slots: tuple[int, ...]  # ours, one for each of the ticket's
    timeout: float  # seconds


class PullResult(NamedTuple):
    """`verified` rows from the start are whole; nothing writes to any row of the order any more."""

    verified: int
    reason: str | None  # why not all of them
