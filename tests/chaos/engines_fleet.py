"""The replicas of a model under xinference, as the tracker, xinference and the process table show
them, and the last figures of the dead ones.

Threading: `Fleet` runs on one event loop. Other threads read its attributes, which are replaced as
a whole, and call the methods that are marked so.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import xoscar

from tests.harness.processes import ReplicaProcesses, mapped_regions, of_member
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.aio import within

LEASE = 10.0
"""The tracker's lease, in seconds."""
_LOOK = 0.5
_CALL = 5.0


@dataclass
class Replica:
    """A replica by xinference's name for it, through all of its incarnations."""

    name: str
    incarnation: str
    processes: ReplicaProcesses
    model: Any  # a reference to xinference's actor
    region: int  # the inode of its pool's memory
    is_up: bool = True
    in_flight: int = 0
    absences: list[tuple[float, float]] = field(default_factory=list)  # from death until up again

    def was_absent(self, began: float, ended: float) -> bool:
        return any(gone <= ended and began <= back for gone, back in self.absences)


class Fleet:
    """`workers` are addresses of xinference's workers."""

    def __init__(self, supervisor: str, workers: Iterable[str], model_uid: str) -> None:
        self._supervisor = supervisor
        self._workers = tuple(workers)
        self.model_uid = model_uid
        self.replicas: dict[str, Replica] = {}
        self.members: Mapping[str, dict[str, Any]] = {}
        """Members by incarnation, in the tracker's last answer."""
        self.looks = 0
        """How often the tracker answered."""
        self.silences: Counter[str] = Counter()
        """How often the tracker did not answer, by exception."""
        self.enabled = True
        self.figures: dict[str, dict[str, Any]] = {}
        """The last statistics of every incarnation, including the dead."""
        self.frozen: dict[str, float] = {}
        """Incarnations that were suspended, and their longest decision until then."""
        self.dead: list[ReplicaProcesses] = []
        self.dead_regions: set[int] = set()

    # -- looking ------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at the replicas, for ever."""
        while True:
            try:
                await self._look()
            except Exception as error:  # no tracker at the moment
                self.silences[type(error).__name__] += 1
            await asyncio.sleep(_LOOK)

    async def tracker(self) -> Any:
        """Raises xoscar.ActorNotExist."""
        return await xoscar.actor_ref(self._supervisor, tracker_uid(self.model_uid))

    async def _look(self) -> None:
        status = await within(_CALL, (await self.tracker()).status())
        members = {
            entry["incarnation"]: entry
            for namespace in status["namespaces"].values()
            for entry in namespace["replicas"]
        }
        for incarnation, entry in members.items():
            if entry["stats"] and "stale" not in entry["stats"]:
                self.figures[incarnation] = entry["stats"]
        self.members, self.enabled = members, status["enabled"]
        self.looks += 1
        known = {replica.incarnation for replica in self.replicas.values()}
        for incarnation in members.keys() - known:
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):  # it has just died
                await self._welcome(incarnation, members[incarnation])

    async def _welcome(self, incarnation: str, member: dict[str, Any]) -> None:
        processes = await asyncio.to_thread(of_member, member)
        if processes.transfer is None:
            return  # it cannot fetch yet
        name = member["replica"]
        model = await self._model(name, processes.model.pid)
        if model is None:
            return
        region = _region(processes.engine)
        replica = self.replicas.get(name)
        if replica is None:
            self.replicas[name] = Replica(name, incarnation, processes, model, region)
            return
        replica.incarnation, replica.processes = incarnation, processes
        replica.model, replica.region = model, region
        replica.absences = [(gone, min(back, time.monotonic())) for gone, back in replica.absences]
        replica.is_up = True

    async def _model(self, name: str, pid: int) -> Any:
        """The model's actor; None until xinference considers it ready."""
        for address in self._workers:
            try:
                worker = await xoscar.actor_ref(address, "worker")
                model = await within(_CALL, worker.get_model(name))
                if await within(_CALL, model.get_pid()) == pid:
                    return model
            except Exception:
                continue  # another worker's, or not ready: the next look will tell
        return None

    # -- for any thread -----------------------------------------------------------------------

    def up(self) -> list[Replica]:
        return [replica for replica in list(self.replicas.values()) if replica.is_up]

    def mourn(self, replica: Replica) -> None:
        """Note that the replica is about to be killed."""
        replica.is_up = False
        replica.absences.append((time.monotonic(), math.inf))
        self.dead.append(replica.processes)
        self.dead_regions.add(replica.region)

    def forget(self, replica: Replica) -> None:
        """Note that the replica is about to be removed for good."""
        self.mourn(replica)
        del self.replicas[replica.name]

    @contextlib.contextmanager
    def standing_still(self, replica: Replica) -> Iterator[None]:
        """From now on, ignore how long this incarnation's decisions take."""
        incarnation = replica.incarnation
        self.frozen.setdefault(incarnation, self.longest_scheduling_wait(incarnation))
        yield

    # -- figures ------------------------------------------------------------------------------

    def longest_scheduling_wait(self, incarnation: str) -> float:
        if incarnation in self.frozen:
            return self.frozen[incarnation]
        longest: float = self.figures.get(incarnation, {}).get("longest_scheduling_wait_s", 0.0)
        return longest

    def rollbacks(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for figures in list(self.figures.values()):
            total.update(figures["fetches"]["rolled_back"])
        return total

    def total(self, part: str, name: str) -> int:
        """The sum of a figure over all incarnations."""
        return sum(figures[part][name] for figures in list(self.figures.values()))


def _region(engine: psutil.Process) -> int:
    return next(iter(mapped_regions([engine])), 0)
