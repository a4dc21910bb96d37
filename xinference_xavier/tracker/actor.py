"""The tracker of one model: the supervisor side of sharing.

Life cycle: one `BlockTracker` per model uid, created at the supervisor's control address when the
model is launched, or by the first replica that finds none. All it holds is soft: a new one is
filled again by its replicas. It ends with the model.

Threading: everything runs on the event loop of the actor's pool, one call's synchronous part at a
time; only `watch`, `wait_events` and calls to replicas wait. What peers send is checked before use.

Errors: ValueError for what cannot be right, TrackerFullError beyond the limits, NotMemberError for
a watcher that must join first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import xoscar as xo

from xinference_xavier.events import CacheFlushed, Event, SharingSwitched, event_dict
from xinference_xavier.hooks import hooks_of
from xinference_xavier.protocol.tracker import (
    MAX_CLAIM_SECONDS,
    PROTOCOL_VERSION,
    JoinReply,
    Member,
    NotMemberError,
    Outcome,
    Settings,
    Update,
    check_member,
    check_packed,
    check_question,
    check_settings,
    check_stats,
    check_switch,
    check_version,
    check_weights_version,
    unpack,
)
from xinference_xavier.runtime.cancels import cancel_circles, mend_cancels
from xinference_xavier.runtime.host import process_info
from xinference_xavier.runtime.validate import (
    MAX_KEY_BYTES,
    check_count,
    check_identifier,
    check_seconds,
)
from xinference_xavier.stats.history import History
from xinference_xavier.tracker.event_log import EventLog, EventRecord
from xinference_xavier.tracker.fanout import (
    explain_at,
    flush_all,
    namespaces_status,
    self_check_all,
    send_weights_version,
)
from xinference_xavier.tracker.membership import Membership, StartupErrors
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.threads import provide_threads
from xinference_xavier.tracker.watchers import WatchLimit

logger = logging.getLogger(__name__)


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
        self._clock = clock
        self._secret = os.urandom(32)
        self._namespaces = Namespaces(model_uid, lease=lease, max_keys=max_keys)
        self._watch_limit = WatchLimit()
        self._hooks = hooks_of(hooks)
        self._membership = Membership(model_uid)
        self._history = History()
        self._events = EventLog()
        self._startup_errors = StartupErrors()
        self._looked = clock()
        self._expiry: asyncio.Task[None] | None = None
        self._ended = False

    async def __post_create__(self) -> None:
        mend_cancels()
        provide_threads()
        self._looked = self._clock()
        self._expiry = asyncio.create_task(self._expire_forever())

    async def __pre_destroy__(self) -> None:
        self._ended = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._namespaces.end()
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
        check_version(version)
        check_identifier("namespace", namespace)
        member = check_member(member)
        check_count("key_bytes", key_bytes, 1, MAX_KEY_BYTES)
        if replica:
            check_identifier("replica", replica)
        settings = check_settings(settings)
        index = self._namespaces.join(namespace, member, key_bytes, self._clock())
        if settings.version > self._namespaces.settings.version:
            self._namespaces.configure(settings)
        arrival = self._membership.joined(replica, member)
        self._startup_errors.pop(replica)
        if arrival is not None:
            self._notify(arrival)
        return JoinReply(self._secret, self._lease, index.epoch, index.sequence(member.incarnation))

    async def heartbeat(
        self,
        namespace: str,
        incarnation: str,
        stats: dict[str, Any],
        events: tuple[dict[str, Any], ...] = (),
    ) -> bool:
        """Renew the lease, keep the figures and events; False: not a member, join again."""
        known = self._namespaces.find(namespace, incarnation)
        if known is None or not known.index.renew(incarnation, self._clock()):
            return False
        check_stats(stats)
        known.stats[incarnation] = stats
        self._history.record(incarnation, stats)
        self._events.add_reported(events)
        return True

    async def leave(self, namespace: str, incarnation: str, moving: bool = False) -> None:
        """End a membership; `moving` says that the same replica will join another namespace."""
        self._namespaces.leave(namespace, incarnation, moving, self._clock())

    # Holdings

    async def publish(
        self, namespace: str, incarnation: str, sequence: int, added: bytes, removed: bytes
    ) -> Outcome:
        """Apply a publication: packed keys that `incarnation` holds now and holds no more."""
        check_count("sequence", sequence, 1)
        check_packed("added", added)
        check_packed("removed", removed)
        known = self._namespaces.find(namespace, incarnation)
        if known is None:
            return Outcome.UNKNOWN
        outcome = known.index.publish(incarnation, sequence, added, removed)
        return known.published(incarnation, added, outcome)

    async def replace(
        self, namespace: str, incarnation: str, sequence: int, keys: bytes
    ) -> Outcome:
        """Take the packed `keys` for all that `incarnation` holds."""
        check_count("sequence", sequence, 1)
        check_packed("keys", keys)
        known = self._namespaces.find(namespace, incarnation)
        if known is None:
            return Outcome.UNKNOWN
        outcome = known.index.replace(incarnation, sequence, keys)
        return known.published(incarnation, keys, outcome)

    async def watch(
        self, namespace: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> Update:
        """What the others changed since `revision` of `epoch`.

        Returns at once if there is something, else when there is or after `timeout` seconds; but
        see `WatcherBatcher`: changes in quick succession are sent together. Raises NotMemberError,
        also when the lease ends meanwhile.
        """
        check_count("revision", revision, 0)
        with self._watch_limit.one_more(timeout) as seconds:
            return await self._namespaces.wait_update(
                namespace, incarnation, epoch, revision, seconds
            )

    # Claims

    async def claim(self, namespace: str, incarnation: str, keys: bytes, seconds: float) -> int:
        """Say that `incarnation` is about to compute the packed `keys` of a prefix, for at most so
        many seconds; returns 0, or how many of the first ones a peer said this of before, for which
        it may wait instead. Raises NotMemberError."""
        check_packed("keys", keys)
        check_seconds("seconds", seconds, MAX_CLAIM_SECONDS)
        known = self._namespaces.find(namespace, incarnation)
        if known is None or incarnation not in known.index:
            raise NotMemberError(f"{incarnation!r} is no member of namespace {namespace!r}: join")
        claimed = unpack(keys, known.index.key_bytes)
        return known.claims.claim(incarnation, claimed, self._clock(), seconds)

    async def release(self, namespace: str, incarnation: str, keys: bytes) -> None:
        """`incarnation` will not compute these packed `keys` any more, or has done so."""
        check_packed("keys", keys)
        known = self._namespaces.find(namespace, incarnation)
        if known is not None:
            known.claims.release(incarnation, unpack(keys, known.index.key_bytes))

    # Operation

    async def set_enabled(self, enabled: bool) -> Settings:
        """Switch sharing of all the model's replicas on or off."""
        check_switch(enabled)
        # Wall time outruns the versions of a tracker before this one, whose replicas come later.
        version = max(self._namespaces.settings.version + 1, time.time_ns())
        settings = Settings(version, enabled)
        self._namespaces.configure(settings)
        self._notify(SharingSwitched(model_uid=self._model_uid, enabled=enabled))
        return settings

    async def set_weights_version(self, version: str) -> dict[str, list[str]]:
        """Tell every replica that its weights are of `version`; what became of it.

        Those that were reset since they were told last ("joined") share with each other from now
        on. The others ("not_reset") still hold what they computed before and stay as they are; so
        do those that do not answer ("unreachable").
        """
        check_weights_version(version)
        return await send_weights_version(self._namespaces.with_moving(self._clock()), version)

    async def status(self) -> dict[str, Any]:
        """All that is known, JSON-able; the replicas' figures as they are now.

        `refused` counts what was too much: members, namespaces, watches, failures to remember,
        chunks that are claimed. `dropped` counts the keys beyond a replica's limit.
        """
        known, waits = self._namespaces, self._watch_limit
        refused = (
            known.refused + waits.refused + self._events.refused + self._startup_errors.refused
        )
        refused += sum(each.claims.refused for _, each in known.items())
        return {
            "model_uid": self._model_uid,
            "enabled": known.settings.enabled,
            "watches": waits.count,
            "refused": refused,
            "dropped": sum(each.index.dropped for _, each in known.items()),
            "hooks": {"failed": self._hooks.failed, "dropped": self._hooks.dropped},
            "namespaces": await namespaces_status(known, self._membership.name_of, self._clock()),
        }

    async def history(self) -> dict[str, Any]:
        """Samples of the last hour; see `History`."""
        return self._history.to_dict()

    async def wait_events(self, after: int, timeout: float) -> list[EventRecord]:
        """Events whose number is above `after`; waits up to `timeout` seconds for the first.

        Raises ActorNotExist if this tracker ends meanwhile: there may be another in its place.
        """
        check_count("after", after, 0)
        with self._watch_limit.one_more(timeout) as seconds:
            happened = await self._events.wait_since(after, seconds)
        if self._ended:
            raise xo.ActorNotExist(f"the tracker of {self._model_uid} has ended")
        return happened

    async def flush(self) -> dict[str, list[str]]:
        """Have every replica forget what it holds; which did ("flushed"), and which did not answer
        ("unreachable")."""
        told = await flush_all(self._namespaces.all_members(self._clock()))
        self._notify(CacheFlushed(model_uid=self._model_uid, replicas=len(told["flushed"])))
        return told

    async def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        """Where a prompt's chunks are and what a request would reuse; see `explain_at`."""
        check_question(question)
        return await explain_at(self._namespaces.members(self._clock()), question)

    async def self_checks(self) -> dict[str, dict[str, Any]]:
        """What each replica finds when it checks itself; see `self_check`."""
        return await self_check_all(self._namespaces.all_members(self._clock()))

    async def facts(self) -> dict[str, Any]:
        """What the process that holds this tracker knows of itself; JSON-able."""
        return {
            **process_info(),
            "address": self.address,
            "cancel_circles": await cancel_circles(),
        }

    async def report_startup_error(self, replica: str, cause: str) -> None:
        """Keep why the engine of `replica` (xinference's name for it) could not start."""
        check_identifier("replica", replica)
        self._startup_errors.record(replica, cause)

    async def pop_startup_error(self, replica: str) -> str | None:
        """The cause that was reported for `replica` since this was asked last."""
        check_identifier("replica", replica)
        return self._startup_errors.pop(replica)

    def _notify(self, event: Event) -> None:
        self._hooks.notify(event)
        self._events.add(event_dict(event))

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
        if late > self._tick:
            self._namespaces.forgive(late)
        for gone in self._namespaces.expire(now):
            self._lost(gone)

    def _lost(self, incarnations: list[str]) -> None:
        """Their leases ended; all were in one namespace."""
        logger.warning(
            "tracker of %s: no heartbeat from %s", self._model_uid, ", ".join(incarnations)
        )
        for incarnation in incarnations:
            self._notify(self._membership.lost(incarnation))
