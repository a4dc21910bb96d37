"""Which replica of one namespace holds which chunks, with a version that watchers can follow.

A pure data structure: no I/O, no clock, no lock. Its owner calls it from one thread and passes the
time in (monotonic seconds). It is soft state: whoever holds the chunks can fill it again.

Keys are `bytes` of one length per namespace. On the wire and in the log they are *packed*: one
`bytes` with all keys one after the other, because a list of 10,000 keys costs four times as much
to send. Keys are never interpreted.

**Sequences.** Each incarnation numbers its publications 1, 2, 3, … A publication whose number was
seen is ignored, one that skips a number is refused, and a snapshot (`replace`) is good at any
number beyond the last, so that a publication lost or repeated can neither lose a key nor revive
one.

**Revisions.** Everything that a watcher could see raises the revision. What was changed is kept
in a log bounded in bytes; who is further behind than the log reaches, or comes from the life of
another index (another epoch), is given a snapshot.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    Change,
    Member,
    Outcome,
    Settings,
    Update,
    pack,
    unpack,
)

MAX_MEMBERS = 1000
"""Replicas of one model, over all namespaces."""

CHANGE_OVERHEAD = 256
"""Bytes that a logged change is counted as, beside its keys."""


class ReplicaState(NamedTuple):
    """One member as it is now. `lease_left` is in seconds."""

    member: Member
    holdings: int
    sequence: int
    lease_left: float


@dataclass
class _Lease:
    member: Member
    expires: float
    sequence: int = 0
    keys: set[bytes] = field(default_factory=set)


class Index:
    """The holdings of one namespace's replicas.

    `lease` is in seconds. A member holds at most `max_keys` keys: what it publishes beyond them is
    not listed and counted in `dropped`. The log keeps at most `log_bytes`. A key of 36 bytes
    takes 116 to 150 bytes per member that holds it. `key_bytes` is that of the members.
    """

    def __init__(
        self,
        *,
        lease: float = 10.0,
        max_keys: int = 250_000,
        log_bytes: int = 4 << 20,
        settings: Settings = INITIAL_SETTINGS,
    ) -> None:
        self.lease = lease
        self.settings = settings
        self.epoch = secrets.token_hex(8)
        self.dropped = 0
        self._max_keys = max_keys
        self._log_bytes = log_bytes
        self.key_bytes = 0
        self._leases: dict[str, _Lease] = {}
        self._log: deque[tuple[int, Change]] = deque()
        self._log_size = 0
        self._log_reaches = 0
        self._revision = 0
        self._members_since = 0
        self._author = ""
        self._revision_by_others = 0

    @property
    def revision(self) -> int:
        return self._revision

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    # Membership

    def join(self, member: Member, key_bytes: int, now: float) -> None:
        """Make `member` a member, or renew it; a member that joins again keeps its holdings.

        Raises ValueError if its keys are not as long as those of the others.
        """
        if self._leases and key_bytes != self.key_bytes:
            raise ValueError(f"keys of {key_bytes} bytes among keys of {self.key_bytes} bytes")
        self.key_bytes = key_bytes
        known = self._leases.get(member.incarnation)
        if known is not None and known.member == member:
            known.expires = now + self.lease
            return
        if known is not None:
            known.member, known.expires = member, now + self.lease
        else:
            self._leases[member.incarnation] = _Lease(member, now + self.lease)
        self._raise_revision(member.incarnation)
        self._members_since = self._revision

    def renew(self, incarnation: str, now: float) -> bool:
        """Extend the lease; False if `incarnation` is not a member."""
        known = self._leases.get(incarnation)
        if known is None:
            return False
        known.expires = now + self.lease
        return True

    def leave(self, incarnation: str) -> None:
        known = self._leases.pop(incarnation, None)
        if known is not None:
            # A watcher may miss that it was gone, if it joins again before the watcher looks.
            self._record(Change(incarnation, known.sequence, b"", b"", True))
            self._members_since = self._revision

    def expire(self, now: float) -> list[str]:
        """Let go whose lease has ended; return their incarnations.

        No lease ends later than a whole one from now, also if the clock went back.
        """
        for known in self._leases.values():
            known.expires = min(known.expires, now + self.lease)
        gone = [name for name, known in self._leases.items() if known.expires <= now]
        for incarnation in gone:
            self.leave(incarnation)
        return gone

    def forgive(self, seconds: float) -> None:
        """Extend every lease by a time in which renewals could not be received."""
        for known in self._leases.values():
            known.expires += seconds

    # Holdings

    def publish(self, incarnation: str, sequence: int, added: bytes, removed: bytes) -> Outcome:
        """Apply the publication that follows the last one. Raises ValueError for uneven keys."""
        known = self._leases.get(incarnation)
        if known is None:
            return Outcome.UNKNOWN
        if sequence <= known.sequence:
            return Outcome.STALE
        if sequence > known.sequence + 1:
            return Outcome.GAP
        gained, lost = unpack(added, self.key_bytes), unpack(removed, self.key_bytes)
        known.sequence = sequence
        known.keys.difference_update(lost)
        if len(known.keys) + len(gained) > self._max_keys:
            gained = self._fitting(known.keys, gained)
            added = pack(gained)
        known.keys.update(gained)
        if added or removed:
            # Also keys that were listed already: they tell that a stale entry is good again.
            self._record(Change(incarnation, sequence, added, removed, False))
        return Outcome.APPLIED

    def replace(self, incarnation: str, sequence: int, keys: bytes) -> Outcome:
        """Make `keys` all that the incarnation holds. Raises ValueError for uneven keys."""
        known = self._leases.get(incarnation)
        if known is None:
            return Outcome.UNKNOWN
        if sequence <= known.sequence:
            return Outcome.STALE
        held = unpack(keys, self.key_bytes)
        if len(held) > self._max_keys:
            held = self._fitting(set(), held)
            keys = pack(held)
        known.sequence = sequence
        known.keys = set(held)
        self._record(Change(incarnation, sequence, keys, b"", True))
        return Outcome.APPLIED

    def holdings(self, incarnation: str) -> int:
        known = self._leases.get(incarnation)
        return 0 if known is None else len(known.keys)

    def sequence(self, incarnation: str) -> int:
        known = self._leases.get(incarnation)
        return 0 if known is None else known.sequence

    def distinct_keys(self) -> int:
        return len(set[bytes]().union(*(known.keys for known in self._leases.values())))

    def replicas(self, now: float) -> list[ReplicaState]:
        return [
            ReplicaState(known.member, len(known.keys), known.sequence, known.expires - now)
            for known in self._leases.values()
        ]

    # Watching

    def configure(self, settings: Settings) -> None:
        if settings != self.settings:
            self.settings = settings
            self._raise_revision("")

    def has_news(self, watcher: str, epoch: str, revision: int) -> bool:
        """Whether anybody but `watcher` changed something since `revision`."""
        others = self._revision if self._author != watcher else self._revision_by_others
        return epoch != self.epoch or revision > self._revision or others > revision

    def changes_since(self, epoch: str, revision: int, watcher: str = "") -> Update:
        """What happened since `revision`, without the `watcher`'s own publications."""
        if epoch != self.epoch or not self._log_reaches <= revision <= self._revision:
            return self._snapshot(watcher)
        changes: list[Change] = []
        for at, change in reversed(self._log):
            if at <= revision:
                break
            if change.incarnation != watcher:
                changes.append(change)
        changes.reverse()
        members = self._members() if revision < self._members_since else None
        return self._update(False, members, changes)

    def _snapshot(self, watcher: str) -> Update:
        return self._update(
            True,
            self._members(),
            [
                Change(incarnation, known.sequence, pack(known.keys), b"", True)
                for incarnation, known in self._leases.items()
                if incarnation != watcher
            ],
        )

    def _members(self) -> tuple[Member, ...]:
        return tuple(known.member for known in self._leases.values())

    def _update(
        self, snapshot: bool, members: tuple[Member, ...] | None, changes: list[Change]
    ) -> Update:
        return Update(
            self._revision,
            self.epoch,
            snapshot,
            self.settings,
            self.key_bytes,
            members,
            tuple(changes),
        )

    def _fitting(self, keys: set[bytes], gained: list[bytes]) -> list[bytes]:
        fresh = [key for key in dict.fromkeys(gained) if key not in keys]
        surplus = set(fresh[self._max_keys - len(keys) :])
        self.dropped += len(surplus)
        return [key for key in gained if key not in surplus]

    def _raise_revision(self, author: str) -> None:
        if author != self._author:
            self._author, self._revision_by_others = author, self._revision
        self._revision += 1

    def _record(self, change: Change) -> None:
        self._raise_revision(change.incarnation)
        self._log.append((self._revision, change))
        self._log_size += _log_cost(change)
        while self._log_size > self._log_bytes:
            self._log_reaches, forgotten = self._log.popleft()
            self._log_size -= _log_cost(forgotten)


def _log_cost(change: Change) -> int:
    return CHANGE_OVERHEAD + len(change.added) + len(change.removed)
