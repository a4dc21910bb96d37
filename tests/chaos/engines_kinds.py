"""How each kind of fault is injected into replicas under xinference, and how its effect is
observed.

A kind is a function of the scene and the step. It returns whether the effect was observed and
undoes the fault, except for a killed replica, which xinference starts again. At least two replicas
are up when it is called; for the kinds of `HEAVY` and `STEADY`, all of them.
"""

import asyncio
import random
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import requests
import xoscar

from examples.local_cluster import Completion, LocalCluster
from examples.processes import until
from tests.chaos.engines_fleet import LEASE, Fleet, Replica
from tests.chaos.engines_inside import with_image
from tests.chaos.engines_questions import Question, generation
from tests.chaos.engines_traffic import REQUEST_TIMEOUT, Traffic
from tests.chaos.schedule import ADDED, REMOVED, REMOVED_MEANWHILE, Step
from tests.chaos.transport import EFFECTS, bring_about, suspend
from tests.faults import Order, order, taken, withdraw
from tests.harness.processes import frozen, kill, running, wait_gone
from xinference_xavier.client import XavierClient
from xinference_xavier.errors import XavierError
from xinference_xavier.runtime.aio import within

FETCH_TIMEOUT = 3.0
OCCASION_TIME = 20.0
"""Seconds within which a fault of the transport must meet a fetch, and then have its effect."""
EFFECT_TIME = 10.0
LEASE_TIME = 3 * LEASE
RETURN_TIME = 300.0
"""Seconds until a replica is up again, on a machine that is busy with the others."""
TERMINATE_TIME = 60.0

_AFTER_RESET = 20
"""Answers that are compared before the replica that was reset is started again."""
_REPLICA = "X-Xavier-Replica"

_T = TypeVar("_T")


@dataclass
class Scene:
    """Everything that a kind of fault acts on."""

    cluster: LocalCluster
    fleet: Fleet
    traffic: Traffic
    loop: asyncio.AbstractEventLoop
    orders: Path
    wanted: int  # replicas

    def await_(self, work: Coroutine[Any, Any, _T], timeout: float) -> _T:
        return asyncio.run_coroutine_threadsafe(within(timeout, work), self.loop).result()

    def choose(self, step: Step) -> Replica:
        up = sorted(self.fleet.up(), key=lambda replica: replica.name)
        return up[int(step.strength * len(up))]

    def is_member(self, incarnation: str) -> bool:
        return incarnation in self.fleet.members

    def all_up(self) -> bool:
        return len(self.fleet.up()) == self.wanted


Kind = Callable[[Scene, Step], bool]


# -- of the transport -------------------------------------------------------------------------


def _of_transport(fault: Order) -> Kind:
    def inject(scene: Scene, step: Step) -> bool:
        return bring_about(
            fault,
            scene.orders,
            scene.fleet.rollbacks,
            OCCASION_TIME,
            lambda: _provoke_a_fetch(scene, step),
        )

    return inject


def _provoke_a_fetch(scene: Scene, step: Step) -> None:
    donor, consumer = random.Random(step.number).sample(scene.fleet.up(), 2)
    question = scene.traffic.any_question(step.strength)
    scene.await_(scene.traffic.share(donor, consumer, question), RETURN_TIME)


def _transfer_killed(scene: Scene, step: Step) -> bool:
    incarnation = scene.choose(step).incarnation
    transfer = _transfer(scene, incarnation)
    if transfer is None:
        return False
    kill(transfer)
    return until(
        lambda: _transfer(scene, incarnation) not in (None, transfer), EFFECT_TIME + LEASE_TIME
    )


def _transfer_stopped(scene: Scene, step: Step) -> bool:
    """Suspend it for up to twice the deadline; if a fetch waits for it, its engine may replace
    it."""
    transfer = _transfer(scene, scene.choose(step).incarnation)
    if transfer is None:
        return False
    return suspend(transfer, FETCH_TIMEOUT * (0.3 + 1.7 * _fraction(step)))


def _transfer(scene: Scene, incarnation: str) -> psutil.Process | None:
    """The transfer process that the replica reports, or None."""
    return running(scene.fleet.figures[incarnation]["transfer_pid"])


