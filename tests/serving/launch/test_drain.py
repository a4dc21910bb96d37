"""A replica drains before xinference removes it, and nothing that fails meanwhile keeps it from
being removed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import xoscar as xo

from tests.logged import messages
from xinference_xavier.protocol.load import Drain, Load, Serving
from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving.launch import drain as module
from xinference_xavier.serving.launch.supervisor import finding_replicas

NS = "namespace"
DRAIN = 600.0
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The part of a replica's actor that the tracker calls."""

    def __init__(self) -> None:
        super().__init__()
        self.handing_over = False

    async def hand_over(self, under_way: bool) -> None:
        self.handing_over = under_way

    async def drain(self, stay: tuple[str, ...], seconds: float) -> Drain:
        return Drain(seconds, 0, self.handing_over, 5)


class Answers:
    """A worker and its model actor, which answers requests."""

    def __init__(self) -> None:
        self.count = 0
        self.asked = asyncio.Event()
        self.dead = False

    async def get_model(self, model_uid: str) -> Answers:
        if self.dead:
            raise xo.ServerClosed(f"{model_uid} was killed")
        return self

    async def generation_serve_count(self) -> int:
        self.asked.set()
        return self.count

    async def was_asked(self, times: int = 1) -> None:
        for _ in range(times):
            self.asked.clear()
            async with asyncio.timeout(PATIENCE):
                await self.asked.wait()


class Cluster:
    """A supervisor with a model of three replicas."""

    def __init__(self, supervisor: Any, address: str) -> None:
        self.supervisor = supervisor
        self.address = address
        self.info = SimpleNamespace(active_replica_ids=[0, 1, 2])
        self.answers = [Answers() for _ in range(3)]
        self.removed: list[str] = []
        supervisor.remove = self._remove
        supervisor._model_uid_to_replica_info["m"] = self.info
        supervisor._replica_model_uid_to_worker = {
            f"m-rep{number}": answers for number, answers in enumerate(self.answers)
        }
        self.tracker: Any = None
        self.replicas: list[Any] = []

    async def start(self, tracker: Any, drain: float = DRAIN) -> None:
        self.tracker = tracker
        self.supervisor._xavier_cache_mapping["m"] = tracker
        load = Load(Serving(128, 1 << 20, drain=drain), 0, 0.0, 0)
        for number, name in enumerate("abc"):
            member = Member(name, self.address)
            await tracker.join(NS, member, Settings(), f"m-rep{number}")
            await tracker.report_load(NS, name, load)
            uid = replica_uid(name)
            self.replicas.append(await xo.create_actor(Replica, address=self.address, uid=uid))

    async def _remove(self, replica: str) -> None:
        self.removed.append(replica)

    async def draining(self) -> set[str]:
        found = await self.tracker.observe("", 0, 0, 0.0)
        return {each.replica for each in found.loads if each.draining}

    async def outcome(self) -> tuple[int, int]:
        """Requests that had not ended, and chunks that peers got."""
        *_, last = await self.tracker.events()
        assert last.event["event"] == "ReplicaDrained"
        return last.event["requests"], last.event["chunks"]

    def begin(self, number: int = 0, answers: int = 0) -> asyncio.Task[int]:
        """Removes a replica that has so many answers to end."""
        if answers:
            self.answers[number].count = answers
        return asyncio.create_task(self.supervisor.terminate_model_replica("m", number))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.001)


@pytest.fixture
async def cluster(supervisor: Any, address: str, tracker: Any) -> Cluster:
    cluster = Cluster(supervisor, address)
    await cluster.start(tracker)
    return cluster


async def test_a_replica_is_removed_once_its_answers_have_ended(cluster: Cluster) -> None:
    answers = cluster.answers[0]
    removal = cluster.begin(answers=2)
    await answers.was_asked(5)
    assert await cluster.draining() == {"m-rep0"}
    assert (cluster.removed, removal.done()) == ([], False)
    answers.count = 0
    assert await removal == 2
    assert cluster.removed == ["m-rep0"]
    assert await cluster.outcome() == (0, 5)


async def test_a_request_that_is_on_its_way_is_waited_for(cluster: Cluster) -> None:
    """The first look misses it."""
    answers = cluster.answers[0]
    removal = cluster.begin()
    await answers.was_asked()
    answers.count = 1
    await answers.was_asked(5)
    assert not removal.done()
    answers.count = 0
    await removal


async def test_a_replica_is_removed_once_its_peers_have_what_only_it_holds(
    cluster: Cluster,
) -> None:
    await cluster.replicas[0].hand_over(True)
    removal = cluster.begin()
    await cluster.answers[0].was_asked(5)
    assert not removal.done()
    await cluster.replicas[0].hand_over(False)
    await removal
    assert await cluster.outcome() == (0, 5)


