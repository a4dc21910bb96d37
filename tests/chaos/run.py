"""A chaos run: faults hit a cluster of replicas by a schedule."""

import itertools
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from examples.processes import until
from tests.chaos import near
from tests.chaos.cluster import FETCH_TIMEOUT, POOLS, READY_TIME, Cluster
from tests.chaos.invariants import Findings, come_to_rest
from tests.chaos.kinds import KINDS, weights
from tests.chaos.mutations import Mutation
from tests.chaos.near import AUTO
from tests.chaos.report import Report
from tests.chaos.schedule import TRACKER, Step, schedule
from tests.faults import OF_GLOO

ROUND = 120.0
"""Seconds of faults between two rests."""
_PROGRESS = 10.0
_AHEAD = 12
"""Steps that a lane may lag behind; the steps of a run are then a prefix of the schedule."""


def run(
    seed: int,
    seconds: float,
    *,
    steps: int | None = None,
    only: Sequence[str] | None = None,
    mutation: Mutation | None = None,
    pools: Mapping[str, int] = POOLS,
    transport: str = AUTO,
    say: Callable[[str], None] = print,
) -> Report:
    """Ends after `seconds`, or after `steps` steps, or when something is wrong. `only` restricts
    the schedule to some kinds."""
    if transport == "nixl":
        only = [kind for kind in only or KINDS if kind not in OF_GLOO]
    if transport != AUTO:
        only = [kind for kind in only or KINDS if kind not in near.KINDS]
    report = Report(seed, FETCH_TIMEOUT)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    cluster = Cluster(folder, seed, mutation, pools, transport)
    try:
        _Run(cluster, report, say).run(
            itertools.islice(schedule(seed, list(pools), *weights(only)), steps), seconds
        )
    finally:
        cluster.close()
    if report.failures() and mutation is None:
        say(f"the replicas' output is in {folder}")
    else:
        shutil.rmtree(folder)
    return report


