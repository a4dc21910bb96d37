"""The API process asks each model's tracker once for all listeners of the model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from xinference_xavier.errors import NotFoundError
from xinference_xavier.serving.gateway import TrackerGateway


class Counting(TrackerGateway):
    """Its reports come when the test lets them, numbered in the order in which they were begun."""

    def __init__(self) -> None:
        super().__init__(no_supervisor)
        self.begun = 0
        self.may_end = asyncio.Event()

    async def report(self, model_uid: str) -> dict[str, Any]:
        self.begun += 1
        number = self.begun
        await self.may_end.wait()
        if model_uid == "lost":
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return {"number": number}


async def no_supervisor() -> Any:
    raise ConnectionRefusedError


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


async def test_a_lost_supervisor_is_a_network_error() -> None:
    with pytest.raises(ConnectionRefusedError):
        await Counting().models()
