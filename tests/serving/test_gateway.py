"""The API process asks each model's tracker once for all listeners of the model, and gathers facts
for `doctor`, where a silent process costs only its own answer. `tests/client/test_findings.py`
tests what `doctor` concludes."""

import asyncio
import threading
from collections import UserDict
from typing import Any

import pytest
import xoscar as xo

from tests.serving.supervisors import Bare, Supervisor, gateway_to, join, ref_to
from xinference_xavier import __version__
from xinference_xavier.errors import NotFoundError
from xinference_xavier.serving import gateway
from xinference_xavier.serving.gateway import (
    ModelReport,
    TrackerGateway,
    cluster_info,
    worker_process_info,
)
from xinference_xavier.serving.metrics import Exporter


class Counting(TrackerGateway):
    """Its reports come when the test lets them, numbered in the order in which they were begun."""

    def __init__(self) -> None:
        super().__init__(ref_to(None))
        self.begun = 0
        self.may_end = asyncio.Event()

    async def report(self, model_uid: str) -> Any:
        self.begun += 1
        number = self.begun
        await self.may_end.wait()
        if model_uid == "lost":
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return {"number": number}


async def test_all_listeners_of_a_model_share_one_report() -> None:
    gateway = Counting()
    looking = [asyncio.ensure_future(gateway.shared_report("m", 3600.0)) for _ in range(3)]
    other = asyncio.ensure_future(gateway.shared_report("n", 3600.0))
    gateway.may_end.set()
    assert [(await each)["number"] for each in looking] == [1, 1, 1]
    assert (await other)["number"] == 2


async def test_a_report_that_is_too_old_is_not_shared() -> None:
    gateway = Counting()
    gateway.may_end.set()
    assert (await gateway.shared_report("m", 3600.0))["number"] == 1
    assert (await gateway.shared_report("m", 3600.0))["number"] == 1
    assert (await gateway.shared_report("m", -1.0))["number"] == 2


async def test_the_first_to_ask_may_leave_first() -> None:
    gateway = Counting()
    first, second = (asyncio.ensure_future(gateway.shared_report("m", 3600.0)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gateway.may_end.set()
    assert (await second)["number"] == 1


async def test_all_listeners_learn_that_a_model_does_not_share() -> None:
    gateway = Counting()
    gateway.may_end.set()
    for _ in range(2):
        with pytest.raises(NotFoundError, match="does not share its cache here"):
            await gateway.shared_report("lost", 3600.0)
    assert gateway.begun == 1


class Slow(UserDict[str, Any]):
    """A status of which each value is there only when the event loop has gone on."""

    def __init__(self, status: dict[str, Any]) -> None:
        super().__init__(status)
        self._loop = asyncio.get_running_loop()

    def __getitem__(self, name: str) -> Any:
        went_on = threading.Event()
        self._loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(10.0), "the event loop is held up"
        return super().__getitem__(name)


class Many(TrackerGateway):
    """Its model has so many replicas that a report takes long."""

    async def models(self) -> dict[str, dict[str, str]]:
        return {"m": {}}

    async def call(self, *_: object, **__: object) -> Any:
        return Slow({"model_uid": "m", "enabled": True, "namespaces": {}})

    async def shared_report(self, model_uid: str, max_age: float) -> Any:
        return ModelReport(Slow((await self.report(model_uid)).public), [])


async def test_requests_go_on_while_a_long_report_is_made() -> None:
    assert (await Many(ref_to(None)).report("m")).public["enabled"]


async def test_requests_go_on_while_many_metrics_are_made() -> None:
    exporter = Exporter(Many(ref_to(None)))
    await exporter.refresh(10.0)
    assert exporter.read("tracker_up") == [({"model_uid": "m"}, 1)]


async def test_metrics_that_cannot_be_made_cost_only_themselves() -> None:
    """A scrape also has xinference's own."""

    class Broken(Many):
        async def shared_report(self, model_uid: str, max_age: float) -> Any:
            return ModelReport({"model_uid": 1, "replicas": 1}, [])

    exporter = Exporter(Broken(ref_to(None)))
    await exporter.refresh(10.0)
    assert exporter.read("up") == [({}, 1)], "the supervisor has answered"


# -- facts for doctor -------------------------------------------------------------------------


class Worker(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    xavier_process_info = worker_process_info


class Silent(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def xavier_process_info(self) -> None:
        await asyncio.Event().wait()


class Broken(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def xavier_process_info(self) -> None:
        raise RuntimeError("no idea")


async def gathered(address: str, **workers: type[xo.Actor]) -> dict[str, Any]:
    """The facts of a cluster in which two models share; "lost" has lost its tracker."""
    refs = {name: await xo.create_actor(kind, address=address) for name, kind in workers.items()}
    supervisor = await xo.create_actor(Supervisor, refs, address=address)
    for model_uid in ("m", "lost"):
        await supervisor.put(model_uid)
    return await cluster_info(gateway_to(supervisor))


async def test_every_process_reports_its_facts(address: str) -> None:
    facts = await gathered(address, first=Worker, second=Worker)
    assert set(facts) == {"api", "supervisor", "workers", "models"}
    for told in (facts["api"], facts["supervisor"], *facts["workers"].values()):
        assert told["versions"]["xinference-xavier"] == __version__
    assert set(facts["workers"]) == {"first", "second"}
    assert facts["supervisor"]["address"] == facts["workers"]["first"]["address"] == address


async def test_each_worker_without_an_answer_is_an_error_of_its_own(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "CALL_DEADLINE", 2.0)
    kinds = {"good": Worker, "silent": Silent, "broken": Broken, "bare": Bare}
    workers = (await gathered(address, **kinds))["workers"]
    assert "error" not in workers["good"]
    assert "no answer within 2 s" in workers["silent"]["error"]
    assert "no idea" in workers["broken"]["error"]
    assert "xavier_process_info" in workers["bare"]["error"]


async def test_a_model_without_a_tracker_does_not_hide_the_others(
    tracker: Any, address: str
) -> None:
    await join(tracker, "gone")
    models = (await gathered(address))["models"]
    assert models["lost"] == {"error": "no tracker"}
    assert models["m"]["report"]["model_uid"] == "m"
    assert set(models["m"]["self_checks"]) == {"gone"}


async def test_only_a_supervisor_knows_whether_a_model_shares(address: str) -> None:
    """One that has just restarted has no actor yet, and its models are not gone."""
    supervisor = await xo.create_actor(Supervisor, {}, address=address)
    trackers = gateway_to(supervisor)
    await supervisor.put("lost")
    with pytest.raises(NotFoundError, match="'lost' does not share its cache here"):
        await trackers.find("lost")
    await xo.destroy_actor(supervisor)
    with pytest.raises(xo.ActorNotExist):
        await trackers.find("lost")


async def test_a_supervisor_without_the_extension_is_an_error_and_the_rest_is_empty(
    address: str,
) -> None:
    facts = await cluster_info(gateway_to(await xo.create_actor(Bare, address=address)))
    assert "xavier_process_info" in facts["supervisor"]["error"]
    assert (facts["workers"], facts["models"]) == ({}, {})
    assert facts["api"]["versions"]["xinference-xavier"] == __version__
