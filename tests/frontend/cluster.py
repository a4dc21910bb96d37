"""Replicas on paper: what their tracker would tell a router."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.protocol.load import (
    Load,
    Observation,
    ReplicaLoad,
    RequestReport,
    Serving,
)
from xinference_xavier.protocol.tracker import SHORT_KEY, Change, Member, Settings, Update, pack
from xinference_xavier.routing.texts import Text, text_of

CHUNK = 128
SERVING = Serving(CHUNK, 1 << 20, routing="auto", queue=2)
RATES = (0.001, 0.0, 0.01, 1e-9)
"""A token takes a millisecond, a chunk from a peer another."""


def document(name: str, pieces: int = 40) -> Text:
    return text_of([f"{name} " * (pieces * 512 // (len(name) + 1) + 1)])


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name[:6]}{number}".encode().rjust(SHORT_KEY) for number in range(count)]


class Cluster:
    """A router and what it is told. Time passes only when it is told something."""

    def __init__(self, *replicas: str, **serving: Any) -> None:
        self.now = 100.0
        self.serving = SERVING._replace(**serving)
        self.router = ModelRouter(random.Random(0), clock=lambda: self.now)
        self._members: list[str] = []
        self._revisions = itertools.count(1)
        self._settings = Settings()
        self._changes: list[Change] = []
        self.join(*replicas)

    def join(self, *replicas: str) -> None:
        self._members += replicas
        self.tell(*(self.load(name) for name in replicas))

    def load(self, replica: str, prefill_s: float = 0.0, **fields: Any) -> ReplicaLoad:
        load = Load(self.serving, int(prefill_s * 1000), prefill_s, 0, rates=RATES)
        return ReplicaLoad(f"{replica} now", replica, 0.0, load._replace(**fields))

    def rest(self, seconds: float) -> None:
        """Time passes, and no replica has anything to do."""
        self.now += seconds
        self.tell(*map(self.load, self._members))

    def tell(
        self,
        *loads: ReplicaLoad,
        gone: Sequence[str] = (),
        complete: bool = False,
        requests: Sequence[RequestReport] = (),
    ) -> None:
        self.now += 0.001  # reports of the same moment are one
        members = tuple(Member(f"{name} now", "127.0.0.1:1") for name in self._members)
        update = Update(
            next(self._revisions), "epoch", True, self._settings, 12, members, (*self._changes,)
        )
        version = self.router.version + 1
        gone = tuple(f"{name} now" for name in gone)
        observation = Observation(update, version, complete, loads, gone, tuple(requests))
        for _ in self.router.observe(observation):
            pass

    def hold(self, replica: str, held: Sequence[bytes]) -> None:
        self._changes.append(
            Change(f"{replica} now", len(self._changes) + 1, pack(held), b"", False)
        )
        self.tell()

    def configure(self, **settings: Any) -> None:
        version = self._settings.version + 1
        self._settings = self._settings._replace(version=version, **settings)
        self.tell()
