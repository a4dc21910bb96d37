"""Which transports a link to a donor may use, best first, and which host a process is on.

A transport within one host is for donors that say they are on ours. That is a hint; the proof is
that handing the memory over works. One that failed is not tried again with that transfer process.

Threading: the transfer process's event loop.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from xinference_xavier.errors import OUT_OF_REACH, LinkError, TransportError
from xinference_xavier.transfer.transports.base import Transport

logger = logging.getLogger(__name__)


class OutOfReachError(LinkError):
    """All transports of ours stay within this host, and the donor is not on it.

    `reason` is what it is counted as.
    """

    def __init__(self, transport: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"no link by {transport}: {reason}")


class TransportSelector:
    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._failed: dict[str, str] = {}  # address of the donor's transfer process, by donor
        self.fallbacks = 0

    @property
    def names(self) -> list[str]:
        """Best first."""
        return list(self._transports)

    @property
    def host(self) -> str | None:
        """What donors of ours say of where they are; None if no transport stays within a host."""
        hosts = (transport.host for transport in self._transports.values())
        return next(filter(None, hosts), None)

    def named(self, name: str) -> Transport:
        """For a link that a consumer asks for."""
        try:
            return self._transports[name]
        except KeyError:
            raise LinkError(
                f"the donor links by {' or '.join(self.names)}, not by {name!r}"
            ) from None

    def candidates(self, donor: str, address: str, host: str | None) -> list[Transport]:
        """At least one; `host` is what the donor says of where it is.

        Raises:
            OutOfReachError: there is none.
        """
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
        """The first candidate failed, and the next one works."""
        if self._failed.get(donor) != address:
            self._failed[donor] = address
            self.fallbacks += 1
            logger.warning(
                "no %s with %s, although it says that it is on this host: %s",
                self.names[0],
                donor,
                error,
            )

    def close_links_except(self, members: frozenset[str]) -> None:
        """All other donors are gone."""
        self._failed = {donor: at for donor, at in self._failed.items() if donor in members}


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_identity() -> str:
    """The kernel's boot, the network namespace, within which abstract sockets are found, and the
    user, to whom alone memory is handed over.

    Raises:
        TransportError: this system does not tell.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino} {os.getuid()}"
    except OSError as error:
        raise TransportError(f"this host cannot be told from others: {error}") from None


MEMORY_NOT_SHARED, DIFFERENCES = OUT_OF_REACH[0], OUT_OF_REACH[1:]
"""The latter in the order of an identity's parts."""


def difference(own: str, theirs: str | None) -> str | None:
    """Why a process there cannot hand its memory to us; None if it says that it can."""
    if theirs is None:
        return MEMORY_NOT_SHARED
    parts = zip(DIFFERENCES, own.split(" "), theirs.split(" "), strict=False)
    different = (name for name, ours, its in parts if ours != its)
    return None if own == theirs else next(different, DIFFERENCES[0])
