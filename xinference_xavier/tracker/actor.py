"""The tracker of one model: the supervisor's side of sharing. Replicas refill a new one; named
prefixes are in a file.

Threading: everything runs on the event loop of the actor's pool, and calls interleave only where
they await: in `watch`, in `observe` and in calls to replicas. What replicas report is checked as
far as it could harm the others: its version, its lengths, what routers and status pages read.

Errors: ValueError for a malformed report, TrackerFullError beyond the limit, NotMemberError for a
replica that has to join first.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xoscar as xo
from cachetools import LRUCache

from xinference_xavier.errors import ConfigError, NamesError
from xinference_xavier.events import (
    CacheFlushed,
    Hook,
    ReplicaDrained,
    ReplicaDraining,
    RoutingChanged,
    SharingSwitched,
    load_hook,
)
from xinference_xavier.limits import LIMIT
from xinference_xavier.protocol.load import (
    Drain,
    Load,
    Observation,
    RequestReport,
    check_load,
    check_requests,
)
from xinference_xavier.protocol.prefixes import LORA, NewPrefix
from xinference_xavier.protocol.tracker import (
    NO_CANARIES,
    PROTOCOL_VERSION,
    CanaryReport,
    Comparison,
    JoinReply,
    Member,
    Outcome,
    Settings,
    Update,
    check_stats,
    check_version,
    without_rank,
)
from xinference_xavier.runtime.net import patch_cancels
from xinference_xavier.stats.report import History
from xinference_xavier.tracker import fanout
from xinference_xavier.tracker.keeper import Keeper
from xinference_xavier.tracker.log import (
    EventLog,
    EventRecord,
    Membership,
    call_hook,
)
from xinference_xavier.tracker.names import Names
from xinference_xavier.tracker.names_file import Prefix
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.observers import Observers

logger = logging.getLogger(__name__)

MAX_STARTUP_ERROR = 2000
"""Characters kept of why a replica did not start."""
_SUPERVISOR_UID = "supervisor"
_MAX_THREADS = 32
"""They start on demand. A child process that is restarted occupies three of them."""


def _loaded(path: str) -> Hook | None:
    try:
        return load_hook(path)
    except ConfigError as error:
        logger.error("%s", error)  # noqa: TRY400  # the text is complete
        return None


class BlockTracker(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Members and holdings of one model's replicas, kept apart by namespace.

    `lease` is how long a member lives without a heartbeat, `tick` how often leases are checked;
    both in seconds. `hooks` names the operator's function as module:function; without it if that
    cannot be imported here. Named prefixes are in the folder `home`; without xinference there are
    none. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        model_uid: str,
        *,
        lease: float = 10.0,
        tick: float = 1.0,
        hooks: str | None = None,
        home: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._model_uid = model_uid
        self._lease = lease
        self._tick = tick
        self._clock = clock
        self._secret = os.urandom(32)
        self._namespaces = Namespaces(model_uid, lease=lease)
        self._membership = Membership(model_uid)
        # The first cause for each replica, of which later ones may be consequences.
        self._startup_errors: LRUCache[str, str] = LRUCache(LIMIT)
        self._observers = Observers(self._namespaces, self._membership.name_of, clock)
        self._keeper = None if home is None else self._make_keeper(Names(home, model_uid, clock))
        self._history = History()
        self._events = EventLog()
        self._hook = None if hooks is None else _loaded(hooks)
        self._ended = False
        self._put_back_at = clock()
        self._last_tick = clock()
        self._tasks: list[asyncio.Task[None]] = []

    def _make_keeper(self, names: Names) -> Keeper:
        return Keeper(
            names,
            self._namespaces,
            self._observers.loads,
            self._membership.name_of,
            self._compute,
            self._lease,
            self._clock,
        )

    async def __post_create__(self) -> None:
        patch_cancels()
        # xoscar serializes a message of more than a hundred parts on default threads of the loop.
        # Python allows four more than there are processors, and xinference 4.1's
        # `xinference-supervisor` occupies six, so a call with a long answer could wait forever.
        threads = ThreadPoolExecutor(_MAX_THREADS, "xavier-messages")
        asyncio.get_running_loop().set_default_executor(threads)
        self._tasks.append(asyncio.create_task(self._expire_forever()))
        if self._keeper is not None:
            self._tasks.append(asyncio.create_task(self._keeper.run()))
        if self._hook is not None:
            self._tasks.append(asyncio.create_task(call_hook(self._hook, self._events)))

    async def __pre_destroy__(self) -> None:
        self._ended = True
        for task in self._tasks:
            task.cancel()
        if self._keeper is not None:
            self._keeper.close()
        self._namespaces.end()
        self._observers.end()

    # What replicas report: membership

    async def join(
        self,
        namespace: str,
        member: Member,
        settings: Settings,
        replica: str = "",
        version: int = PROTOCOL_VERSION,
        report: CanaryReport = NO_CANARIES,
    ) -> JoinReply:
        """Add `member` to `namespace`, or renew its lease.

        `replica` is xinference's name for it. `settings` are the newest it has seen: a new tracker
        learns from them whether sharing is switched off. It learns from `report` what the replica
        computes.
        """
        check_version(version)
        journal = self._namespaces.join(namespace, member, self._clock(), report)
        if settings.version > self._namespaces.settings.version:
            # What an earlier tracker would have put back has ended with it.
            self._namespaces.configure(settings.put_back())
        self._startup_errors.pop(replica, None)
        event = self._membership.joined(replica, member)
        if event is not None:
            self._events.add(event)
        lease = journal.leases[member.incarnation]
        return JoinReply(
            self._secret,
            self._lease,
            journal.index.epoch,
            lease.sequence,
            lease.member.comparison,
        )

    async def compare(self, namespace: str, incarnation: str, report: CanaryReport) -> Comparison:
        """See `Namespaces.compare`."""
        return self._namespaces.compare(namespace, incarnation, report)

    async def heartbeat(
        self,
        namespace: str,
        incarnation: str,
        stats: dict[str, Any],
        events: tuple[dict[str, Any], ...] = (),
    ) -> bool:
        """Renew the lease and keep `stats` and `events`; False if the replica has to join first."""
        found = self._namespaces.find(namespace)
        if found is None or not found.journal.renew(incarnation, self._clock()):
            return False
        check_stats(stats)
        found.stats[incarnation] = stats
        self._history.record(incarnation, stats)
        self._events.add_reported(events)
        return True

    async def report_load(
        self,
        namespace: str,
        incarnation: str,
        load: Load,
        requests: tuple[RequestReport, ...] = (),
    ) -> bool:
        """Keep the load of `incarnation`, and what it reports of requests since its last call.
        Returns whether there is a router; if not, the heartbeat's interval is often enough."""
        self._namespaces.find_member(namespace, incarnation)
        self._observers.report(incarnation, check_load(load), check_requests(requests))
        return self._observers.listening

    async def set_serving(self, namespace: str, incarnation: str, serves: bool) -> None:
        """Tell the others whether they can fetch from `incarnation` now."""
        found = self._namespaces.find(namespace)
        if found is not None:
            found.journal.set_serving(incarnation, serves)
            found.wake()

    async def leave(self, namespace: str, incarnation: str) -> None:
        """End a membership. Who only changes its namespace joins the other one instead."""
        self._namespaces.leave(namespace, incarnation)
        self._observers.forget(incarnation)

    async def report_startup_error(self, replica: str, cause: str) -> None:
        """Keep why the engine of `replica` (xinference's name for it) could not start."""
        self._startup_errors.setdefault(replica, cause[:MAX_STARTUP_ERROR])

    # What replicas report: holdings

    async def publish(
        self,
        namespace: str,
        incarnation: str,
        sequence: int,
        added: bytes,
        removed: bytes,
        replaces: bool = False,
    ) -> Outcome:
        """Apply a publication: the packed short keys that `incarnation` holds from now on, and
        those it no longer holds; with `replaces`, all others."""
        found = self._namespaces.find(namespace)
        if found is None:
            return Outcome.UNKNOWN
        return found.publish(incarnation, sequence, added, removed, replaces)

    async def watch(
        self, namespace: str, incarnation: str, epoch: str, revision: int, timeout: float
    ) -> Update:
        """Return what other members changed since `revision` of `epoch`, as soon as watchers are
        notified of it, at the latest after `timeout` seconds.

        Raises NotMemberError, also if the lease ends meanwhile.
        """
        return await self._namespaces.watch(namespace, incarnation, epoch, revision, timeout)

    async def claim(self, namespace: str, incarnation: str, keys: bytes, seconds: float) -> int:
        """Announce that `incarnation` is about to compute the packed `keys` of a prefix.

        Returns 0, and the claim holds for `seconds`; or, if a peer claimed some of them before, how
        many leading keys that peer computes, for which the replica may wait. Raises NotMemberError.
        """
        found = self._namespaces.find_member(namespace, incarnation)
        return found.claim(incarnation, keys, self._clock(), seconds)

    async def release(self, namespace: str, incarnation: str, keys: bytes) -> None:
        """End the claim of `incarnation` on the packed `keys`."""
        found = self._namespaces.find(namespace)
        if found is not None:
            found.release(incarnation, keys)

    # What xinference, routers and operators ask

    async def status(self) -> dict[str, Any]:
        """Everything the tracker knows, JSON-able, with the replicas' current stats.

        `dropped` counts the chunks beyond a namespace's limit.
        """
        return {
            "model_uid": self._model_uid,
            "enabled": self._namespaces.settings.enabled,
            "dropped": sum(each.journal.dropped for _, each in self._namespaces.items()),
            "namespaces": await fanout.namespaces_status(
                self._namespaces,
                self._membership.name_of,
                self._observers.loads.draining,
            ),
            **({} if self._keeper is None else {"named": self._keeper.status()}),
        }

    async def history(self) -> bytes:
        """Samples of the last hour; see `History.to_json`."""
        return self._history.to_json()

    async def events(self, after: int = 0) -> list[EventRecord]:
        """The latest events, of those with numbers above `after`; oldest first."""
        return self._events.since(after)

    async def observe(self, epoch: str, revision: int, version: int, timeout: float) -> Observation:
        """What is new for a router since `revision` of `epoch`, and since `version` of the loads;
        at the latest after `timeout` seconds. Raises ActorNotExist if this tracker ends meanwhile.
        """
        found = await self._observers.wait(epoch, revision, version, timeout)
        self._check_alive()
        return found

    async def members_of(self, replica: str) -> list[Member]:
        """The members that belong to xinference's replica of this name: with data parallelism,
        several engines."""
        return [
            member
            for member in self._namespaces.all_members()
            if replica in (name := self._membership.name_of(member.incarnation), without_rank(name))
        ]

    async def drain(self, replica: str) -> Drain:
        """Keep routers from a replica that is about to be removed, and have its peers fetch what
        only it holds. Returns how far that is: call it again and again. As long after the last call
        as a lease, it gets requests again."""
        members = await self.members_of(replica)
        loads = self._observers.loads
        seconds = max((loads.drain_s(each.incarnation) for each in members), default=0.0)
        if not seconds:
            return Drain()
        until = self._clock() + self._lease
        begun = [each for each in members if self._observers.drain(each.incarnation, until)]
        if begun:
            event = ReplicaDraining(model_uid=self._model_uid, replica=replica, seconds=seconds)
            self._events.add(event)
        everybody = (each.incarnation for each in self._namespaces.all_members())
        stay = tuple(each for each in everybody if each not in loads.draining)
        return await fanout.drain(members, stay, seconds)

    async def drained(self, replica: str, requests: int, chunks: int) -> None:
        """The replica is removed now. So many `requests` have not ended, and peers have so many
        `chunks` that only it held."""
        event = ReplicaDrained(
            model_uid=self._model_uid, replica=replica, requests=requests, chunks=chunks
        )
        self._events.add(event)

    async def undrain(self, replica: str) -> None:
        """The replica was not removed, and gets requests again."""
        for member in await self.members_of(replica):
            self._observers.drain(member.incarnation, None)

    async def explain(self, packed: bytes) -> dict[str, Any]:
        """Locates the chunks of a packed question; see `fanout.explain`."""
        return await fanout.explain(self._namespaces, packed)

    async def self_checks(self) -> dict[str, dict[str, Any]]:
        """The result of every replica's self-check, by incarnation."""
        return await fanout.self_check_all(self._namespaces.all_members())

    async def set_enabled(self, enabled: bool, for_s: float | None = None) -> Settings:
        """Switch sharing on or off for all replicas of the model. With `for_s`, all that was
        changed for some time is put back after so many seconds."""
        return self._change(for_s, enabled=enabled)

    async def set_routing(self, routing: str, for_s: float | None = None) -> Settings:
        """Change how requests of the model are routed, perhaps `for_s` seconds only."""
        return self._change(for_s, routing=routing)

    def _change(self, for_s: float | None, **changes: Any) -> Settings:
        settings = self._namespaces.settings
        then = settings.then
        if for_s is not None:
            then = settings.switches
            self._put_back_at = self._clock() + for_s
        elif then is not None:
            then = then._replace(**changes)
        self._configure(settings._replace(**changes, then=then))
        self._put_back(self._clock())
        return self._namespaces.settings

    def _put_back(self, now: float) -> None:
        settings = self._namespaces.settings
        if settings.then is not None and now >= self._put_back_at:
            self._configure(settings.put_back())

    def _configure(self, settings: Settings) -> None:
        before = self._namespaces.settings
        # Wall time beats the versions of earlier trackers, whose replicas may join later.
        version = max(before.version + 1, time.time_ns())
        self._namespaces.configure(settings._replace(version=version))
        if settings.enabled != before.enabled:
            self._events.add(SharingSwitched(model_uid=self._model_uid, enabled=settings.enabled))
        if settings.routing != before.routing:
            routing = settings.routing or self._observers.loads.routing
            self._events.add(RoutingChanged(model_uid=self._model_uid, routing=routing))

    async def set_weights_version(self, version: str) -> dict[str, list[str]]:
        """Tell every replica which version its weights are; see `fanout.set_weights_version`."""
        return await fanout.set_weights_version(self._namespaces.all_members(), version)

    async def flush(self) -> dict[str, list[str]]:
        """Make every replica drop what it holds; see `fanout.flush_all`."""
        outcome = await fanout.flush_all(self._namespaces.all_members())
        self._events.add(CacheFlushed(model_uid=self._model_uid, replicas=len(outcome["flushed"])))
        return outcome

    async def pop_startup_error(self, replica: str) -> str | None:
        """Return, once, why the engine of `replica` could not start; None if nothing was
        reported."""
        return self._startup_errors.pop(replica, None)

    # Named prefixes, by tenant and name: see `Keeper`, whose errors these raise, too

    async def add_prefix(self, new: NewPrefix) -> dict[str, Any]:
        """Keep a prefix, perhaps in place of another one. Returns its report."""
        return await self._named().add(new)

    async def change_prefix(
        self, tenant: str, name: str, terms: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Change the given terms of a prefix. Returns its report."""
        return await self._named().change(tenant, name, terms)

    async def remove_prefix(self, tenant: str, name: str) -> None:
        """Forget a prefix, in the file, too."""
        await self._named().names.remove(tenant, name)

    async def use_prefix(self, tenant: str, name: str, known: str) -> tuple[str, str | None]:
        """Begin a prefix's lifetime anew. Returns its id, and its content unless `known` is that
        id."""
        prefix = self._named().names.use(tenant, name)
        return prefix.id, None if prefix.id == known else prefix.content

    async def prefix(self, tenant: str, name: str) -> dict[str, Any]:
        """The report of a prefix."""
        return self._named().report(tenant, name)

    async def prefixes(self, tenant: str) -> bytes:
        """Reports of all prefixes of a tenant, as JSON."""
        return json.dumps(self._named().reports(tenant)).encode()

    def _named(self) -> Keeper:
        self._check_alive()
        if self._keeper is None:
            raise NamesError("prefixes have names only under xinference")
        return self._keeper

    async def _compute(self, replica: str, prefix: Prefix, request_id: str) -> None:
        """Have the replica's model compute the prefix, as a client would."""
        supervisor = await xo.actor_ref(address=self.address, uid=_SUPERVISOR_UID)
        model = await supervisor.get_model(replica, xavier_replica=True)
        content = json.loads(prefix.content)
        config: dict[str, Any] = {"max_tokens": 1}
        if prefix.tenant:
            config["cache_salt"] = prefix.tenant
        config |= {key: content[key] for key in ("tools", LORA) if key in content}
        if "prompt" in content:
            await model.generate(content["prompt"], config, request_id=request_id)
        else:
            await model.chat(content["messages"], config, request_id=request_id)

    # Expiry

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick)
            try:
                self._expire_leases(self._clock())
            except Exception:
                logger.exception("lease check failed: model=%s", self._model_uid)

    def _expire_leases(self, now: float) -> None:
        """End overdue leases. Time in which this loop stood still does not count, because no
        heartbeat could be received."""
        delay = now - self._last_tick - self._tick
        self._last_tick = now
        self._history.tick(now, time.time())
        if delay > self._tick:
            self._namespaces.extend_leases(delay)
            self._observers.extend_drains(delay)
        for incarnation in self._namespaces.expire(now):
            self._observers.forget(incarnation)
            logger.warning(
                "replica left, lease expired: model=%s incarnation=%s", self._model_uid, incarnation
            )
            self._events.add(self._membership.lost(incarnation))
        self._put_back(now)
        for incarnation in self._observers.expire_drains(now):
            text = "replica gets requests again, nobody drains it: model=%s incarnation=%s"
            logger.warning(text, self._model_uid, incarnation)

    def _check_alive(self) -> None:
        if self._ended:
            raise xo.ActorNotExist(f"the tracker of {self._model_uid} has ended")
