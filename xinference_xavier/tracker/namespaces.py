"""The namespaces of one model, with their members and watchers.

Runs on the tracker's event loop. A namespace exists as long as it has members. Time is passed in,
in monotonic seconds; only `watch` uses the loop's clock.

A change after a quiet time is sent at once. Changes soon after it wait for the rest of that time
and are sent together: sending an update costs the tracker far more than the keys in it.
"""

import asyncio
import contextlib
from collections.abc import Callable, ItemsView, Mapping
from itertools import chain, count
from typing import Any

from xinference_xavier.protocol.sketches import Canaries, unpack_canaries
from xinference_xavier.protocol.tracker import (
    NO_CANARIES,
    SPLIT,
    CanaryReport,
    Comparison,
    Member,
    NotMemberError,
    Outcome,
    Settings,
    TrackerFullError,
    Update,
    Verdict,
    unpack,
)
from xinference_xavier.tracker.claims import Claims
from xinference_xavier.tracker.journal import MAX_MEMBERS, Journal
from xinference_xavier.tracker.judge import Judge

SPACING_PER_WATCHER = 0.0005
"""Seconds between two notifications, for each watcher. Twice what an update costs the tracker's
loop (0.25 ms), so that watchers take at most half of it and publishers find it free: 16 watchers
learn of a change within 8 ms, 64 within 32."""


