"""Model actors like xinference's, on pools that a test may stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import xoscar as xo


class Model(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Answers with its name; `fails` is raised first, `hangs` never answers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.fails: Exception | None = None
        self.hangs = False
        self.asked: list[str] = []
        self.aborted: list[str] = []

    async def prepare(self, fails: Exception | None = None, hangs: bool = False) -> None:
        self.fails, self.hangs = fails, hangs

    async def requests(self) -> tuple[list[str], list[str]]:
        return self.asked, self.aborted

    async def is_vllm_backend(self) -> bool:
        return True

    async def abort_request(self, request_id: str) -> str:
        self.aborted.append(request_id)
        return "done"

    async def generate(self, prompt: str, config: dict[str, Any], *, request_id: str) -> Any:
        await self._begin(request_id)
        return f"{prompt} by {self.name}"

    @xo.generator  # type: ignore[untyped-decorator]
    async def chat(
        self, messages: list[str], config: dict[str, Any], *, request_id: str
    ) -> AsyncIterator[str]:
        await self._begin(request_id)
        return self._words(messages)

    async def _begin(self, request_id: str) -> None:
        self.asked.append(request_id)
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()

    async def _words(self, messages: list[str]) -> AsyncIterator[str]:
        for word in [*messages, "by", self.name]:
            if word == "hang":
                await asyncio.Event().wait()
            if word == "fail":
                raise ConnectionResetError("the replica's process has ended")
            yield word


class Replica:
    """One replica, with a pool of its own."""

    pool: Any
    model: Any

    async def start(self, name: str) -> Replica:
        self.pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
        self.model = await xo.create_actor(
            Model, name, address=self.pool.external_address, uid=name
        )
        return self

    async def stop(self) -> None:
        await self.pool.stop()
