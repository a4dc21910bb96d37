"""Which replica of one namespace holds which chunks, with a version that watchers can follow; and
which replica is computing which chunks (`Claims`), so that the others wait instead of computing.

Pure data structures: no I/O, no clock, no lock. Their owner calls them from one thread and passes
the time in, in monotonic seconds.

Keys are `bytes` of one length per namespace and are never interpreted. On the wire and in the log
they are *packed*, concatenated into one `bytes`: sending a list costs four times as much.

**Sequences.** Each incarnation numbers its publications 1, 2, 3, … A repeated number is ignored, a
number that skips one is refused, and a snapshot may have any number above the last. So a lost or
repeated publication neither loses a key nor revives one.

**Revisions.** Every change that a watcher could see raises the revision. Changes are kept in a log
that is bounded in bytes. A watcher that is further behind than the log reaches, or that followed
another index (another epoch), gets a snapshot. Members travel as changes, too: there may be many.
Those that were found to differ leave at once, so each update lists them: whoever has rows of theirs
must not miss it.

**Claims.** A claim is a hint. It ends when its chunks are published, when the request that made it
ends, when its replica is lost, and when its time is up.
"""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    Change,
    Comparison,
    Member,
    Outcome,
    Settings,
    Update,
    Verdict,
    pack,
    unpack,
)

MAX_MEMBERS = 1000
"""Replicas of one model, over all namespaces."""

CHANGE_OVERHEAD = 256
"""Bytes that a logged change counts for, in addition to its keys."""


class Left(NamedTuple):
    incarnation: str


News = Change | Member | Left
"""What the log keeps; a `Member` has joined or changed."""

Parts = tuple[tuple[Member, ...], tuple[Change, ...], tuple[str, ...]]
"""`members`, `changes` and `left` of an update."""


@dataclass
class Lease:
    """A membership until `expires`, its keys, and the number of its last applied publication."""

    member: Member
    expires: float
    sequence: int = 0
    keys: set[bytes] = field(default_factory=set)


