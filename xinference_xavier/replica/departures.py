"""What a replica does when peers leave. Runs on its background loop."""

import asyncio

from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.fetcher import Fetcher
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.tasks import spawn

_INTERVAL = 10.0


class Departures:
    def __init__(
        self, process: TransferProcess, fetcher: Fetcher, donor: Donor, canary: Canary
    ) -> None:
        self._process = process
        self._fetcher = fetcher
        self._donor = donor
        self._canary = canary
        self._members: frozenset[str] = frozenset()

    def members_changed(self, members: frozenset[str]) -> None:
        gone, self._members = self._members - members, members
        self._canary.members_changed(members)
        for incarnation in gone:
            self._fetcher.forget(incarnation)
        if gone:
            spawn(self._forget(gone))

    async def _forget(self, gone: frozenset[str]) -> None:
        # Links first: while a link is open, granted rows may be in flight.
        await self._process.close_links_except(self._members)
        for incarnation in gone:
            self._donor.grants.forget(incarnation)

    async def close_late_links(self) -> None:
        """Close links that a replica opened after its lease expired, before it knew."""
        while True:
            await asyncio.sleep(_INTERVAL)
            await self._process.close_links_except(self._members)
