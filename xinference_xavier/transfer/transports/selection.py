"""Selects the transports to try with a donor, best first.

A transport within one host is tried with donors whose `host_identity` equals ours. One that fails
with a donor is tried again after a minute, then after doubled times; at once if the donor has
another transfer process.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from xinference_xavier.errors import OUT_OF_REACH, LinkError, TransportError
from xinference_xavier.transfer.transports.base import Transport

logger = logging.getLogger(__name__)


class OutOfReachError(LinkError):
    """Our transports stay within this host and cannot reach the donor.

    `reason` is one of `OUT_OF_REACH`.
    """

    def __init__(self, transport: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"no link by {transport}: {reason}")


RETRY_AFTER, MAX_RETRY_AFTER = 60.0, 960.0
"""Seconds until a transport that failed is tried again; doubled with each failure."""


class _Failure(NamedTuple):
    address: str  # of the donor's transfer process
    reason: str
    pause: float
    until: float


class TransportSelector:
    def __init__(
        self,
        transports: Sequence[Transport],
        left_out: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`left_out` are better ones that this host cannot use, and why."""
        self._clock = clock
        self._transports = {transport.name: transport for transport in transports}
        self._left_out = dict(left_out or {})
        self._failed: dict[tuple[str, str], _Failure] = {}  # by donor and transport
        self.fallbacks = 0

    @property
    def names(self) -> list[str]:
        """Best first."""
        return list(self._transports)

    @property
    def host(self) -> str | None:
        """The host to name in our `Endpoint`; None if no transport stays within a host."""
        hosts = (transport.host for transport in self._transports.values())
        return next(filter(None, hosts), None)

    def named(self, name: str) -> Transport:
        """The transport that a consumer asks for. Raises LinkError."""
        try:
            return self._transports[name]
        except KeyError:
            raise LinkError(f"the donor offers {' or '.join(self.names)}, not {name!r}") from None

    def candidates(self, donor: str, address: str, host: str | None) -> list[Transport]:
        """The transports to try, best first; `address` and `host` are the donor's `Endpoint`.
        Raises OutOfReachError if none can reach it."""
        possible = [
            transport
            for transport in self._transports.values()
            if self._obstacle(transport, donor, address, host) is None
        ]
        if not possible:
            reason = difference(self.host or "", host) or MEMORY_NOT_SHARED
            raise OutOfReachError(" or ".join(self.names), reason)
        return possible

    def obstacles(self, donor: str, address: str, host: str | None) -> dict[str, str]:
        """The reasons against transports, for each that cannot be tried with the donor."""
        reasons = {
            transport.name: self._obstacle(transport, donor, address, host)
            for transport in self._transports.values()
        }
        return self._left_out | {name: reason for name, reason in reasons.items() if reason}

    def _obstacle(
        self, transport: Transport, donor: str, address: str, host: str | None
    ) -> str | None:
        if transport.host is not None and (differs := difference(transport.host, host)):
            return differs
        failure = self._failed.get((donor, transport.name))
        if failure is None or failure.address != address or self._clock() >= failure.until:
            return None
        return failure.reason

    def record_fallback(
        self, donor: str, address: str, transport: Transport, error: BaseException
    ) -> None:
        """A candidate failed; a later one worked."""
        known = self._failed.get((donor, transport.name))
        pause = RETRY_AFTER
        if known is not None and known.address == address:
            pause = min(2 * known.pause, MAX_RETRY_AFTER)
        reason = str(error) or type(error).__name__
        until = self._clock() + pause
        self._failed[donor, transport.name] = _Failure(address, reason, pause, until)
        self.fallbacks += 1
        logger.warning(
            "%s failed with donor %s; falling back for %.0f s: error=%s",
            transport.name,
            donor,
            pause,
            reason,
        )

    def forget_except(self, members: frozenset[str]) -> None:
        """Forget the failures with donors that are not members."""
        self._failed = {key: at for key, at in self._failed.items() if key[0] in members}


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_identity() -> str:
    """Equal for two processes that can share memory: boot id, network namespace and user id.

    Abstract sockets are visible within a network namespace only; memory is shared within a user.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino} {os.getuid()}"
    except OSError as error:
        raise TransportError(f"cannot identify this host: {error}") from None


MEMORY_NOT_SHARED, DIFFERENCES = OUT_OF_REACH[0], OUT_OF_REACH[1:]
"""`DIFFERENCES` are in the order of the parts of a `host_identity`."""


def difference(own: str, theirs: str | None) -> str | None:
    """Why a process on that host cannot share its memory with us; None if it can."""
    if theirs is None:
        return MEMORY_NOT_SHARED
    parts = zip(DIFFERENCES, own.split(" "), theirs.split(" "), strict=False)
    different = (name for name, ours, its in parts if ours != its)
    return None if own == theirs else next(different, DIFFERENCES[0])
