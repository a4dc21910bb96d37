"""The API process gathers facts for `doctor`; a silent process costs only its own answer.
`tests/client/test_doctor.py` tests what `doctor` concludes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier import __version__
from xinference_xavier.protocol.tracker import Member, Settings, tracker_uid
from xinference_xavier.serving import gateway
from xinference_xavier.serving.gateway import (
    TrackerGateway,
    cluster_info,
    supervisor_process_info,
    worker_process_info,
)
from xinference_xavier.tracker.actor import BlockTracker

KEY_BYTES = 36


class Worker(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    xavier_process_info = worker_process_info


class Silent(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def xavier_process_info(self) -> None:
        await asyncio.Event().wait()


class Broken(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    async def xavier_process_info(self) -> None:
        raise RuntimeError("no idea")


class Bare(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A process without our extension."""


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Two models share; "lost" has lost its tracker."""

    xavier_process_info = supervisor_process_info

    def __init__(self, workers: dict[str, Any]) -> None:
        super().__init__()
        self._worker_address_to_worker = workers

    async def xavier_models(self) -> list[str]:
        return ["m", "lost"]

    async def xavier_tracker_address(self, model_uid: str) -> str:
        return str(self.address)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        await xo.create_actor(
            BlockTracker, "m", address=pool.external_address, uid=tracker_uid("m")
        )
        yield pool.external_address


async def gathered(address: str, **workers: type[xo.Actor]) -> dict[str, Any]:
    refs = {name: await xo.create_actor(kind, address=address) for name, kind in workers.items()}
    supervisor = await xo.create_actor(Supervisor, refs, address=address)

    async def get_supervisor_ref() -> Any:
        return supervisor

    return await cluster_info(TrackerGateway(get_supervisor_ref))


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
    monkeypatch.setattr(gateway, "_WORKER_DEADLINE", 2.0)
    kinds = {"good": Worker, "silent": Silent, "broken": Broken, "bare": Bare}
    workers = (await gathered(address, **kinds))["workers"]
    assert "error" not in workers["good"]
    assert "no answer within 2 s" in workers["silent"]["error"]
    assert "no idea" in workers["broken"]["error"]
    assert "xavier_process_info" in workers["bare"]["error"]


async def test_a_model_without_a_tracker_does_not_hide_the_others(address: str) -> None:
    tracker = await xo.actor_ref(address=address, uid=tracker_uid("m"))
    await tracker.join("ns", Member("gone", "127.0.0.1:1"), KEY_BYTES, Settings())
    models = (await gathered(address))["models"]
    assert models["lost"] == {"error": "no tracker"}
    assert models["m"]["report"]["model_uid"] == "m"
    assert set(models["m"]["self_checks"]) == {"gone"}


async def test_a_supervisor_without_the_extension_is_an_error_and_the_rest_is_empty(
    address: str,
) -> None:
    bare = await xo.create_actor(Bare, address=address)

    async def get_supervisor_ref() -> Any:
        return bare

    facts = await cluster_info(TrackerGateway(get_supervisor_ref))
    assert "xavier_process_info" in facts["supervisor"]["error"]
    assert (facts["workers"], facts["models"]) == ({}, {})
    assert facts["api"]["versions"]["xinference-xavier"] == __version__
