"""All namespaces of one model: who is a member of which, and who waits for news of it.

For one event loop, the tracker's. A namespace exists as long as it has members. Time is passed in,
in monotonic seconds; only waiting goes by the loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import ItemsView
from typing import Any

from xinference_xavier.protocol.tracker import (
    Member,
    NotMemberError,
    Outcome,
    Settings,
    TrackerFullError,
    Update,
    unpack,
)
from xinference_xavier.runtime.validate import check_identifier
from xinference_xavier.tracker.claims import Claims
from xinference_xavier.tracker.index import MAX_MEMBERS, Index
from xinference_xavier.tracker.watchers import WatcherBatcher

MAX_NAMESPACES = 1000


class Namespace:
    """One namespace's index, what its members reported last and compute, who waits for news."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.claims = Claims()
        self.stats: dict[str, dict[str, Any]] = {}
        self.watchers = WatcherBatcher()

    def published(self, incarnation: str, packed: bytes, outcome: Outcome) -> Outcome:
        """A publication came to this: what it has computed is claimed no longer."""
        if self.claims and outcome is Outcome.APPLIED:
            self.claims.release(incarnation, unpack(packed, self.index.key_bytes))
        self.wake()
        return outcome

    def wake(self) -> None:
        """Let all watchers look again."""
        self.watchers.notify(len(self.index))


class Namespaces:
    """`lease` is in seconds, `settings` are those of all namespaces.

    `refused` counts members and namespaces beyond the limits.
    """

    def __init__(self, model_uid: str, *, lease: float, max_keys: int) -> None:
        self.settings = Settings()
        self.refused = 0
        self._model_uid = model_uid
        self._lease = lease
        self._max_keys = max_keys
        self._all: dict[str, Namespace] = {}
        self._moving: dict[Member, float] = {}  # between two namespaces, and until when at most

    def items(self) -> ItemsView[str, Namespace]:
        return self._all.items()

    def find(self, namespace: str, incarnation: str) -> Namespace | None:
        """None if it has no members. Raises ValueError for what is no name."""
        check_identifier("namespace", namespace)
        check_identifier("incarnation", incarnation)
        return self._all.get(namespace)

    def members(self, now: float) -> list[list[Member]]:
        """Of each namespace."""
        return [
            [state.member for state in known.index.replicas(now)] for known in self._all.values()
        ]

    def all_members(self, now: float) -> list[Member]:
        return [member for members in self.members(now) for member in members]

    def with_moving(self, now: float) -> list[Member]:
        """All members, and those that have left one namespace and not joined the other yet."""
        return list(dict.fromkeys([*self.all_members(now), *self._moving]))

    # Membership

    def join(self, namespace: str, member: Member, key_bytes: int, now: float) -> Index:
        """Make `member` a member of `namespace`, or renew it.

        Raises ValueError for keys unlike those of the others, TrackerFullError beyond the limits.
        """
        known = self._all.get(namespace) or self._room_for(namespace)
        if member.incarnation not in known.index:
            self._check_room_for(member.incarnation)
        known.index.join(member, key_bytes, now)
        self._all[namespace] = known
        known.wake()
        self._moving.pop(member, None)
        return known.index

    def leave(self, namespace: str, incarnation: str, moving: bool, now: float) -> None:
        known = self.find(namespace, incarnation)
        if known is None:
            return
        if moving:
            self._moving |= {
                state.member: now + self._lease
                for state in known.index.replicas(now)
                if state.member.incarnation == incarnation
            }
        known.index.leave(incarnation)
        self._departed(namespace, [incarnation])

    def forgive(self, seconds: float) -> None:
        """Extend every lease by a time in which renewals could not be received."""
        for known in self._all.values():
            known.index.forgive(seconds)

    def expire(self, now: float) -> list[list[str]]:
        """Let go whose lease has ended; return their incarnations, by namespace."""
        self._moving = {
            member: min(end, now + self._lease) for member, end in self._moving.items() if now < end
        }
        lost = []
        for namespace, known in list(self._all.items()):
            if gone := known.index.expire(now):
                self._departed(namespace, gone)
                lost.append(gone)
        return lost

    def _room_for(self, namespace: str) -> Namespace:
        if len(self._all) >= MAX_NAMESPACES:
            self.refused += 1
            raise TrackerFullError(
                f"{namespace!r} would be one namespace of model {self._model_uid!r} too many; "
                f"a tracker keeps {MAX_NAMESPACES}"
            )
        index = Index(lease=self._lease, max_keys=self._max_keys, settings=self.settings)
        return Namespace(index)

    def _check_room_for(self, incarnation: str) -> None:
        if sum(len(each.index) for each in self._all.values()) >= MAX_MEMBERS:
            self.refused += 1
            raise TrackerFullError(
                f"{incarnation!r} would be one replica of model {self._model_uid!r} too many; "
                f"a tracker keeps {MAX_MEMBERS}"
            )

    def _departed(self, namespace: str, incarnations: list[str]) -> None:
        known = self._all[namespace]
        for incarnation in incarnations:
            known.stats.pop(incarnation, None)
            known.claims.forget(incarnation)
        if not len(known.index):
            del self._all[namespace]
        known.wake()

    # Watching

    def configure(self, settings: Settings) -> None:
        """Tell all members of `settings`."""
        self.settings = settings
        for known in self._all.values():
            known.index.configure(settings)
            known.wake()

    async def wait_update(
        self, namespace: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> Update:
        """What the others changed since `revision` of `epoch`, as soon as it is told, or what there
        is after `timeout` seconds. Raises NotMemberError, also when the lease ends meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            known = self.find(namespace, incarnation)
            if known is None or incarnation not in known.index:
                raise NotMemberError(
                    f"{incarnation!r} is no member of namespace {namespace!r}: join"
                )
            left = until - loop.time()
            told = not known.watchers.pending
            if left <= 0 or (told and known.index.has_news(incarnation, epoch, revision)):
                return known.index.changes_since(epoch, revision, incarnation)
            await known.watchers.wait(left)

    def end(self) -> None:
        """Forget all, and let go who waits."""
        for known in self._all.values():
            known.watchers.notify_now()
        self._all.clear()