def _fraction(step: Step) -> float:
    """A number in [0, 1) that is independent of the choice of the replica."""
    return random.Random(step.number).random()


# -- of replicas ------------------------------------------------------------------------------


def _engine_stopped(scene: Scene, step: Step) -> bool:
    """The tracker drops the replica, which then joins again by itself; its requests take longer."""
    replica = scene.choose(step)
    with scene.fleet.standing_still(replica), frozen([replica.processes.engine]):
        gone = until(lambda: not scene.is_member(replica.incarnation), LEASE_TIME)
    return until(lambda: scene.is_member(replica.incarnation), LEASE_TIME) and gone


def _killed(part: Callable[[Replica], psutil.Process]) -> Kind:
    """The tracker drops the replica, and xinference starts it again.

    xinference notices a dead engine only at the next request, so the replica is asked once after
    the kill. It is asked once before, too: with vLLM 0.32, the first request to an engine that dies
    at that moment is never answered.
    """

    def bring_about(scene: Scene, step: Step) -> bool:
        replica, question = scene.choose(step), scene.traffic.any_question(0.0)
        scene.await_(scene.traffic.ask(replica, question, None), RETURN_TIME)
        victim, incarnation = part(replica), replica.incarnation
        scene.fleet.mourn(replica)
        kill(victim)
        scene.await_(scene.traffic.ask(replica, question, None), RETURN_TIME)
        return until(lambda: not scene.is_member(incarnation), LEASE_TIME)

    return bring_about


def _reset(connector: bool) -> Kind:
    """Reset a replica's caches under load: vLLM's own, or with it what it holds for others. Then
    its replica is started again: one that was reset has a namespace of its own."""

    def bring_about(scene: Scene, step: Step) -> bool:
        replica, traffic = scene.choose(step), scene.traffic

        def reset() -> bool:  # vLLM refuses while a request loads rows
            asking = replica.model.reset_prefix_cache(connector)
            return bool(scene.await_(asking, REQUEST_TIMEOUT))

        done = until(reset, EFFECT_TIME)
        answered = traffic.answered
        seen = until(lambda: traffic.answered > answered + _AFTER_RESET, RETURN_TIME)
        return _killed(lambda replica: replica.processes.engine)(scene, step) and done and seen

    return bring_about


def _removed(meanwhile: Callable[[Scene], None]) -> Kind:
    """Remove a replica that answers requests: xinference waits for them, whatever happens
    `meanwhile`."""

    def bring_about(scene: Scene, step: Step) -> bool:
        replica, uid = scene.choose(step), scene.fleet.model_uid
        number = next(
            status["replica_id"]
            for status in scene.cluster.replicas(uid)
            if status["replica_model_uid"] == replica.name
        )
        replica.is_up = False
        scene.wanted -= 1
        with ThreadPoolExecutor(1) as pool:
            removal = pool.submit(scene.cluster.remove_replica, uid, number)
            drains = until(lambda: removal.done() or _drains(scene, replica), EFFECT_TIME)
            meanwhile(scene)
            removal.result()
        answered = until(lambda: replica.in_flight == 0, EFFECT_TIME)
        scene.fleet.forget(replica)
        wait_gone(replica.processes.all(), TERMINATE_TIME)
        left = until(lambda: not scene.is_member(replica.incarnation), LEASE_TIME)
        return drains and answered and left

    return bring_about


def _drains(scene: Scene, replica: Replica) -> bool:
    return bool(scene.fleet.members.get(replica.incarnation, {}).get("draining"))


def _added(scene: Scene, step: Step) -> bool:
    """Runs in a thread of its own, while other steps are carried out."""
    scene.wanted += 1
    url = f"{scene.cluster.endpoint}/v1/models/{scene.fleet.model_uid}/replicas"
    requests.post(url, json={"replica": 1}, timeout=RETURN_TIME).raise_for_status()
    return until(scene.all_up, RETURN_TIME)


# -- of the tracker, and of requests ----------------------------------------------------------


def _tracker_destroyed(scene: Scene, step: Step) -> bool:
    """The replicas have it created again and fill it."""
    before = {replica.incarnation for replica in scene.fleet.up()}
    _destroy_tracker(scene)
    return _is_filled(scene, before)


