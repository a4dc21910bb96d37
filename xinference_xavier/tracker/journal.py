"""What happened in one namespace: its members' leases, what they hold, and the news for watchers.

Pure data structures: no I/O, no clock, no lock. Their owner calls them from one thread and passes
the time in, in monotonic seconds.

**Sequences.** Each incarnation numbers its publications 1, 2, 3, … A repeated number is ignored, a
number that skips one is refused, and a snapshot may have any number above the last. So a lost or
repeated publication neither loses a key nor revives one.

**Revisions.** Whatever a watcher could see raises the revision, and is kept as news in a log that
is bounded in bytes. A watcher that is further behind than the log reaches, or that followed another
index (another epoch), gets a snapshot.
"""

import secrets
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from xinference_xavier.index import Holder, Index, Members
from xinference_xavier.protocol.tracker import (
    INITIAL_SETTINGS,
    SHORT_KEY,
    Change,
    Comparison,
    Left,
    Member,
    News,
    Outcome,
    Settings,
    Update,
    Verdict,
    check_packed,
    pack,
    unpack,
)

MAX_MEMBERS = 1000
"""Replicas of one model, over all namespaces."""
MAX_KEYS = 2_000_000
"""Chunks that one namespace lists."""
NEWS_OVERHEAD = 256
"""Bytes that logged news count for, in addition to their keys."""


@dataclass(eq=False, kw_only=True)
class Lease(Holder):
    """A membership until `expires`."""

    member: Member
    expires: float = 0.0


class Leases(Members[Lease]):
    def follow(self, news: Member | Left | Settings) -> None:
        match news:
            case Settings():
                self.settings = news
            case Left(incarnation):
                del self[incarnation]
            case Member(incarnation) if incarnation in self:
                self[incarnation].member = news
            case Member(incarnation):
                taken = sum(lease.bit for lease in self.values())
                self[incarnation] = Lease(incarnation, ~taken & (taken + 1), member=news)


