"""Model actors like xinference's, in a process of their own.

What an actor of another process raises has xoscar's mark; what the connection to it raises has
none. In the caller's own process, the errors of streams have none either.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import xoscar as xo

PROGRAM = """
import asyncio, sys
import xoscar as xo

async def main():
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    print(pool.external_address, flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


class ModelProcess:
    """A process for model actors, at `address`. It ends with this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class TextModel(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Answers with two words, of which the second is its name. Counts requests as xinference's
    decorator `request_limit` does: a stream keeps its place until `decrease_serve_count`.

    `fails` is raised when it is asked, `breaks` before the next word of a stream. With `hangs`, no
    word of a stream comes, with `pauses` only the first.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._asked: list[str | None] = []
        self._serving = 0
        self._closed = 0

    async def prepare(
        self,
        fails: Exception | None = None,
        breaks: Exception | None = None,
        hangs: bool = False,
        pauses: bool = False,
        limit: float = float("inf"),
    ) -> None:
        self._fails, self._breaks, self._limit = fails, breaks, limit
        self._hangs, self._pauses = hangs, pauses

    async def asked(self) -> list[str | None]:
        """xinference's ids in its logs for the requests so far."""
        return self._asked

    async def serving(self) -> int:
        return self._serving

    async def closed(self) -> int:
        """The streams that were closed."""
        return self._closed

    # -- xinference's ---------------------------------------------------------------------------

    async def is_vllm_backend(self) -> bool:
        return True

    async def abort_request(self, request_id: str, **_: Any) -> str:
        return "done"

    async def decrease_serve_count(self) -> None:
        self._serving = max(0, self._serving - 1)

    async def prepare_anthropic_request(
        self, messages: list[Any], config: dict[str, Any]
    ) -> dict[str, Any]:
        return {"messages": messages, "generate_config": config, "input_tokens": 3}

    @xo.generator  # type: ignore[untyped-decorator]
    async def generate(self, prompt: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        return await self._answer("generate", config, **kwargs)

    @xo.generator  # type: ignore[untyped-decorator]
    async def chat(self, messages: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        return await self._answer("chat", config, **kwargs)

    async def __xoscar_destroy_generator__(self, uid: str) -> Any:
        self._closed += 1
        return await super().__xoscar_destroy_generator__(uid)

    async def _answer(
        self,
        method: str,
        config: dict[str, Any],
        __xinf_rpc_metadata__: Mapping[str, str] = MappingProxyType({}),
        **_: Any,
    ) -> Any:
        self._asked.append(__xinf_rpc_metadata__.get("correlation_id"))
        if self._serving >= self._limit:
            raise RuntimeError(
                f"Rate limit reached for the model. Request limit {self._limit} for the model: "
                f"{self._name}"
            )
        if self._fails is not None:
            raise self._fails
        if config.get("stream"):
            self._serving += 1
            return self._words(method)
        return json.dumps(_answer(method, f"by {self._name}")).encode()

    async def _words(self, method: str) -> AsyncIterator[bytes]:
        if self._hangs:
            await asyncio.Event().wait()
        for word in ("by", self._name):
            if self._breaks is not None:
                raise self._breaks
            yield f"data: {json.dumps(_answer(method, word, streamed=True))}\r\n\r\n".encode()
            if self._pauses:
                await asyncio.Event().wait()


def _answer(method: str, text: str, streamed: bool = False) -> dict[str, Any]:
    """In OpenAI's form."""
    message = {"role": "assistant", "content": text}
    said = {"text": text} if method == "generate" else {"delta" if streamed else "message": message}
    kind = "text_completion" if method == "generate" else "chat.completion"
    return {
        "id": "1",
        "object": f"{kind}.chunk" if streamed else kind,
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": None if streamed else "stop", **said}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
