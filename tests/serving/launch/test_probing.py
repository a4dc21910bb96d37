"""A worker gives its replicas' probes to their models, until the models are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import INITIAL_SETTINGS, Member, tracker_uid
from xinference_xavier.replica.canary import Probe
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving.launch import probing
from xinference_xavier.tracker.actor import BlockTracker

PROBE = Probe([1, 2, 3], "xavier-probe-canary")


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Wants one prompt computed."""

    def __init__(self) -> None:
        super().__init__()
        self.probes = [PROBE]

    def next_probe(self) -> Probe | None:
        return self.probes.pop() if self.probes else None


class Model:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.error = error
        self.was_asked = asyncio.Event()

    async def generate(self, prompt: Any, settings: Any) -> None:
        self.asked.append((prompt, settings))
        self.was_asked.set()
        if self.error is not None:
            raise self.error


class Worker:
    def __init__(self, model: Model) -> None:
        self._model_uid_to_model: dict[str, Model] = {"m-rep0": model}


async def join(address: str, name: str, incarnation: str) -> None:
    tracker = await xo.actor_ref(address, tracker_uid("m"))
    await tracker.join("namespace", Member(incarnation, address), 36, INITIAL_SETTINGS, name)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(probing, "_PAUSE", 0.01)


@pytest.mark.parametrize("name", ["m-rep0", "m-rep0_dp1"])
async def test_a_probe_becomes_a_request_with_its_salt(address: str, name: str) -> None:
    await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
    await xo.create_actor(Replica, address=address, uid=replica_uid("a"))
    model = Model()
    worker = Worker(model)
    task = asyncio.create_task(probing.keep_probing(worker, "m-rep0", XavierConfig("m", address)))
    await join(address, name, "a")  # later than the worker asks first
    await model.was_asked.wait()
    ((prompt, settings),) = model.asked
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == PROBE
    assert settings == {"max_tokens": 1}
    worker._model_uid_to_model.clear()
    await task


async def test_other_replicas_are_not_asked(address: str) -> None:
    tracker = await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
    for name in ("m-rep0", "m-rep1", "m-rep0_dp", "m-rep00"):
        await join(address, name, f"engine of {name}")
    assert [member.incarnation for member in await tracker.members_of("m-rep0")] == [
        "engine of m-rep0"
    ]


async def test_a_model_that_refuses_goes_on_serving(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    await xo.create_actor(BlockTracker, "m", address=address, uid=tracker_uid("m"))
    await xo.create_actor(Replica, address=address, uid=replica_uid("a"))
    await join(address, "m-rep0", "a")
    model = Model(RuntimeError("rate limit reached"))
    worker = Worker(model)
    task = asyncio.create_task(probing.keep_probing(worker, "m-rep0", XavierConfig("m", address)))
    await model.was_asked.wait()
    worker._model_uid_to_model["m-rep0"] = Model()  # it was launched again
    await task
    assert "cannot probe: replica=m-rep0" in caplog.text