class Index:
    """The holdings of one namespace's replicas.

    `lease` is in seconds. A member holds at most `max_keys` keys; further ones are not listed, and
    counted in `dropped`. The log keeps at most `log_bytes`. A key of 36 bytes takes 116 to 150
    bytes for each member that holds it. `key_bytes` is the length of the members' keys.
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
        self.revision = 0
        self.key_bytes = 0
        self.dropped = 0
        self.differing: dict[str, Member] = {}  # the latest, also after they have left
        self._max_keys = max_keys
        self._log_bytes = log_bytes
        self._leases: dict[str, Lease] = {}
        self._log: deque[tuple[int, News]] = deque()
        self._log_size = 0
        self._log_start = 0
        self._author = ""
        self._revision_by_others = 0

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    # Membership

    def join(self, member: Member, key_bytes: int, now: float) -> None:
        """Add `member`, or renew its lease; a member that joins again keeps its holdings. Raises
        ValueError if its keys have another length than the other members'."""
        if self._leases and key_bytes != self.key_bytes:
            raise ValueError(f"keys of {key_bytes} bytes among keys of {self.key_bytes} bytes")
        self.key_bytes = key_bytes
        if self.renew(member.incarnation, now):
            self._replace(member)
        else:
            self._leases[member.incarnation] = Lease(member, now + self.lease)
            self._record(member)
        self._list_differing(member)

    def renew(self, incarnation: str, now: float) -> bool:
        """Extend the lease; False if `incarnation` is not a member."""
        lease = self._leases.get(incarnation)
        if lease is None:
            return False
        lease.expires = now + self.lease
        return True

    def set_serving(self, incarnation: str, serves: bool) -> None:
        """Note whether peers can fetch from `incarnation` now. Does nothing for a non-member."""
        if incarnation in self._leases:
            self._replace(self._leases[incarnation].member._replace(serves=serves))

    def judge(self, incarnation: str, comparison: Comparison) -> None:
        """What a member's canaries have shown."""
        member = self._leases[incarnation].member._replace(comparison=comparison)
        self._replace(member)
        self._list_differing(member)

    def comparison(self, incarnation: str) -> Comparison:
        lease = self._leases.get(incarnation)
        return Comparison() if lease is None else lease.member.comparison

    def leave(self, incarnation: str) -> Member | None:
        """Return the former member, None if `incarnation` was none."""
        lease = self._leases.pop(incarnation, None)
        if lease is None:
            return None
        # The change is for watchers that do not look before it joins again.
        self._record(Change(incarnation, lease.sequence, b"", b"", True), Left(incarnation))
        return lease.member

    def expire(self, now: float) -> list[str]:
        """Remove the members whose leases have run out; return their incarnations.

        No lease runs longer than a whole one from now, even if the clock went back.
        """
        for lease in self._leases.values():
            lease.expires = min(lease.expires, now + self.lease)
        expired = [name for name, lease in self._leases.items() if lease.expires <= now]
        for incarnation in expired:
            self.leave(incarnation)
        return expired

    def extend_leases(self, seconds: float) -> None:
        for lease in self._leases.values():
            lease.expires += seconds

    def members(self) -> tuple[Member, ...]:
        return tuple(lease.member for lease in self._leases.values())

    # Holdings

    def publish(
        self, incarnation: str, sequence: int, added: bytes, removed: bytes, replaces: bool = False
    ) -> Outcome:
        """Apply the next publication, or, with `replaces`, a snapshot: `added` is everything that
        the member holds. Raises ValueError for keys of another length."""
        lease = self._leases.get(incarnation)
        if lease is None:
            return Outcome.UNKNOWN
        if sequence <= lease.sequence:
            return Outcome.STALE
        if sequence > lease.sequence + 1 and not replaces:
            return Outcome.GAP
        gained, lost = unpack(added, self.key_bytes), unpack(removed, self.key_bytes)
        lease.sequence = sequence
        if replaces:
            lease.keys.clear()
        lease.keys.difference_update(lost)
        if len(lease.keys) + len(gained) > self._max_keys:
            gained = self._fitting(lease.keys, gained)
            added = pack(gained)
        lease.keys.update(gained)
        if added or removed or replaces:
            # Also keys that were listed already: they revive entries that a watcher noted as stale.
            self._record(Change(incarnation, sequence, added, removed, replaces))
        return Outcome.APPLIED

    def sequence(self, incarnation: str) -> int:
        """The number of the last publication that was applied."""
        lease = self._leases.get(incarnation)
        return 0 if lease is None else lease.sequence

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    # Watching

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self._raise_revision("")

    def has_update(self, watcher: str, epoch: str, revision: int) -> bool:
        """True if anyone but `watcher` changed something since `revision`."""
        others = self.revision if self._author != watcher else self._revision_by_others
        return epoch != self.epoch or revision > self.revision or others > revision

    def changes_since(self, epoch: str, revision: int, watcher: str = "") -> Update:
        """Return the changes since `revision` except the `watcher`'s own publications."""
        is_behind = epoch != self.epoch or not self._log_start <= revision <= self.revision
        parts = self._everything(watcher) if is_behind else self._news_since(revision, watcher)
        return Update(
            self.revision,
            self.epoch,
            is_behind,
            self.settings,
            self.key_bytes,
            *parts,
            tuple(self.differing.values()),
        )

    def _everything(self, watcher: str) -> Parts:
        changes = tuple(
            Change(incarnation, lease.sequence, pack(lease.keys), b"", True)
            for incarnation, lease in self._leases.items()
            if incarnation != watcher
        )
        return self.members(), changes, ()

    def _news_since(self, revision: int, watcher: str) -> Parts:
        changed: set[str] = set()
        changes: list[Change] = []
        left: list[str] = []
        for _, entry in takewhile(lambda entry: entry[0] > revision, reversed(self._log)):
            if isinstance(entry, Member):
                changed.add(entry.incarnation)
            elif isinstance(entry, Left):
                left.append(entry.incarnation)
            elif entry.incarnation != watcher:
                changes.append(entry)
        members = (member for member in self.members() if member.incarnation in changed)
        return tuple(members) if changed else (), tuple(reversed(changes)), tuple(left)

    def _fitting(self, keys: set[bytes], gained: list[bytes]) -> list[bytes]:
        fresh = [key for key in dict.fromkeys(gained) if key not in keys]
        surplus = set(fresh[self._max_keys - len(keys) :])
        self.dropped += len(surplus)
        return [key for key in gained if key not in surplus]

    def _raise_revision(self, author: str) -> None:
        if author != self._author:
            self._author, self._revision_by_others = author, self.revision
        self.revision += 1

    def _list_differing(self, member: Member) -> None:
        self.differing.pop(member.incarnation, None)
        if member.comparison.verdict is Verdict.DIFFERS:
            self.differing[member.incarnation] = member
            if len(self.differing) > MAX_MEMBERS:
                del self.differing[next(iter(self.differing))]

    def _replace(self, member: Member) -> None:
        lease = self._leases[member.incarnation]
        if lease.member != member:
            lease.member = member
            self._record(member)

    def _record(self, *news: News) -> None:
        """Log what one member did, as one revision."""
        self._raise_revision(news[0].incarnation)
        for entry in news:
            self._log.append((self.revision, entry))
            self._log_size += _log_cost(entry)
        while self._log_size > self._log_bytes:
            self._log_start, oldest = self._log.popleft()
            self._log_size -= _log_cost(oldest)


def _log_cost(entry: News) -> int:
    keys = len(entry.added) + len(entry.removed) if isinstance(entry, Change) else 0
    return CHANGE_OVERHEAD + keys


MAX_CLAIMED = 100_000
"""Chunks of one namespace; beyond them no replica waits for another."""


class _Claim(NamedTuple):
    incarnation: str
    until: float


class Claims:
    """At most `MAX_CLAIMED` keys are claimed at a time."""

    def __init__(self) -> None:
        self._claims: dict[bytes, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, incarnation: str, keys: Sequence[bytes], now: float, seconds: float) -> int:
        """Claim the ordered `keys` of a prefix for `seconds` and return 0; or change nothing and
        return how many leading keys a peer is computing or has computed.

        A key stands for its whole prefix: a peer that computes one chunk has its predecessors, or
        fetches them.
        """
        for owner, until in filter(None, map(self._claims.get, keys)):
            if owner != incarnation and now < until:
                return max(count for count, key in enumerate(keys, 1) if self._is_of(key, owner))
        if len(self._claims) + len(keys) > MAX_CLAIMED:
            self._expire(now)
        if len(self._claims) + len(keys) <= MAX_CLAIMED:
            self._claims |= dict.fromkeys(keys, _Claim(incarnation, now + seconds))
        return 0

    def release(self, incarnation: str, keys: Iterable[bytes]) -> None:
        """End the claims of `incarnation` on `keys`."""
        for key in keys:
            if self._is_of(key, incarnation):
                del self._claims[key]

    def forget(self, incarnation: str) -> None:
        """End all claims of `incarnation`."""
        self._claims = {
            key: claim for key, claim in self._claims.items() if claim.incarnation != incarnation
        }

    def _expire(self, now: float) -> None:
        self._claims = {key: claim for key, claim in self._claims.items() if now < claim.until}

    def _is_of(self, key: bytes, incarnation: str) -> bool:
        return key in self._claims and self._claims[key].incarnation == incarnation