def _destroy_tracker(scene: Scene) -> None:
    async def destroy() -> None:
        await xoscar.destroy_actor(await scene.fleet.tracker())

    scene.await_(destroy(), EFFECT_TIME)


def _is_filled(scene: Scene, before: set[str]) -> bool:
    """True once a new tracker knows these replicas and what they hold."""
    looks = scene.fleet.looks + 1  # a look may have been under way

    def is_filled() -> bool:
        members = scene.fleet.members
        return (
            scene.fleet.looks > looks
            and before <= members.keys()
            and any(member["holdings"] for member in members.values())
        )

    return until(is_filled, LEASE_TIME)


def _switched(scene: Scene, step: Step) -> bool:
    fleet = scene.fleet
    scene.cluster.switch_sharing(fleet.model_uid, False)
    off = until(lambda: not fleet.enabled, EFFECT_TIME)
    threading.Event().wait(FETCH_TIMEOUT)
    fetches = fleet.total("fetches", "started")
    threading.Event().wait(FETCH_TIMEOUT)
    quiet = fleet.total("fetches", "started") == fetches
    scene.cluster.switch_sharing(fleet.model_uid, True)
    return until(lambda: fleet.enabled, EFFECT_TIME) and off and quiet


def _aborted(scene: Scene, step: Step) -> bool:
    """Abort a streaming request while its prompt is computed."""
    traffic, question = scene.traffic, scene.traffic.any_question(step.strength)
    after = 0.02 + 0.2 * _fraction(step)
    work = traffic.ask_and_abort(scene.choose(step), question, uuid.uuid4().hex, after)
    return scene.await_(work, RETURN_TIME)


def _aborted_while_it_waits(scene: Scene, step: Step) -> bool:
    """Abort a streaming request while it waits for a fetch whose donor stalls."""
    traffic, question = scene.traffic, scene.traffic.any_question(step.strength)
    donor = scene.choose(step)
    consumer = next(replica for replica in scene.fleet.up() if replica is not donor)
    salt = uuid.uuid4().hex
    scene.await_(traffic.ask(donor, question, salt), RETURN_TIME)
    threading.Event().wait(0.5)  # published by then
    happened = taken(scene.orders)[Order.STALL]
    order(scene.orders, Order.STALL)
    aborted = scene.await_(traffic.ask_and_abort(consumer, question, salt, 0.5), RETURN_TIME)
    return not withdraw(scene.orders, Order.STALL) and (
        aborted and taken(scene.orders)[Order.STALL] > happened
    )


# -- of xinference's other processes: meanwhile requests come over REST, none of which may fail ---


def _supervisor_relaunched(scene: Scene, step: Step) -> bool:
    before = {replica.incarnation for replica in scene.fleet.up()}
    with _asking(scene, step) as answers:
        done = _relaunch(scene, "supervisor") and _is_filled(scene, before)
        routed = until(lambda: _REPLICA in answers[-1].headers, LEASE_TIME)
    return done and routed


def _api_relaunched(scene: Scene, step: Step) -> bool:
    with _asking(scene, step):
        return _relaunch(scene, "api")


def _relaunch(scene: Scene, part: str) -> bool:
    """Have xinference replace one of its processes. Returns once the old one has ended."""
    cluster = scene.cluster
    number = cluster.call("POST", f"/v1/{part}/relaunch", {})["operation_id"]

    def state() -> str:
        # A new connection each time: one that is kept would keep the old process.
        answer = requests.get(
            f"{cluster.endpoint}/v1/{part}-relaunches/{number}", timeout=RETURN_TIME
        )
        answer.raise_for_status()
        return str(answer.json()["status"])

    if not until(lambda: state() in ("succeeded", "failed"), RETURN_TIME, 0.2):
        raise TimeoutError(f"the relaunch of the {part} is {state()}")
    return state() == "succeeded"


