"""A call ends in time, whatever the called side does."""

from __future__ import annotations

import asyncio

import pytest

from xinference_xavier.runtime.aio import within


class Stubborn:
    """A call that, when cancelled, first waits for a peer that never answers."""

    def __init__(self) -> None:
        self.asking = asyncio.Event()
        self.ended = asyncio.Event()

    async def call(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.asking.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()


async def test_the_answer_is_passed_on() -> None:
    assert await within(60.0, asyncio.sleep(0, "answer")) == "answer"


async def test_the_error_is_passed_on() -> None:
    async def fail() -> None:
        raise LookupError("nothing here")

    with pytest.raises(LookupError, match="nothing here"):
        await within(60.0, fail())


async def test_the_deadline_does_not_wait_for_a_call_that_resists_cancellation() -> None:
    peer = Stubborn()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        await within(0.01, peer.call())
    assert not peer.ended.is_set()
    await peer.ended.wait()
    assert peer.asking.is_set()


async def test_cancelling_the_caller_does_not_wait_either() -> None:
    peer = Stubborn()
    caller = asyncio.create_task(within(60.0, peer.call()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not peer.ended.is_set()
    await peer.ended.wait()
