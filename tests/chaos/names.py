"""Named prefixes in a chaos run: the tracker and its file are real, the replicas are the cluster's.

Hard names must not be lost while their replica lives and its weights stay, which each replica
watches itself (`Watch`); and whatever happened, the tracker's end included, all of them are back a
while after the faults.

Threading: a thread of its own passes the tracker's requests for prefixes on to the replicas.
"""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from examples.processes import until
from tests.harness.remote import RemoteError
from tests.harness.replicas import CHUNK_TOKENS
from xinference_xavier.protocol.prefixes import Copies, NewPrefix, Retention, Terms
from xinference_xavier.replica.inspect import Chunked

CHUNKS = 8
"""The length of each prefix; the smallest pool keeps three of them firmly."""
KEPT: dict[str, tuple[Retention, Copies]] = {
    "everywhere": ("hard", "all"),
    "somewhere": ("hard", 1),
    "here or there": ("soft", "all"),
}
RETURN_TIME = 90.0
"""Seconds at rest until all hard names are back: the keeper looks every second, computes one at a
time, and tries again after pauses that double."""
_PAUSE = 0.1

Command = Callable[..., Any]
"""Asks the tracker, or a replica."""


def chunked(question: Mapping[str, Any]) -> Chunked:
    """Each prefix has the same length."""
    return Chunked(CHUNKS * CHUNK_TOKENS, 2 * CHUNKS * CHUNK_TOKENS, CHUNK_TOKENS, [])


class NamedPrefixes:
    """`tracker` commands the tracker that there is; `replicas` are commands by incarnation, and
    `computed` says which requests a replica has computed."""

    def __init__(
        self,
        tracker: Command,
        replicas: Callable[[], Mapping[str, Command]],
        computed: Callable[[str], list[str]],
    ) -> None:
        self._tracker = tracker
        self._replicas = replicas
        self._computed = computed
        self._begun: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="chaos-names")
        self._thread.start()

    def add(self) -> None:
        """The replicas are up and share."""
        for name, (retention, copies) in KEPT.items():
            terms = Terms(ttl=86400.0, copies=copies, retention=retention)
            self._tracker("add_prefix", NewPrefix("", name, json.dumps({"prompt": name}), terms))

    def missing(self) -> list[str]:
        """The hard names that are not kept, once they have had time to come back."""
        until(lambda: not self._lost(), RETURN_TIME, interval=0.5)
        return self._lost()

    def _lost(self) -> list[str]:
        try:
            found = json.loads(self._tracker("prefixes", ""))
        except RemoteError as error:
            return [f"unknown: {error}"]
        states = {each["name"]: each["state"] for each in found}
        hard = [name for name, (retention, _) in KEPT.items() if retention == "hard"]
        return [f"{name} is {states.get(name)}" for name in hard if states.get(name) != "kept"]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _pass_on(self) -> None:
        while not self._ended.wait(_PAUSE):
            with suppress(RemoteError, KeyError):  # a lane has killed one of them
                asked: dict[str, tuple[str, str]] = self._tracker("asked_for_prefixes")
                for number, (replica, text) in asked.items():
                    if number in self._computed(replica):
                        self._tracker("answer", number)
                    elif number not in self._begun:
                        self._begun.add(number)
                        self._replicas()[replica]("compute", number, text, CHUNKS)


class Watch:
    """The names at one replica: `lost` counts chunks of firm prefixes that were evicted.

    `held` returns how many chunks of each firm prefix are in the pool. It may only grow, until the
    weights change or a peer turns out to compute differently.
    """

    def __init__(self, held: Callable[[], Mapping[str, int]]) -> None:
        self._held = held
        self._most: dict[str, int] = {}
        self.lost = 0

    def look(self) -> None:
        now = self._held()
        self.lost += sum(
            max(0, count - now[name]) for name, count in self._most.items() if name in now
        )
        self._most = dict(now)

    def reset(self) -> None:
        self._most.clear()
