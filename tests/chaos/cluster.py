"""The replicas, the tracker and their host, as processes, and a record of what happened to them.

Threading: the lanes' threads call everything here; only one lane at a time works on a replica.
"""

import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from examples.processes import until
from tests.chaos.disk import ROWS as DISK_ROWS
from tests.chaos.disk import rollbacks as of_disk
from tests.chaos.mutations import Mutation
from tests.chaos.names import NamedPrefixes
from tests.chaos.near import AUTO, are_neighbours
from tests.chaos.node import Node, Settings
from tests.chaos.tracker import LEASE, HostNode, TrackerNode
from tests.chaos.workload import ROW_BYTES
from tests.faults import ORDERED, taken
from tests.harness.processes import frozen
from tests.harness.remote import EndedError
from tests.harness.replicas import MODEL

FETCH_TIMEOUT = 1.0
DRAIN = 10.0
"""Seconds; beyond the lease of a replica that is lost meanwhile."""
READY_TIME = 180.0
"""Seconds until a replica is up again; its transfer process imports torch and may pause."""
POOLS = {"n0": 64, "n1": 96, "n2": 160, "n3": 240, "n4": 64}
"""Rows; all documents together have 312 chunks."""


class Cluster:
    def __init__(
        self,
        folder: Path,
        seed: int,
        mutation: Mutation | None = None,
        pools: Mapping[str, int] = POOLS,
        transport: str = AUTO,
    ) -> None:
        """`pools` maps each replica to its pool's rows; `transport` is `AUTO` or one of
        `ORDERED`."""
        self.loads_in_place = transport == AUTO
        ordered = ORDERED.get(transport)
        self._transport = AUTO if ordered is None else f"tests.faults:{ordered.__name__}"
        self._pools = pools
        self.folder = folder
        self._seed = seed
        self._mutation = mutation
        self._generations: Counter[str] = Counter()
        self._weights_number = 0
        self.weights = "w0"
        self.membership = threading.Lock()
        """Held while replicas or the tracker look dead."""
        self.resets = threading.RLock()
        """Held while the weights of some replicas differ."""
        self.nodes: dict[str, Node] = {}
        self.dead: list[Node] = []
        self.absences: list[tuple[str, float, float]] = []
        self._expired: list[tuple[str, float]] = []
        self.stopped: dict[str, list[tuple[float, float]]] = {}
        self.regions: dict[str, int] = {}
        self.transfer_pids: dict[str, set[int]] = {}
        self.failed_on_killed = 0
        self.partings = 0
        """How often a replica left the others, or the tracker dropped it, after the warm-up."""
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.damaged_disks = 0
        self.host = HostNode()
        self.tracker = TrackerNode(folder)
        self.host.call("set_tracker", self.tracker.address)
        for name in pools:
            self.start(name)
        self.names = NamedPrefixes(
            lambda *asked: self.tracker.call(*asked),
            lambda: {each.incarnation: each.call for each in list(self.nodes.values())},
            self._computed,
        )

    # -- replicas -----------------------------------------------------------------------------

    def start(self, name: str, takes_orders: bool = True) -> None:
        """Start a new incarnation of `name`, with its workload paused."""
        self._generations[name] += 1
        incarnation = f"{name}-{self._generations[name]}"
        settings = Settings(
            incarnation=incarnation,
            rows=self._pools[name],
            folder=self.folder / incarnation,
            weights=self.weights,
            seed=zlib.crc32(f"{self._seed} {incarnation}".encode()),
            mutation=self._mutation,
            config={
                "model_uid": MODEL,
                "tracker_address": self.tracker.address,
                "worker_address": self.host.address,
                "host": "127.0.0.1",
                "fetch_timeout": FETCH_TIMEOUT,
                "drain": DRAIN,
                "transport": self._transport,
                "disk": str(self.disk),
                "disk_bytes": DISK_ROWS * ROW_BYTES,
            },
            takes_orders=takes_orders,
        )
        self.nodes[name] = Node(settings)
        self.regions[incarnation] = self.nodes[name].call("region_inode")

    def is_up(self, name: str) -> bool:
        """Whether it has joined and has a transfer process."""
        return bool(self.nodes[name].figures().get("is_up"))

    def wait_until_up(self, name: str) -> None:
        if not until(lambda: self.is_up(name), READY_TIME):
            raise TimeoutError(f"{self.nodes[name].incarnation} did not start in time")

    def share(self, name: str) -> None:
        """Give a replica the common weights after its start or a reset, and let it share."""
        with self.resets:
            self.nodes[name].call("reset", self.weights)
            self.announce_weights([name])

    def announce_weights(self, names: list[str]) -> None:
        """Announce these replicas' weights, once they are members that the tracker can tell."""

        def told() -> bool:
            if any(not self.nodes[name].figures().get("namespace") for name in names):
                return False
            with suppress(EndedError):  # another lane is killing the tracker
                self.tracker.call("set_weights_version", self.weights)
            return all(self._is_sharing(name) for name in names)

        if not until(told, READY_TIME, interval=0.1):
            raise TimeoutError(f"{names} do not share with replicas of the same weights")

    def _is_sharing(self, name: str) -> bool:
        here = self.nodes[name].incarnation
        return here in self.members().get(f"namespace@{self.weights}", ())

    def change_weights(self) -> None:
        """Give all replicas other weights, one after the other."""
        with self.resets:
            self._weights_number += 1
            self.weights = f"w{self._weights_number}"
            for node in self.nodes.values():
                node.call("reset", self.weights)
            self.announce_weights(list(self.nodes))

    def kill(self, name: str) -> None:
        """Kill it with SIGKILL; its requests are lost."""
        node = self.nodes[name]
        self._note_transfer(node)
        self.absences.append((node.incarnation, time.monotonic(), math.inf))
        node.kill()
        self.failed_on_killed += node.figures().get("in_flight", 0)
        self.dead.append(node)

    def restart(self, name: str, takes_orders: bool = True) -> None:
        """Kill it, and have a new incarnation share and work."""
        self.partings += 1
        self.kill(name)
        self.start(name, takes_orders)
        self.share(name)
        self.nodes[name].call("pause", False)

    def neighbours(self, incarnation: str) -> set[str]:
        """The replicas whose rows it loads in place."""
        known = {node.incarnation for node in self.nodes.values()}
        return {each for each in known if self.loads_in_place and are_neighbours(each, incarnation)}

    def _note_transfer(self, node: Node) -> None:
        transfer = node.transfer()
        if transfer is not None:
            self.transfer_pids.setdefault(node.incarnation, set()).add(transfer.pid)

    @contextmanager
    def stop(self, name: str) -> Iterator[Callable[[], bool]]:
        """Suspend a replica's engine. Yields a function that says whether it is suspended."""
        node = self.nodes[name]
        began = time.monotonic()
        try:
            with frozen([psutil.Process(node.pid)]) as stands_still:
                yield stands_still
        finally:
            # It first catches up on what it missed, which takes a moment longer.
            ended = time.monotonic()
            self.stopped.setdefault(node.incarnation, []).append((began, ended + 0.2))
            if ended - began > LEASE / 2:
                self.absences.append((node.incarnation, began, ended + 1.0))

    # -- the tracker --------------------------------------------------------------------------

    def replace_tracker(self, same_address: bool) -> None:
        """Kill the tracker and start another one, which the host tells replicas about."""
        self._expired += self.tracker.call("expired")
        port = self.tracker.port if same_address else 0
        self.host.call("set_tracker", None)
        self.tracker.kill()
        self.tracker = TrackerNode(self.folder, port)
        self.host.call("set_tracker", self.tracker.address)

    def members(self) -> dict[str, set[str]]:
        """Incarnations by namespace, as the tracker knows them; empty while it is away."""
        try:
            members: dict[str, set[str]] = self.tracker.call("members")
        except EndedError:
            return {}
        return members

    def is_member(self, incarnation: str) -> bool:
        return any(incarnation in those for those in self.members().values())

    def unexplained_expiries(self) -> list[str]:
        """Incarnations whose lease ended although they were never absent."""
        return [
            incarnation
            for incarnation, at in self._expired + self.tracker.call("expired")
            if not any(
                absent == incarnation and began < at < ended
                for absent, began, ended in self.absences
            )
        ]

    # -- all of them --------------------------------------------------------------------------

    def everybody(self) -> list[Node]:
        """All incarnations, including the dead."""
        return [*self.dead, *self.nodes.values()]

    def total(self, pick: Callable[[dict[str, Any]], int]) -> int:
        """The sum of a figure over all incarnations."""
        return sum(pick(figures) for node in self.everybody() if (figures := node.figures()))

    def rollbacks(self) -> Counter[str]:
        """Why fetches from peers were rolled back, and how often."""
        reasons: Counter[str] = Counter()
        for node in self.everybody():
            fetches = node.figures().get("replica", {}).get("fetches", {})
            reasons.update(fetches.get("rolled_back", {}))
        return reasons - of_disk(self)

    def taken(self) -> Counter[str]:
        """The transport's faults that have happened."""
        orders: Counter[str] = Counter()
        for node in self.everybody():
            orders.update(taken(node.folder))
        return orders

    def _computed(self, incarnation: str) -> list[str]:
        """The requests for named prefixes that it has computed."""
        nodes = [each for each in list(self.nodes.values()) if each.incarnation == incarnation]
        return [number for node in nodes for number in node.figures().get("computed", [])]

    def close(self) -> None:
        self.names.close()
        for node in self.nodes.values():
            node.kill()
        self.tracker.kill()
        self.host.kill()