class Journal:
    """The news of one namespace, and the index to which they have led.

    `lease` is in seconds. Chunks that do not fit into the index are counted in `dropped`. The log
    keeps at most `log_bytes`.
    """

    def __init__(
        self,
        *,
        lease: float = 10.0,
        log_bytes: int = 4 << 20,
        settings: Settings = INITIAL_SETTINGS,
    ) -> None:
        self.lease = lease
        self.dropped = 0
        self.leases = Leases()
        self.leases.settings = settings
        self.index = Index(self.leases)
        self.index.epoch = secrets.token_hex(8)
        self._log_bytes = log_bytes
        self._differed: dict[str, Left] = {}  # the latest that have left
        self._log: deque[tuple[int, str, News]] = deque()  # with revision and author
        self._log_size = 0
        self._log_start = 0
        self._author = ""
        self._revision_by_others = 0

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self.leases

    def __len__(self) -> int:
        return len(self.leases)

    # Membership

    def join(self, member: Member, now: float) -> None:
        """Add `member`, or renew its lease; a member that joins again keeps its holdings."""
        self._replace(member)
        self.renew(member.incarnation, now)

    def renew(self, incarnation: str, now: float) -> bool:
        """Extend the lease; False if `incarnation` is not a member."""
        lease = self.leases.get(incarnation)
        if lease is None:
            return False
        lease.expires = now + self.lease
        return True

    def set_serving(self, incarnation: str, serves: bool) -> None:
        """Note whether peers can fetch from `incarnation` now. Does nothing for a non-member."""
        if incarnation in self.leases:
            self._replace(self.leases[incarnation].member._replace(serves=serves))

    def judge(self, incarnation: str, comparison: Comparison) -> None:
        """What a member's canaries have shown."""
        self._replace(self.leases[incarnation].member._replace(comparison=comparison))

    def leave(self, incarnation: str) -> Member | None:
        """Return the former member, None if `incarnation` was none."""
        lease = self.leases.get(incarnation)
        if lease is None:
            return None
        left = Left(incarnation, lease.member.comparison)
        self._record(incarnation, left)
        if left.comparison.verdict is Verdict.DIFFERS:
            self._differed[incarnation] = left
            if len(self._differed) > MAX_MEMBERS:
                del self._differed[next(iter(self._differed))]
        return lease.member

    def expire(self, now: float) -> list[str]:
        """Remove the members whose leases have run out; return their incarnations.

        No lease runs longer than a whole one from now, even if the clock went back.
        """
        for lease in self.leases.values():
            lease.expires = min(lease.expires, now + self.lease)
        expired = [name for name, lease in self.leases.items() if lease.expires <= now]
        for incarnation in expired:
            self.leave(incarnation)
        return expired

    def extend_leases(self, seconds: float) -> None:
        for lease in self.leases.values():
            lease.expires += seconds

    def members(self) -> tuple[Member, ...]:
        return tuple(lease.member for lease in self.leases.values())

    # Holdings

    def publish(
        self, incarnation: str, sequence: int, added: bytes, removed: bytes, replaces: bool = False
    ) -> Outcome:
        """Apply the next publication, or, with `replaces`, a snapshot: `added` is everything that
        the member holds. Raises ValueError for keys of another length."""
        lease = self.leases.get(incarnation)
        if lease is None:
            return Outcome.UNKNOWN
        if sequence <= lease.sequence:
            return Outcome.STALE
        if sequence > lease.sequence + 1 and not replaces:
            return Outcome.GAP
        check_packed("added", added)
        check_packed("removed", removed)
        if len(self.index) + len(added) // SHORT_KEY > MAX_KEYS:
            added = self._fitting(lease, unpack(added), unpack(removed), replaces)
        if added or removed or replaces:
            # Also keys that were listed already: they revive entries that a watcher noted as stale.
            self._record(incarnation, Change(incarnation, sequence, added, removed, replaces))
        lease.sequence = sequence
        return Outcome.APPLIED

    # Watching

    def configure(self, settings: Settings) -> None:
        self._record("", settings)

    def has_update(self, watcher: str, epoch: str, revision: int) -> bool:
        """True if anyone but `watcher` changed something since `revision`."""
        latest = self.index.revision
        others = latest if self._author != watcher else self._revision_by_others
        return epoch != self.index.epoch or revision > latest or others > revision

    def changes_since(self, epoch: str, revision: int, watcher: str = "") -> Update:
        """The news since `revision` except those of the `watcher` itself."""
        index = self.index
        is_behind = epoch != index.epoch or not self._log_start <= revision <= index.revision
        news = self._everything(watcher) if is_behind else self._news_since(revision, watcher)
        return Update(index.revision, index.epoch, is_behind, news)

    def _everything(self, watcher: str) -> tuple[News, ...]:
        others = [lease for name, lease in self.leases.items() if name != watcher]
        return (
            self.leases.settings,
            *(left for name, left in self._differed.items() if name != watcher),
            *(lease.member for lease in others),
            *(Change(each.name, each.sequence, pack(each.keys), b"", True) for each in others),
        )

    def _news_since(self, revision: int, watcher: str) -> tuple[News, ...]:
        latest = takewhile(lambda entry: entry[0] > revision, reversed(self._log))
        found = [news for _, author, news in latest if not author or author != watcher]
        return tuple(reversed(found))

    def _fitting(
        self, lease: Lease, gained: list[bytes], lost: list[bytes], replaces: bool
    ) -> bytes:
        """The packed keys that there is room for, of those that the member has gained."""
        holders = self.index.full_set
        going = (lease.keys if replaces else lease.keys.intersection(lost)).difference(gained)
        room = MAX_KEYS - len(self.index) + sum(holders(key) == lease.bit for key in going)
        surplus = set([key for key in dict.fromkeys(gained) if not holders(key)][room:])
        self.dropped += len(surplus)
        return pack(key for key in gained if key not in surplus)

    def _replace(self, member: Member) -> None:
        lease = self.leases.get(member.incarnation)
        if lease is None or lease.member != member:
            self._differed.pop(member.incarnation, None)
            self._record(member.incarnation, member)

    def _record(self, author: str, news: News) -> None:
        """Apply the news, and log them for watchers."""
        for _ in self.index.follow(news):
            pass
        if author != self._author:
            self._author, self._revision_by_others = author, self.index.revision
        self.index.revision += 1
        self._log.append((self.index.revision, author, news))
        self._log_size += _log_cost(news)
        while self._log_size > self._log_bytes:
            self._log_start, _, oldest = self._log.popleft()
            self._log_size -= _log_cost(oldest)


def _log_cost(news: News) -> int:
    keys = len(news.added) + len(news.removed) if isinstance(news, Change) else 0
    return NEWS_OVERHEAD + keys
