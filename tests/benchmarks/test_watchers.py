"""A watcher notes for each publication how long it took, once."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.watchers import KEY_BYTES, _Watcher, stamped
from xinference_xavier.protocol.tracker import Member, Settings, Update
from xinference_xavier.tracker.index import Index


class Tracker:
    """Ends what a watcher does when it has seen as much as it should."""

    def __init__(self, *revisions: int) -> None:
        self.index = Index()
        self.index.join(Member("publisher", "127.0.0.1:1"), KEY_BYTES, 0.0)
        self._published = 0
        self._revisions = list(revisions)
        """Publications between two answers."""

    async def join(self, namespace: str, member: Member, key_bytes: int, _: Settings) -> None:
        self.index.join(member, key_bytes, 0.0)

    async def watch(self, namespace: str, name: str, epoch: str, revision: int, _: float) -> Update:
        if not self._revisions:
            raise asyncio.CancelledError
        for _ in range(self._revisions.pop(0)):
            self._published += 1
            self.index.publish("publisher", self._published, stamped(3), b"")
        return self.index.changes_since(epoch, revision, name)


@pytest.mark.parametrize("revisions", [(0, 1, 1, 1), (0, 3), (2, 0, 1)])
async def test_every_publication_is_noted_once(revisions: tuple[int, ...]) -> None:
    """A key counts alone, with others and in the first snapshot."""
    tracker: Any = Tracker(*revisions)
    watcher = _Watcher("watcher")
    with suppress(asyncio.CancelledError):
        await watcher.run(tracker)
    assert watcher.joined.is_set()
    assert len(watcher.delays) == 3
    assert all(0 <= delay < 60_000 for delay in watcher.delays)
