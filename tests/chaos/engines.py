"""The part of a chaos run with vLLM: faults hit replicas under xinference while they answer, and
each answer is compared with that of an engine that shares nothing.

Threading: requests and looks at the replicas run on an event loop in a thread of its own; the main
thread carries out the schedule, one step after the other.
"""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any

from examples.local_cluster import LocalCluster
from examples.make_model import make_model
from examples.processes import until
from tests.chaos.engines_fleet import Fleet
from tests.chaos.engines_inside import install
from tests.chaos.engines_kinds import FETCH_TIMEOUT, KINDS, RETURN_TIME, Scene
from tests.chaos.engines_questions import all_questions, ask_for_reference
from tests.chaos.engines_rest import come_to_rest, look_after_stop, look_after_terminate
from tests.chaos.engines_traffic import CONVERSATIONS, REQUEST_TIMEOUT, Traffic
from tests.chaos.report import Report
from tests.chaos.schedule import ADDED, HEAVY, REMOVALS, STEADY, Step, of_engines
from tests.faults import ORDERS

ROOT = Path(__file__).parents[2]
MODEL = "chaos-model"
UID = "chaos"
_BLOCK_BYTES = 2 << 20  # 128 tokens of the small model in float32
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "block_size": 128,
    # Three prompts: with more, vLLM's own prefix cache would hold everything.
    "num_gpu_blocks_override": 40,
    "kv_cache_memory_bytes": 40 * _BLOCK_BYTES,
}
_SHARING: dict[str, Any] = {
    "enable_xavier": True,
    "xavier_pool_bytes": 48 * _BLOCK_BYTES,  # five of the thirty prompts; salts make more
    "xavier_fetch_timeout": FETCH_TIMEOUT,
    "xavier_min_fetch_tokens": 256,  # slow fetches are faults here, and must not end fetching
    "xavier_transport": "tests.faults:OrderedGloo",
    "xavier_drain": REQUEST_TIMEOUT,
}
_WARM_UP = 120.0
_REST = 30.0
"""Seconds of a run that are reserved for its end."""


def run(
    seed: int,
    seconds: float,
    *,
    steps: int | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Ends about `seconds` after the replicas are up, or after `steps` steps, or when something is
    wrong."""
    report = Report("engines", seed, FETCH_TIMEOUT)
    with tempfile.TemporaryDirectory(prefix="chaos-orders-") as orders:
        install(Path(orders))
        environment = {"PYTHONPATH": f"{ROOT}:{orders}", ORDERS: orders}
        log = ROOT / "build" / "chaos-xinference.log"
        order = islice(of_engines(seed), steps)
        cluster = LocalCluster(log, environment=environment, say=say)
        try:
            cluster.start()
            _with(cluster, Path(orders), seed, order, seconds, report, say)
        finally:
            look_after_stop(cluster.stop(), report)
    if report.failures():
        say(f"xinference's output is in {log}")
        say(f"seed {seed} failed after {report.steps} steps of the schedule")
    return report


def _with(
    cluster: LocalCluster,
    orders: Path,
    seed: int,
    steps: Iterator[Step],
    seconds: float,
    report: Report,
    say: Callable[[str], None],
) -> None:
    cluster.register(make_model(ROOT / "build" / "model"), MODEL)
    say("an engine that shares nothing answers first")
    cluster.launch(MODEL, "reference", replica=1, enable_prefix_caching=False, **_ENGINE)
    expected = ask_for_reference(cluster, "reference", all_questions(seed))
    cluster.terminate("reference")
    say(f"{len(expected)} questions have a certain answer; now two replicas that share")
    cluster.launch(MODEL, UID, replica=2, **_ENGINE, **_SHARING)
    workers = {status["worker_address"] for status in cluster.replicas(UID)}
    fleet = Fleet(cluster.supervisor_address(), workers, UID)
    traffic = Traffic(fleet, expected, seed)
    with _running(fleet.watch(), *map(traffic.converse, range(CONVERSATIONS))) as loop:
        scene = Scene(cluster, fleet, traffic, loop, orders, wanted=2)
        breaking = _Run(scene, report, say)
        breaking.run(steps, time.monotonic() + seconds - _REST)
        come_to_rest(scene, report)
        breaking.conclude()
        cluster.terminate(UID)
        look_after_terminate(scene, report)


@contextlib.contextmanager
def _running(*works: Coroutine[Any, Any, None]) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread. `works` run on it until the end; it is an error if one ends
    earlier."""
    started: Future[asyncio.AbstractEventLoop] = Future()
    over = asyncio.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ending = asyncio.ensure_future(over.wait())
        tasks = [asyncio.ensure_future(work) for work in works]
        started.set_result(loop)
        done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ending}:
            errors.append(task.exception())
        await ending

    errors: list[BaseException | None] = []
    thread = threading.Thread(target=asyncio.run, args=(main(),), name="chaos-traffic")
    thread.start()
    loop = started.result()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
    if errors:
        raise RuntimeError("background work ended before the run did") from errors[0]


