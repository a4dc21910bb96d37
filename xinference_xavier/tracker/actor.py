"""The tracker of one model: the supervisor side of sharing.

Life cycle: one `BlockTracker` per model uid, created at the supervisor's control address when the
model is launched, or by the first replica that finds none. All it holds is soft: a new one is
filled again by its replicas. It ends with the model.

Threading: everything runs on the event loop of the actor's pool, one call's synchronous part at a
time; only `watch` and `status` wait. What peers send is checked before use.

Errors: ValueError for what cannot be right, TrackerFullError beyond the limits, NotMemberError for
a watcher that must join first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import xoscar as xo

from xinference_xavier.checks import MAX_KEY_BYTES, check_count, check_identifier, shown
from xinference_xavier.hooks import Event, HoldingsDropped, SharingSwitched, hooks_of
from xinference_xavier.tracker.asking import (
    drop_all,
    examine_all,
    explain_at,
    stats_of_all,
    tell_weights,
)
from xinference_xavier.tracker.attendance import Attendance
from xinference_xavier.tracker.checks import (
    check_member,
    check_packed,
    check_question,
    check_settings,
    check_stats,
    check_switch,
    check_weights_version,
)
from xinference_xavier.tracker.events import (
    MAX_REPORTED,
    EventLog,
    Happened,
    check_event,
    event_dict,
)
from xinference_xavier.tracker.history import History
from xinference_xavier.tracker.index import Index, Member, Outcome, ReplicaState, Settings, Update
from xinference_xavier.tracker.news import News

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
"""Of what a replica and its tracker say to each other."""
MAX_NAMESPACES = 1000
MAX_CAUSE = 2000
"""Characters kept of why a replica did not start."""
MAX_MEMBERS = 1000
"""Replicas of all namespaces together."""
MAX_WATCHES = 4 * MAX_MEMBERS
"""That wait at a time; a member has one, and for a moment those that it gave up."""
MAX_WATCH = 60.0
"""Seconds that a watch waits at most, whatever it asks for."""


def tracker_uid(model_uid: str) -> str:
    return f"xavier-tracker-{model_uid}"


class NotMemberError(LookupError):
    """The watcher's lease has ended, or it never joined."""


class TrackerFullError(RuntimeError):
    """One more namespace, member or watch would exceed the tracker's limits."""


class JoinReply(NamedTuple):
    """`secret` is shared by the model's replicas, `lease` in seconds, `epoch` the index's life.

    `sequence` is the last that the index saw of this incarnation.
    """

    secret: bytes
    lease: float
    epoch: str
    sequence: int