class _Run:
    def __init__(self, cluster: Cluster, report: Report, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._report = report
        self._say = say
        self._is_enough = False
        self._began = self._said = time.monotonic()

    def run(self, steps: Iterator[Step], seconds: float) -> None:
        self._warm_up()
        self._cluster.names.add()
        before = come_to_rest(self._cluster)
        self._began = time.monotonic()
        after, is_over = before, bool(before.problems)
        while not is_over:
            is_over = self._break(steps, min(ROUND, seconds - (time.monotonic() - self._began)))
            after = come_to_rest(self._cluster, before.sizes)
            is_over |= bool(after.problems) or time.monotonic() - self._began >= seconds
        self._conclude(after)

    def _warm_up(self) -> None:
        """Wait until every replica has a link with every other, or has its rows mapped."""
        cluster = self._cluster
        for name in cluster.nodes:
            cluster.wait_until_up(name)
            cluster.share(name)
        self._resume()

        def lacking() -> dict[str, int]:
            found = {}
            for name, node in cluster.nodes.items():
                audit, mapped = node.call("audit"), cluster.neighbours(node.incarnation)
                links = audit["links"] - 2 * (len(cluster.nodes) - 1 - len(mapped))
                if links < 0 or audit["mapped"] != mapped:
                    found[name] = links
            return found

        if not until(lambda: not lacking(), READY_TIME, interval=0.5):
            self._report.problems.append(
                f"not all replicas fetched from each other: links {lacking()}"
            )
        self._say(f"{len(cluster.nodes)} replicas are up and connected with each other")

    def _resume(self) -> None:
        for node in self._cluster.nodes.values():
            node.call("pause", False)

    # -- a round ------------------------------------------------------------------------------

    def _break(self, steps: Iterator[Step], seconds: float) -> bool:
        """Carry out steps; return whether the run is over: no more steps, or something is wrong."""
        self._resume()
        until_time = time.monotonic() + seconds
        lanes = {name: queue.Queue[Step | None](_AHEAD) for name in (*self._cluster.nodes, TRACKER)}
        threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in lanes.values()]
        self._is_enough = False
        for thread in threads:
            thread.start()
        for step in steps:
            if not self._hand_over(lanes[step.target], step, until_time):
                break
        else:  # no more steps: the lanes finish theirs
            for lane in lanes.values():
                self._hand_over(lane, None, until_time)
        is_over = not self._is_enough or self._is_lost()
        for thread in threads:
            while thread.is_alive():
                thread.join(1.0)
                self._progress()
        return is_over

    def _hand_over(
        self, lane: queue.Queue[Step | None], step: Step | None, until_time: float
    ) -> bool:
        """Return False when the round is over: lanes then drop the steps they have not begun."""
        while not self._is_enough:
            self._progress()
            self._is_enough = time.monotonic() > until_time or self._is_lost()
            try:
                lane.put(step, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False

    def _is_lost(self) -> bool:
        """Whether something is wrong that time will not mend."""
        bad = ("died", "wrong_bytes", "lost_chunks")
        if self._cluster.total(lambda figures: sum(figures[each] for each in bad)):
            return True
        return bool(self._report.problems)

    def _lane(self, lane: queue.Queue[Step | None]) -> None:
        while (step := self._next(lane)) is not None:
            threading.Event().wait(step.pause)
            self._report.carry_out(step, partial(self._inject, step))

    def _inject(self, step: Step) -> bool:
        if step.target != TRACKER:
            self._cluster.wait_until_up(step.target)
        return KINDS[step.kind](self._cluster, step)

    def _next(self, lane: queue.Queue[Step | None]) -> Step | None:
        while not self._is_enough:
            try:
                step = lane.get(timeout=0.5)
            except queue.Empty:
                continue
            if step is not None:
                self._report.begin(step)
            return step
        return None

    def _progress(self) -> None:
        if time.monotonic() < self._said + _PROGRESS:
            return
        self._said = time.monotonic()
        report, cluster = self._report, self._cluster
        requests = cluster.total(lambda figures: figures["requests"])
        waited = cluster.total(lambda figures: figures["waits"]["waited"])
        self._say(
            f"{self._said - self._began:5.0f} s  {report.progress()}; {requests} requests, "
            f"{waited} of them waited for a peer's prefill; "
            f"{cluster.rollbacks().total()} rollbacks"
        )

    # -- the end ------------------------------------------------------------------------------

    def _conclude(self, after: Findings) -> None:
        cluster, report = self._cluster, self._report
        report.problems += after.problems
        report.leaks = after.leaks
        report.requests = cluster.total(lambda figures: figures["requests"])
        report.operations = cluster.total(lambda figures: figures["operations"])
        report.wrong_bytes = sum(_wrong_bytes(node.folder) for node in cluster.everybody())
        report.rollbacks = cluster.rollbacks()
        report.longest_scheduling_wait_s = self._longest_scheduling_wait()
        report.failed_requests_on_killed_replica = cluster.failed_on_killed
        report.failed_requests = cluster.failed_on_killed + sum(
            node.figures()["in_flight"]
            for node in cluster.nodes.values()
            if node.figures()["died"] or not node.process.is_alive()
        )

    def _longest_scheduling_wait(self) -> float:
        """Without the time that the replica was suspended or other processes took."""
        longest = 0.0
        for node in self._cluster.everybody():
            figures = node.figures()
            stopped = self._cluster.stopped.get(node.incarnation, [])
            longest = max(longest, figures.get("longest_scheduling_wait", 0.0))
            for began, ended, waited in figures.get("decisions", []):
                still = sum(max(0.0, min(b, ended) - max(a, began)) for a, b in stopped)
                longest = max(longest, min(waited, ended - began - still))
        return longest


def _wrong_bytes(folder: Path) -> int:
    """The count that the node wrote when it loaded them."""
    log = folder / "wrong"
    lines = log.read_text().splitlines() if log.exists() else []
    return sum(int(line.partition(": ")[2].split()[0]) for line in lines)
