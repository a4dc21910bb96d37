"""Which transports a link to a donor may have, best first.

A transport that stays within a host is for donors that say they are on ours. One that failed with a
donor nevertheless is not tried again with that transfer process of it.

Threading: belongs to the transfer process's event loop.
"""

import logging
from collections.abc import Sequence

from xinference_xavier.errors import LinkError
from xinference_xavier.transfer.base import Transport
from xinference_xavier.transfer.host import MEMORY_NOT_SHARED, difference

logger = logging.getLogger(__name__)


class OutOfReachError(LinkError):
    """All transports of ours stay within this host, and the donor is not on it.

    `reason` is what it is counted as.
    """

    def __init__(self, transport: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"no link by {transport}: {reason}")


class Choice:
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

    def fell_back(self, donor: str, address: str, error: BaseException) -> None:
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

    def keep(self, members: frozenset[str]) -> None:
        """All other donors are gone."""
        self._failed = {donor: at for donor, at in self._failed.items() if donor in members}
