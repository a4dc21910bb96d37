"""The calls of a tracker that serve xinference and its operators, not replicas. For threading and
errors, see `tracker.actor`."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import xoscar as xo

from xinference_xavier.events import (
    CacheFlushed,
    Event,
    Hooks,
    RoutingChanged,
    SharingSwitched,
    event_dict,
)
from xinference_xavier.protocol.load import Observation
from xinference_xavier.protocol.prefixes import Kept
from xinference_xavier.protocol.tracker import (
    Member,
    Settings,
    check_question,
    check_routing,
    check_switch,
    check_weights_version,
)
from xinference_xavier.runtime.host import process_info
from xinference_xavier.runtime.validate import check_count, check_identifier
from xinference_xavier.stats.report import History
from xinference_xavier.tracker import fanout
from xinference_xavier.tracker.log import EventLog, EventRecord, Membership, StartupErrors
from xinference_xavier.tracker.namespaces import Namespaces, WatchLimit
from xinference_xavier.tracker.observers import Observers


class OperatorCalls(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Everything a tracker knows. `BlockTracker` adds the calls by which replicas change it."""

    def __init__(
        self, model_uid: str, namespaces: Namespaces, hooks: Hooks, clock: Callable[[], float]
    ) -> None:
        super().__init__()
        self._model_uid = model_uid
        self._namespaces = namespaces
        self._hooks = hooks
        self._clock = clock
        self._membership = Membership(model_uid)
        self._startup_errors = StartupErrors()
        self._observers = Observers(namespaces, self._membership.name_of, clock)
        self._watch_limit = WatchLimit()
        self._history = History()
        self._events = EventLog()
        self._ended = False

    async def status(self) -> dict[str, Any]:
        """Everything the tracker knows, JSON-able, with the replicas' current stats.

        `refused` counts what exceeded a limit: members, namespaces, watches, reported events and
        startup errors, claimed chunks. `dropped` counts the keys beyond a replica's limit.
        """
        return {
            "model_uid": self._model_uid,
            "enabled": self._namespaces.settings.enabled,
            "watches": self._watch_limit.count,
            "refused": (
                self._namespaces.refused
                + self._watch_limit.refused
                + self._events.refused
                + self._startup_errors.refused
            ),
            "dropped": sum(each.index.dropped for _, each in self._namespaces.items()),
            "hooks": {"failed": self._hooks.failed, "dropped": self._hooks.dropped},
            "namespaces": await fanout.namespaces_status(
                self._namespaces, self._membership.name_of, self._clock()
            ),
        }

    async def history(self) -> dict[str, Any]:
        """Samples of the last hour, JSON-able; see `History`."""
        return self._history.to_dict()

    async def wait_events(self, after: int, timeout: float) -> list[EventRecord]:
        """Return the events with numbers above `after`, or wait up to `timeout` seconds for one.
        Raises ActorNotExist if this tracker ends meanwhile: another may have taken its place."""
        check_count("after", after, 0)
        with self._watch_limit.admit(timeout) as seconds:
            events = await self._events.wait_since(after, seconds)
        self._check_alive()
        return events

    def _check_alive(self) -> None:
        if self._ended:
            raise xo.ActorNotExist(f"the tracker of {self._model_uid} has ended")

    async def observe(self, epoch: str, revision: int, version: int, timeout: float) -> Observation:
        """What is new for a router since `revision` of `epoch`, and since `version` of the loads;
        at the latest after `timeout` seconds. Raises ActorNotExist if this tracker ends meanwhile.
        """
        check_count("revision", revision, 0)
        check_count("version", version, 0)
        with self._watch_limit.admit(timeout) as seconds:
            found = await self._observers.wait(epoch, revision, version, seconds)
        self._check_alive()
        return found

    async def members_of(self, replica: str) -> list[Member]:
        """The members that belong to xinference's replica of this name: with data parallelism,
        several engines."""
        check_identifier("replica", replica)
        return [
            member
            for member in self._namespaces.all_members()
            if re.fullmatch(
                re.escape(replica) + r"(_dp\d+)?", self._membership.name_of(member.incarnation)
            )
        ]

    async def explain(self, question: dict[str, Any]) -> dict[str, Any]:
        """Where a prompt's chunks are and what a request would reuse; see `fanout.explain`."""
        check_question(question)
        return await fanout.explain(self._namespaces.members(), question)

    async def keep_prefixes(
        self, wanted: Mapping[str, Mapping[str, bool]] | None
    ) -> dict[str, Kept]:
        """Tell replicas, by name, which prefixes to keep, and which of them firmly; see
        `fanout.keep_prefixes`."""
        members = self._namespaces.all_members()
        return await fanout.keep_prefixes(members, self._membership.name_of, wanted)

    async def self_checks(self) -> dict[str, dict[str, Any]]:
        """The result of every replica's self-check, by incarnation."""
        return await fanout.self_check_all(self._namespaces.all_members())

    async def process_info(self) -> dict[str, Any]:
        """What the process that runs this tracker knows about itself; JSON-able."""
        return {**process_info(), "address": self.address}

    async def set_enabled(self, enabled: bool) -> Settings:
        """Switch sharing on or off for all replicas of the model."""
        check_switch("enabled", enabled)
        settings = self._configure(enabled=enabled)
        self._notify(SharingSwitched(model_uid=self._model_uid, enabled=enabled))
        return settings

    async def set_routing(self, routing: str) -> Settings:
        """Change how requests of the model are routed."""
        check_routing(routing)
        settings = self._configure(routing=routing)
        self._notify(RoutingChanged(model_uid=self._model_uid, routing=routing))
        return settings

    def _configure(self, **changes: Any) -> Settings:
        # Wall time beats the versions of earlier trackers, whose replicas may join later.
        version = max(self._namespaces.settings.version + 1, time.time_ns())
        settings = self._namespaces.settings._replace(version=version, **changes)
        self._namespaces.configure(settings)
        return settings

    async def set_weights_version(self, version: str) -> dict[str, list[str]]:
        """Tell every replica which version its weights are; see `fanout.set_weights_version`."""
        check_weights_version(version)
        members = self._namespaces.members_and_moving()
        return await fanout.set_weights_version(members, version)

    async def flush(self) -> dict[str, list[str]]:
        """Make every replica drop what it holds; see `fanout.flush_all`."""
        outcome = await fanout.flush_all(self._namespaces.all_members())
        self._notify(CacheFlushed(model_uid=self._model_uid, replicas=len(outcome["flushed"])))
        return outcome

    async def pop_startup_error(self, replica: str) -> str | None:
        """Return, once, why the engine of `replica` could not start; None if nothing was
        reported."""
        check_identifier("replica", replica)
        return self._startup_errors.pop(replica)

    def _notify(self, event: Event) -> None:
        self._hooks.notify(event)
        self._events.add(event_dict(event))