async def test_what_takes_too_long_is_not_waited_for(
    supervisor: Any, address: str, tracker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(supervisor, address)
    await cluster.start(tracker, drain=0.1)
    assert await cluster.begin(answers=2) == 2
    assert await cluster.outcome() == (2, 5)
    (line,) = (text for text in messages(caplog) if "before its requests end" in text)
    assert "replica=m-rep0 requests=2" in line


async def test_several_replicas_drain_at_the_same_time(cluster: Cluster) -> None:
    removals = [cluster.begin(number, answers=1) for number in (0, 1)]
    for number in (0, 1):
        await cluster.answers[number].was_asked()
    assert await cluster.draining() == {"m-rep0", "m-rep1"}
    for number in (0, 1):
        cluster.answers[number].count = 0
    assert sorted(await asyncio.gather(*removals)) == [1, 2]


async def test_who_removes_it_again_does_not_cut_its_answers_off(cluster: Cluster) -> None:
    answers = cluster.answers[0]
    removals = [cluster.begin(answers=1), cluster.begin(answers=1)]
    await answers.was_asked(5)
    assert cluster.removed == []
    answers.count = 0
    first, second = await asyncio.gather(*removals, return_exceptions=True)
    assert {type(first), type(second)} == {int, ValueError}


async def test_a_replica_that_is_killed_is_not_waited_for(cluster: Cluster) -> None:
    removal = cluster.begin(answers=1)
    await cluster.answers[0].was_asked()
    await xo.destroy_actor(cluster.replicas[0])
    cluster.answers[0].dead = True
    assert await removal == 2


async def test_without_a_tracker_nothing_is_waited_for(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await xo.destroy_actor(cluster.tracker)
    assert await cluster.begin(answers=1) == 2
    assert any("tracker does not answer while a replica" in text for text in messages(caplog))


async def test_if_the_tracker_is_lost_meanwhile_answers_end_all_the_same(cluster: Cluster) -> None:
    answers = cluster.answers[0]
    removal = cluster.begin(answers=1)
    await answers.was_asked()
    await xo.destroy_actor(cluster.tracker)
    await answers.was_asked(5)
    assert not removal.done()
    answers.count = 0
    assert await removal == 2


async def test_a_replica_that_is_not_removed_gets_requests_again(cluster: Cluster) -> None:
    async def refuse(replica: str) -> None:
        assert await cluster.draining() == {"m-rep0"}
        raise RuntimeError("its worker is lost")

    cluster.supervisor.remove = refuse
    with pytest.raises(RuntimeError, match="its worker is lost"):
        await cluster.begin()
    assert await cluster.draining() == set()

    removal = cluster.begin(answers=1)
    await cluster.answers[0].was_asked()
    assert await cluster.draining() == {"m-rep0"}
    removal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removal
    assert await cluster.draining() == set()


async def test_a_replica_drains_until_it_is_removed(cluster: Cluster) -> None:
    """The tracker forgets it otherwise, and ending an engine may take longer."""

    async def remove(replica: str) -> None:
        await cluster.tracker.undrain(replica)
        await cluster.answers[0].was_asked(3)
        assert await cluster.draining() == {replica}

    cluster.supervisor.remove = remove
    await cluster.begin()


async def test_draining_can_be_switched_off(supervisor: Any, address: str, tracker: Any) -> None:
    cluster = Cluster(supervisor, address)
    await cluster.start(tracker, drain=0.0)
    assert await cluster.begin(answers=1) == 2
    assert not cluster.answers[0].asked.is_set()


@pytest.mark.parametrize("trackers", [{}, {"m": SimpleNamespace(uid=b"another")}])
async def test_a_model_that_does_not_share_here_is_not_drained(
    cluster: Cluster, trackers: dict[str, Any]
) -> None:
    cluster.supervisor._xavier_cache_mapping = trackers
    assert await cluster.begin() == 2
    assert not cluster.answers[0].asked.is_set()


async def test_xinference_says_that_a_replica_is_unknown(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="not in list"):
        await cluster.begin(3)


async def test_requests_in_turn_pass_it_over_unless_there_is_no_other(cluster: Cluster) -> None:
    """xinference chooses while there is no router, or no tracker."""
    turns = iter("0120120120")

    @finding_replicas
    async def get_model(supervisor: Any, model_uid: str) -> Any:
        return SimpleNamespace(uid=f"m-rep{next(turns)}".encode())

    async def chosen() -> str:
        return (await get_model(cluster.supervisor, "m")).uid.decode()  # type: ignore[no-any-return]

    removal = cluster.begin(answers=1)
    await cluster.answers[0].was_asked()
    assert [await chosen() for _ in range(3)] == ["m-rep1", "m-rep2", "m-rep1"]
    cluster.info.active_replica_ids = [0]
    assert [await chosen() for _ in range(2)] == ["m-rep2", "m-rep0"]
    cluster.answers[0].count = 0
    await removal