class _Run:
    def __init__(self, scene: Scene, report: Report, say: Callable[[str], None]) -> None:
        self._scene = scene
        self._report = report
        self._say = say
        self._adding: threading.Thread | None = None
        self._began = time.monotonic()

    def run(self, steps: Iterator[Step], until_time: float) -> None:
        if not until(self._is_warm, _WARM_UP):
            self._report.problems.append("the replicas fetched nothing from each other")
            return
        self._say("two replicas are up and share; now to the faults")
        for step in steps:
            if time.monotonic() > until_time or self._is_lost():
                break
            self._report.begin(step)
            self._progress(step)
            if step.kind in (*HEAVY, *STEADY, ADDED, *REMOVALS) and not self._wait_for_all():
                break
            if step.kind == ADDED:
                self._adding = threading.Thread(target=self._carry_out, args=(step,))
                self._adding.start()
            else:
                self._carry_out(step)
        self._wait_for_all()
        self._scene.traffic.pause()

    def _is_warm(self) -> bool:
        return self._scene.all_up() and self._scene.fleet.total("hits", "remote") > 0

    def _wait_for_all(self) -> bool:
        """Wait for killed and added replicas; requests to the others go on."""
        if self._adding is not None:
            self._adding.join()
            self._adding = None
        is_complete = until(self._scene.all_up, RETURN_TIME)
        if not is_complete:
            up = len(self._scene.fleet.up())
            self._report.problems.append(f"{up} of {self._scene.wanted} replicas came up again")
        return is_complete

    def _carry_out(self, step: Step) -> None:
        self._report.carry_out(step, lambda: KINDS[step.kind](self._scene, step))

    def _is_lost(self) -> bool:
        """Whether something is wrong that time will not mend."""
        traffic = self._scene.traffic
        unexplained = any(not failure.is_explained for failure in traffic.failures)
        return bool(self._report.problems or traffic.wrong or unexplained)

    def _progress(self, step: Step) -> None:
        fleet, traffic = self._scene.fleet, self._scene.traffic
        self._say(
            f"{time.monotonic() - self._began:5.0f} s  {self._report.progress()}; "
            f"{len(fleet.up())} of {self._scene.wanted} replicas up, {traffic.answered} answers, "
            f"{len(traffic.failures)} failed, {fleet.total('hits', 'remote')} tokens from peers; "
            f"next: {step.kind}"
        )

    def conclude(self) -> None:
        fleet, traffic, report = self._scene.fleet, self._scene.traffic, self._report
        report.requests = traffic.answered + traffic.aborted + len(traffic.failures)
        report.operations = report.requests + fleet.total("fetches", "started")
        report.failed_requests = len(traffic.failures)
        report.failed_requests_on_killed_replica = sum(f.is_explained for f in traffic.failures)
        report.wrong_outputs = len(traffic.wrong)
        report.rollbacks = fleet.rollbacks()
        report.longest_scheduling_wait_s = max(
            map(fleet.longest_scheduling_wait, fleet.figures), default=0.0
        )
        report.problems += traffic.wrong[:3]
        report.problems += [
            f"{failure.replica.name} failed a request: {failure.error}"
            for failure in traffic.failures
            if not failure.is_explained
        ][:3]
        if not fleet.total("hits", "remote"):
            report.problems.append("nothing was shared")
