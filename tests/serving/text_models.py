"""Model actors like xinference's, in a process of their own.

What an actor of another process raises has xoscar's mark; what the connection to it raises has
none. In the caller's own process, the errors of streams have none either.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

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


class Asked(NamedTuple):
    """One call of `generate` or `chat`."""

    method: str
    content: Any
    """The prompt, or the messages."""
    config: dict[str, Any]
    request_id: str | None
    correlation: str | None
    """xinference's id for the request in its logs."""


class TextModel(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Answers with two words, of which the second is its name. Counts requests as xinference's
    decorator `request_limit` does: a stream keeps its place until `decrease_serve_count`.

    `fails` is raised when it is asked, `breaks` before the next word of a stream. With `hangs`,
    neither the first word nor an answer that is not streamed comes.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._asked: list[Asked] = []
        self._aborted: list[str] = []
        self._serving = 0
        self._closed = 0

    async def prepare(
        self,
        fails: Exception | None = None,
        breaks: Exception | None = None,
        hangs: bool = False,
        limit: float = float("inf"),
    ) -> None:
        self._fails, self._breaks, self._hangs, self._limit = fails, breaks, hangs, limit

    async def asked(self) -> list[Asked]:
        return self._asked

    async def aborted(self) -> list[str]:
        return self._aborted

    async def serving(self) -> int:
        return self._serving

    async def closed(self) -> int:
        """The streams that were closed."""
        return self._closed

    # -- xinference's ---------------------------------------------------------------------------

    async def is_vllm_backend(self) -> bool:
        return True

    async def abort_request(self, request_id: str, **_: Any) -> str:
        self._aborted.append(request_id)
        return "done"

    async def decrease_serve_count(self) -> None:
        self._serving = max(0, self._serving - 1)

    async def prepare_anthropic_request(
        self, messages: list[Any], config: dict[str, Any]
    ) -> dict[str, Any]:
        return {"messages": messages, "generate_config": config, "input_tokens": 3}

    @xo.generator  # type: ignore[untyped-decorator]
    async def generate(self, prompt: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        return await self._answer(Asked("generate", prompt, config, *_ids(kwargs)))

    @xo.generator  # type: ignore[untyped-decorator]
    async def chat(self, messages: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        return await self._answer(Asked("chat", messages, config, *_ids(kwargs)))

    async def __xoscar_destroy_generator__(self, uid: str) -> Any:
        self._closed += 1
        return await super().__xoscar_destroy_generator__(uid)

    async def _answer(self, asked: Asked) -> Any:
        self._asked.append(asked)
        if self._serving >= self._limit:
            raise RuntimeError(
                f"Rate limit reached for the model. Request limit {self._limit} for the model: "
                f"{self._name}"
            )
        if self._fails is not None:
            raise self._fails
        if asked.config.get("stream"):
            self._serving += 1
            return self._words(asked.method)
        if self._hangs:
            await asyncio.Event().wait()
        return json.dumps(_answer(asked.method, f"by {self._name}")).encode()

    async def _words(self, method: str) -> AsyncIterator[bytes]:
        if self._hangs:
            await asyncio.Event().wait()
        for word in ("by", self._name):
            if self._breaks is not None:
                raise self._breaks
            yield f"data: {json.dumps(_answer(method, word, streamed=True))}\r\n\r\n".encode()


def text_of(answer: bytes) -> str:
    """The words in an answer, or in a part of a stream."""
    (choice,) = json.loads(answer.decode().removeprefix("data: "))["choices"]
    said = choice if "text" in choice else choice.get("delta") or choice["message"]
    return str(said.get("text") or said["content"])


def _ids(kwargs: dict[str, Any]) -> tuple[str | None, str | None]:
    metadata = kwargs.get("__xinf_rpc_metadata__", {})
    return kwargs.get("request_id"), metadata.get("correlation_id")


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