class WatcherBatcher:
    """Notifies the watchers of one namespace, rate-limited by how many there are."""

    def __init__(self) -> None:
        self._notified = asyncio.Event()
        self._notified_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pending(self) -> bool:
        """True if a change is held back for further ones."""
        return self._timer is not None

    def notify(self, watchers: int) -> None:
        """Wake the watchers as soon as their number allows."""
        if self._timer is None:
            at = self._notified_at + SPACING_PER_WATCHER * watchers
            self._timer = asyncio.get_running_loop().call_at(at, self.notify_now)

    def notify_now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._notified_at = asyncio.get_running_loop().time()
        self._notified.set()
        self._notified = asyncio.Event()  # for the next notification

    async def wait_for(self, has_news: Callable[[], bool], timeout: float) -> None:
        """Wait until nothing is held back and there is news, for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.pending or not has_news():
                    await self._notified.wait()


class Namespace:
    """One namespace: its journal, its members' claims and latest stats, who of them computes the
    same, and its watchers."""

    def __init__(self, journal: Journal, on_change: Callable[[], None]) -> None:
        self.journal = journal
        self._on_change = on_change
        self.claims = Claims()
        self.judge = Judge()
        self.stats: dict[str, dict[str, Any]] = {}
        self.watchers = WatcherBatcher()

    def publish(
        self, incarnation: str, sequence: int, added: bytes, removed: bytes, replaces: bool = False
    ) -> Outcome:
        """Like `Journal.publish`; also ends the claims on what was added."""
        outcome = self.journal.publish(incarnation, sequence, added, removed, replaces)
        if self.claims and outcome is Outcome.APPLIED:
            self.release(incarnation, added)
        self.wake()
        return outcome

    def claim(self, incarnation: str, packed: bytes, now: float, seconds: float) -> int:
        """Nobody waits for a replica of which nothing can be fetched, nor does that one wait."""
        keys = unpack(packed)
        if self.journal.leases[incarnation].member.comparison.verdict is not Verdict.COMPARED:
            return 0
        return self.claims.claim(incarnation, keys, now, seconds)

    def release(self, incarnation: str, packed: bytes) -> None:
        self.claims.release(incarnation, unpack(packed))

    def forget(self, incarnation: str) -> None:
        """Drop the stats and claims of a former member, and what it computed."""
        self.stats.pop(incarnation, None)
        self.judge.forget(incarnation)
        self.claims.forget(incarnation)

    def wake(self) -> None:
        self.watchers.notify(len(self.journal))
        self._on_change()


class Namespaces:
    """All namespaces of `model_uid`. `lease` is in seconds; `settings` apply to all of them."""

    def __init__(self, model_uid: str, *, lease: float) -> None:
        self.settings = Settings()
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever any of them has changed."""
        self._model_uid = model_uid
        self._lease = lease
        self._all: dict[str, Namespace] = {}

    def items(self) -> ItemsView[str, Namespace]:
        return self._all.items()

    def find(self, name: str) -> Namespace | None:
        """The namespace, None if it has no members."""
        return self._all.get(name)

    def find_member(self, name: str, incarnation: str) -> Namespace:
        """Like `find`; raises NotMemberError unless `incarnation` is a member."""
        namespace = self.find(name)
        if namespace is None or incarnation not in namespace.journal:
            raise NotMemberError(
                f"{incarnation!r} is not a member of namespace {name!r}; join first"
            )
        return namespace

    def largest(self) -> Namespace | None:
        """The namespace with the most members, the oldest on ties; None without members."""
        return max(self._all.values(), key=lambda each: len(each.journal), default=None)

    def all_members(self) -> list[Member]:
        return [member for each in self._all.values() for member in each.journal.members()]

    def join(
        self,
        name: str,
        member: Member,
        now: float,
        report: CanaryReport = NO_CANARIES,
    ) -> Journal:
        """Like `Journal.join`; who joins leaves the namespace that it was in before. Also raises
        TrackerFullError beyond the limit, and ValueError for malformed canaries."""
        canaries = unpack_canaries(report.packed)
        namespace = self._all.get(name) or self._create()
        present = {each.incarnation for each in self.all_members()} - {member.incarnation}
        if len(present) >= MAX_MEMBERS:
            raise TrackerFullError(
                f"replica {member.incarnation!r} exceeds the {MAX_MEMBERS} of model "
                f"{self._model_uid!r}; launch a second model uid"
            )
        self._all[name] = namespace
        for former in self._all.keys() - {name}:
            self.leave(former, member.incarnation)
        found = self._compare(name, member.incarnation, canaries, report)
        namespace.journal.join(member._replace(comparison=found), now)
        namespace.wake()
        return namespace.journal

    def compare(self, name: str, incarnation: str, report: CanaryReport) -> Comparison:
        """Compare what a member has computed with what the others have. Raises NotMemberError, and
        ValueError for malformed canaries."""
        namespace = self.find_member(name, incarnation)
        canaries = unpack_canaries(report.packed)
        found = self._compare(name, incarnation, canaries, report)
        namespace.journal.judge(incarnation, found)
        namespace.wake()
        return found

    def _compare(
        self, name: str, incarnation: str, canaries: Canaries, report: CanaryReport
    ) -> Comparison:
        namespace, audited = self._all[name], dict(report.audited[-MAX_MEMBERS:])
        namespace.judge.forget(incarnation)
        base = name.partition(SPLIT)[0]
        found = {
            other: each.judge.compare(incarnation, canaries, report.cannot, audited)
            for other, each in self._all.items()
            if other.partition(SPLIT)[0] == base
        }
        comparison, home = found[name], self._home(name, found)
        if home != name:
            differs = comparison.verdict is Verdict.DIFFERS
            comparison = (comparison if differs else Comparison())._replace(namespace=home)
        elif comparison.verdict is Verdict.COMPARED:
            namespace.judge.add(incarnation, canaries, audited)
        return comparison

    def _home(self, name: str, found: Mapping[str, Comparison]) -> str:
        """The namespace in which a member of `name` belongs: of those that split from one, and what
        was `found` there, the one in which most compute the same, or a new one."""
        alike = {
            other: len(self._all[other].judge.alike)
            for other, comparison in found.items()
            if comparison.verdict is not Verdict.DIFFERS
        }
        if alike:
            return max(alike, key=lambda other: (alike[other], other == name))
        base = name.partition(SPLIT)[0]
        names = chain([base], (f"{base}{SPLIT}{number}" for number in count(1)))
        return next(other for other in names if other not in self._all)

    def leave(self, name: str, incarnation: str) -> None:
        namespace = self.find(name)
        if namespace is not None and namespace.journal.leave(incarnation):
            self._departed(name, [incarnation])

    def extend_leases(self, seconds: float) -> None:
        for namespace in self._all.values():
            namespace.journal.extend_leases(seconds)

    def expire(self, now: float) -> list[str]:
        """End the leases that have run out. Return the incarnations."""
        lost: list[str] = []
        for name, namespace in list(self._all.items()):
            if expired := namespace.journal.expire(now):
                self._departed(name, expired)
                lost += expired
        return lost

    def _create(self) -> Namespace:
        journal = Journal(lease=self._lease, settings=self.settings)
        return Namespace(journal, lambda: self.on_change())

    def _departed(self, name: str, incarnations: list[str]) -> None:
        namespace = self._all[name]
        for incarnation in incarnations:
            namespace.forget(incarnation)
        if not len(namespace.journal):
            del self._all[name]
        namespace.wake()

    def configure(self, settings: Settings) -> None:
        """Send `settings` to all members."""
        self.settings = settings
        for namespace in self._all.values():
            namespace.journal.configure(settings)
            namespace.wake()

    async def watch(
        self, name: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> Update:
        """See `BlockTracker.watch`."""

        def journal() -> Journal:
            return self.find_member(name, incarnation).journal

        watchers = self.find_member(name, incarnation).watchers
        await watchers.wait_for(lambda: journal().has_update(incarnation, epoch, revision), timeout)
        return journal().changes_since(epoch, revision, incarnation)

    def end(self) -> None:
        """Forget all namespaces and release their watchers."""
        for namespace in self._all.values():
            namespace.watchers.notify_now()
        self._all.clear()