class _Namespace:
    """One namespace's index, what its members reported last, and who waits for news."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.stats: dict[str, dict[str, Any]] = {}
        self.news = News()

    def wake(self) -> None:
        """Let all watchers look again."""
        self.news.tell(len(self.index))


class BlockTracker(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Membership and holdings of one model's replicas, kept apart by namespace.

    `lease` is how long a member lives without a heartbeat, `tick` how often that is looked at; both
    in seconds. `hooks` is the operator's function. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        model_uid: str,
        *,
        lease: float = 10.0,
        tick: float = 1.0,
        max_keys: int = 250_000,
        hooks: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._model_uid = model_uid
        self._lease = lease
        self._tick = tick
        self._max_keys = max_keys
        self._clock = clock
        self._settings = Settings()
        self._secret = os.urandom(32)
        self._failures: dict[str, str] = {}
        self._watches = 0
        self._refused = 0
        self._hooks = hooks_of(hooks)
        self._attendance = Attendance(model_uid)
        self._history = History()
        self._events = EventLog()
        self._namespaces: dict[str, _Namespace] = {}
        self._moving: dict[Member, float] = {}  # between two namespaces, and until when at most
        self._looked = clock()
        self._expiry: asyncio.Task[None] | None = None
        self._ended = False

    async def __post_create__(self) -> None:
        self._looked = self._clock()
        self._expiry = asyncio.create_task(self._expire_forever())

    async def __pre_destroy__(self) -> None:
        self._ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        for namespace in self._namespaces.values():
            namespace.news.tell_now()
        self._namespaces.clear()
        self._events.wake()

    # Membership

    async def join(
        self,
        namespace: str,
        member: Member,
        key_bytes: int,
        settings: Settings,
        replica: str = "",
        version: int = PROTOCOL_VERSION,
    ) -> JoinReply:
        """Make `member` a member of `namespace`, or renew it. `replica` is xinference's name.

        `settings` are the newest that it has seen: a tracker that took the place of another learns
        from them whether sharing was switched off.
        """
        if version != PROTOCOL_VERSION:
            raise ValueError(
                f"the replica speaks tracker protocol {shown(version)}, this tracker "
                f"{PROTOCOL_VERSION}; run the same version of xinference-xavier everywhere"
            )
        check_identifier("namespace", namespace)
        member = check_member(member)
        check_count("key_bytes", key_bytes, 1, MAX_KEY_BYTES)
        if replica:
            check_identifier("replica", replica)
        settings = check_settings(settings)
        index = self._room_for(namespace, member.incarnation)
        index.join(member, key_bytes, self._clock())
        if namespace not in self._namespaces:
            self._namespaces[namespace] = _Namespace(index)
        if settings.version > self._settings.version:
            self._configure(settings)
        self._namespaces[namespace].wake()
        self._moving.pop(member, None)
        arrival = self._attendance.joined(replica, member)
        self._failures.pop(replica, None)
        if arrival is not None:
            self._tell(arrival)
        return JoinReply(self._secret, self._lease, index.epoch, index.sequence(member.incarnation))

    async def heartbeat(
        self,
        namespace: str,
        incarnation: str,
        stats: dict[str, Any],
        events: tuple[dict[str, Any], ...] = (),
    ) -> bool:
        """Renew the lease, keep the figures and events; False: not a member, join again."""
        known = self._known(namespace, incarnation)
        if known is None or not known.index.renew(incarnation, self._clock()):
            return False
        check_stats(stats)
        known.stats[incarnation] = stats
        self._history.note(incarnation, stats)
        self._note_events(events)
        return True

    async def leave(self, namespace: str, incarnation: str, moving: bool = False) -> None:
        """End a membership; `moving` says that the same replica will join another namespace."""
        known = self._known(namespace, incarnation)
        if known is not None:
            if moving:
                self._moving |= {
                    state.member: self._clock() + self._lease
                    for state in known.index.replicas(self._clock())
                    if state.member.incarnation == incarnation
                }
            known.index.leave(incarnation)
            self._departed(namespace, [incarnation])

    # Holdings

    async def publish(
        self, namespace: str, incarnation: str, sequence: int, added: bytes, removed: bytes
    ) -> Outcome:
        """Apply a publication: packed keys that `incarnation` holds now and holds no more."""
        check_count("sequence", sequence, 1)
        check_packed("added", added)
        check_packed("removed", removed)
        known = self._known(namespace, incarnation)
        if known is None:
            return Outcome.UNKNOWN
        outcome = known.index.publish(incarnation, sequence, added, removed)
        known.wake()
        return outcome

    async def replace(
        self, namespace: str, incarnation: str, sequence: int, keys: bytes
    ) -> Outcome:
        """Take the packed `keys` for all that `incarnation` holds."""
        check_count("sequence", sequence, 1)
        check_packed("keys", keys)
        known = self._known(namespace, incarnation)
        if known is None:
            return Outcome.UNKNOWN
        outcome = known.index.replace(incarnation, sequence, keys)
        known.wake()
        return outcome

    async def watch(
        self, namespace: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> Update:
        """What the others changed since `revision` of `epoch`.

        Returns at once if there is something, else when there is or after `timeout` seconds; but
        see `News`: what comes in quick succession is told together. Raises NotMemberError, also
        when the lease ends meanwhile.
        """
        check_count("revision", revision, 0)
        with self._watching(timeout) as waits:
            until = asyncio.get_running_loop().time() + waits
            return await self._news(namespace, incarnation, epoch, revision, until)

    @contextlib.contextmanager
    def _watching(self, timeout: float) -> Iterator[float]:
        """One more that waits, and for how many seconds it may."""
        if not isinstance(timeout, (int, float)) or not abs(timeout) < math.inf:
            raise ValueError(f"timeout={shown(timeout)} is not a number of seconds")
        if self._watches >= MAX_WATCHES:
            self._refused += 1
            raise TrackerFullError(f"{MAX_WATCHES} watches wait for news of this model already")
        self._watches += 1
        try:
            yield max(0.0, min(timeout, MAX_WATCH))
        finally:
            self._watches -= 1

    async def _news(
        self, namespace: str, incarnation: str, epoch: str, revision: int, until: float
    ) -> Update:
        loop = asyncio.get_running_loop()
        while True:
            known = self._known(namespace, incarnation)
            if known is None or incarnation not in known.index:
                raise NotMemberError(
                    f"{incarnation!r} is no member of namespace {namespace!r}: join"
                )
            left = until - loop.time()
            told = not known.news.held_back
            if left <= 0 or (told and known.index.has_news(incarnation, epoch, revision)):
                return known.index.changes_since(epoch, revision, incarnation)
            await known.news.wait(left)

    # Operation

    async def set_enabled(self, enabled: bool) -> Settings:
        """Switch sharing of all the model's replicas on or off."""
        check_switch(enabled)
        # Wall time outruns the versions of a tracker before this one, whose replicas come later.
        version = max(self._settings.version + 1, time.time_ns())
        self._configure(Settings(version, enabled))
        self._tell(SharingSwitched(model_uid=self._model_uid, enabled=enabled))
        return self._settings

    async def set_weights_version(self, version: str) -> dict[str, list[str]]:
        """Tell every replica that its weights are of `version`; what became of it.

        Those that were reset since they were told last ("joined") share with each other from now
        on. The others ("not_reset") still hold what they computed before and stay as they are; so
        do those that do not answer ("unreachable").
        """
        check_weights_version(version)
        return await tell_weights(list(dict.fromkeys([*self._members(), *self._moving])), version)

    async def status(self) -> dict[str, Any]:
        """All that is known, JSON-able; the replicas' figures as they are now.

        `refused` counts what was too much: members, namespaces, watches, failures to remember.

        `stale` marks figures of the last heartbeat, of a replica that did not answer in time.
        """
        namespaces = dict(self._namespaces)
        described = await asyncio.gather(*map(self._describe, namespaces.values()))
        return {
            "model_uid": self._model_uid,
            "enabled": self._settings.enabled,
            "watches": self._watches,
            "refused": self._refused,
            "namespaces": dict(zip(namespaces, described, strict=True)),
        }

    async def _describe(self, known: _Namespace) -> dict[str, Any]:
        replicas = known.index.replicas(self._clock())
        keys, revision = known.index.distinct_keys(), known.index.revision
        answers = await stats_of_all([state.member for state in replicas])
        described = [
            _describe(
                state,
                self._attendance.name_of(state.member.incarnation),
                {**known.stats.get(state.member.incarnation, {}), "stale": True}
                if stats is None
                else stats,
            )
            for state, stats in zip(replicas, answers, strict=True)
        ]
        return {"revision": revision, "keys": keys, "replicas": described}

    async def history(self) -> dict[str, Any]:
        """Samples of the last hour; see `History`."""
        return self._history.to_dict()

    async def happened(self, after: int, timeout: float) -> list[Happened]:
        """Events whose number is above `after`; waits up to `timeout` seconds for the first.

        Raises ActorNotExist if this tracker ends meanwhile: there may be another in its place.
        """
        check_count("after", after, 0)
        with self._watching(timeout) as waits:
            happened = await self._events.wait_since(after, waits)
        if self._ended:
            raise xo.ActorNotExist(f"the tracker of {self._model_uid} has ended")
        return happened

    async def drop(self) -> dict[str, list[str]]:
        """Have every replica forget what it holds; which did ("dropped"), and which did not answer
        ("unreachable")."""
        told = await drop_all(self._members())
        self._tell(HoldingsDropped(model_uid=self._model_uid, replicas=len(told["dropped"])))
        return told

    async def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        """Where a prompt's chunks are and what a request would reuse; see `explain_at`."""
        check_question(question)
        groups = [
            [state.member for state in known.index.replicas(self._clock())]
            for known in self._namespaces.values()
        ]
        return await explain_at(groups, question)

    async def examine(self) -> dict[str, dict[str, Any]]:
        """Each replica, examined by itself; see `examination`."""
        return await examine_all(self._members())

    def _members(self) -> list[Member]:
        return [
            state.member
            for known in self._namespaces.values()
            for state in known.index.replicas(self._clock())
        ]

    def _tell(self, event: Event) -> None:
        self._hooks.tell(event)
        self._events.add(event_dict(event))

    def _note_events(self, events: tuple[dict[str, Any], ...]) -> None:
        """A replica with events that are none is a member all the same."""
        if not isinstance(events, tuple) or len(events) > MAX_REPORTED:
            self._refused += 1
            return
        for event in events:
            try:
                check_event(event)
            except ValueError:
                self._refused += 1
            else:
                self._events.add(event)

    # Failed starts

    async def report_failure(self, replica: str, cause: str) -> None:
        """Keep why the engine of `replica` (xinference's name for it) could not start: the first
        cause is the one that what is reported after it follows from."""
        check_identifier("replica", replica)
        if not isinstance(cause, str):
            raise ValueError(f"cause={shown(cause)} is not text")
        if len(self._failures) < MAX_MEMBERS or replica in self._failures:
            self._failures.setdefault(replica, cause[:MAX_CAUSE])
        else:
            self._refused += 1

    async def take_failure(self, replica: str) -> str | None:
        """The cause that was reported for `replica` since this was asked last."""
        check_identifier("replica", replica)
        return self._failures.pop(replica, None)

    def _known(self, namespace: str, incarnation: str) -> _Namespace | None:
        check_identifier("namespace", namespace)
        check_identifier("incarnation", incarnation)
        return self._namespaces.get(namespace)

    def _configure(self, settings: Settings) -> None:
        self._settings = settings
        for known in self._namespaces.values():
            known.index.configure(settings)
            known.wake()

    def _room_for(self, namespace: str, incarnation: str) -> Index:
        known = self._namespaces.get(namespace)
        if known is None and len(self._namespaces) >= MAX_NAMESPACES:
            self._refused += 1
            raise TrackerFullError(
                f"{namespace!r} would be one namespace of model {self._model_uid!r} too many; "
                f"a tracker keeps {MAX_NAMESPACES}"
            )
        members = sum(len(each.index) for each in self._namespaces.values())
        if (known is None or incarnation not in known.index) and members >= MAX_MEMBERS:
            self._refused += 1
            raise TrackerFullError(
                f"{incarnation!r} would be one replica of model {self._model_uid!r} too many; "
                f"a tracker keeps {MAX_MEMBERS}"
            )
        if known is not None:
            return known.index
        return Index(lease=self._lease, max_keys=self._max_keys, settings=self._settings)

    # Expiry

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            try:
                self._look(self._clock())
            except Exception:
                logger.exception("tracker of %s: looking at the leases failed", self._model_uid)

    def _look(self, now: float) -> None:
        """Let go whose lease has ended, but not for a time in which this loop stood still."""
        late = now - self._looked - self._tick
        self._looked = now
        self._history.tick(now, time.time())
        self._moving = {
            member: min(end, now + self._lease) for member, end in self._moving.items() if now < end
        }
        for digest, known in list(self._namespaces.items()):
            if late > self._tick:
                known.index.forgive(late)
            gone = known.index.expire(now)
            if gone:
                logger.warning(
                    "tracker of %s: no heartbeat from %s", self._model_uid, ", ".join(gone)
                )
                self._departed(digest, gone)
                for incarnation in gone:
                    self._tell(self._attendance.lost(incarnation))

    def _departed(self, namespace: str, incarnations: list[str]) -> None:
        known = self._namespaces[namespace]
        for incarnation in incarnations:
            known.stats.pop(incarnation, None)
        if not len(known.index):
            del self._namespaces[namespace]
        known.wake()


def _describe(state: ReplicaState, name: str, stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "incarnation": state.member.incarnation,
        "address": state.member.address,
        "replica": name,
        "holdings": state.holdings,
        "sequence": state.sequence,
        "lease_left_s": round(state.lease_left, 3),
        "stats": stats,
    }
