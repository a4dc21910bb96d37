"""Selects the transports to try with a donor, best first.

A transport within one host is tried with donors whose `host_identity` equals ours, until it fails
with their transfer process.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

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


class TransportSelector:
    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._failed: dict[str, str] = {}  # by donor: the address of its transfer process
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
            if transport.host is None
            or (difference(transport.host, host) is None and self._failed.get(donor) != address)
        ]
        if not possible:
            reason = difference(self.host or "", host) or MEMORY_NOT_SHARED
            raise OutOfReachError(" or ".join(self.names), reason)
        return possible

    def record_fallback(self, donor: str, address: str, error: BaseException) -> None:
        """The first candidate failed; the next one worked."""
        if self._failed.get(donor) != address:
            self._failed[donor] = address
            self.fallbacks += 1
            logger.warning(
                "%s failed with donor %s on this host; falling back: error=%s",
                self.names[0],
                donor,
                error,
            )

    def forget_except(self, members: frozenset[str]) -> None:
        """Forget the failures with donors that are not members."""
        self._failed = {donor: at for donor, at in self._failed.items() if donor in members}


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