def _disk_full(scene: Scene, step: Step) -> bool:
    """No file of the process that keeps the names can grow. Requests for what has a name go on."""
    question, model, name = scene.traffic.any_question(step.strength), scene.fleet.model_uid, "full"
    half = len(question.text) // 2
    with XavierClient(scene.cluster.endpoint) as client:
        client.add_prefix(model, name, question.text[:half])
        with _asking(scene, step), _no_room(scene):
            for _ in range(3):
                _complete(scene, question, prompt=question.text[half:], prefix_name=name)
            try:
                client.add_prefix(model, "more", question.text[:half])
            except XavierError:
                refused = True
            else:
                refused = False
        client.add_prefix(model, "more", question.text[:half])  # there is room again
        for each in (name, "more"):
            client.remove_prefix(model, each)
    return refused


@contextmanager
def _no_room(scene: Scene) -> Iterator[None]:
    keepers = [
        process
        for process in scene.cluster.processes()
        if any(Path(file.path).match("names/*.lock") for file in process.open_files())
    ]
    limits = {process: process.rlimit(psutil.RLIMIT_FSIZE) for process in keepers}
    for process, (_, hard) in limits.items():
        process.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        for process, limit in limits.items():
            process.rlimit(psutil.RLIMIT_FSIZE, limit)


def _unreadable_image(scene: Scene, step: Step) -> bool:
    """It is its request's error, and no replica's."""
    question = scene.traffic.any_question(step.strength)
    url = f"{scene.cluster.endpoint}/v1/chat/completions"
    body = {"model": scene.fleet.model_uid, "messages": with_image("What is it?", b"no image")}
    with _asking(scene, step):
        if _REPLICA not in _complete(scene, question).headers:
            return False  # a replica was lost just before
        answers = [requests.post(url, json=body, timeout=REQUEST_TIMEOUT) for _ in range(3)]
        if _REPLICA not in _complete(scene, question).headers:
            raise RuntimeError("after a request with an unreadable image none is routed")
    return all(not answer.ok for answer in answers)


@contextmanager
def _asking(scene: Scene, step: Step) -> Iterator[list[requests.Response]]:
    """Ask over REST meanwhile, one question after the other. Raises what failed."""
    source, over, asked = random.Random(step.number), threading.Event(), threading.Event()
    answers: list[requests.Response] = []

    def ask() -> None:
        try:
            while not over.is_set():
                answers.append(_complete(scene, scene.traffic.any_question(source.random())))
                asked.set()
        finally:
            asked.set()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            asked.wait()
            yield answers
        finally:
            over.set()
        asking.result()


def _complete(scene: Scene, question: Question, **more: object) -> requests.Response:
    """Ask over REST and compare the answer. Raises requests.RequestException."""
    body = generation(model=scene.fleet.model_uid, prompt=question.text) | more
    url = f"{scene.cluster.endpoint}/v1/completions"
    answer = requests.post(url, json=body, timeout=REQUEST_TIMEOUT)
    if not answer.ok:
        raise requests.HTTPError(f"{answer.status_code} {answer.text}")
    completion = Completion.from_json(answer.json(), 0.0)
    scene.loop.call_soon_threadsafe(
        scene.traffic.compare, question, completion, answer.headers.get(_REPLICA, "some replica")
    )
    return answer


KINDS: Mapping[str, Kind] = {
    **{fault: _of_transport(fault) for fault in EFFECTS},
    "transfer process killed": _transfer_killed,
    "transfer process stopped": _transfer_stopped,
    "engine stopped beyond the lease": _engine_stopped,
    "engine killed": _killed(lambda replica: replica.processes.engine),
    "model process killed": _killed(lambda replica: replica.processes.model),
    "worker process killed": _killed(lambda replica: replica.processes.workers[0]),
    "vLLM's cache reset": _reset(connector=False),
    "all caches reset": _reset(connector=True),
    REMOVED: _removed(lambda scene: None),
    REMOVED_MEANWHILE: _removed(_destroy_tracker),
    ADDED: _added,
    "tracker destroyed": _tracker_destroyed,
    "sharing switched off and on": _switched,
    "supervisor relaunched": _supervisor_relaunched,
    "API relaunched": _api_relaunched,
    "disk full": _disk_full,
    "unreadable image": _unreadable_image,
    "request aborted": _aborted,
    "request aborted while it waits": _aborted_while_it_waits,
}
