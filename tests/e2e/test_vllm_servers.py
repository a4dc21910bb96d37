"""Two of vLLM's own API servers, without xinference, as users start them: adapters by flag and by
route, requests of adapters only, a chat that is streamed, a restart, and the example's script."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import xoscar

from examples.plain_vllm import ask
from examples.processes import answers, end, free_port, start
from tests.e2e.conftest import ROOT
from tests.e2e.model import CHUNK, question, wait_for_engine, wait_until
from tests.e2e.text_routes import CHAT, COMPLETIONS
from tests.harness.engines import ANSWER_PATIENCE
from tests.models.adapters import write_adapter
from xinference_xavier.protocol.tracker import tracker_uid

PROGRAMS = Path(sys.executable).parent
XAVIER = PROGRAMS / "xinference-xavier"
SCRIPT = ROOT / "examples" / "plain_vllm" / "serve.sh"
HOST, UID = "127.0.0.1", "plain"
ARGUMENTS = (
    *("--block-size", "128", "--dtype", "float32"),
    *("--enforce-eager", "--max-model-len", "4096"),
)
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
}
BY_FLAG, BY_ROUTE = "by-flag", "by-route"
TOLERANCE = 2e-3
"""The largest difference of log-probabilities. With these adapters, vLLM by itself differs by
0.0006 between computing a prompt and finding it in its own prefix cache; the two adapters differ by
more than 1."""
ROWS = 20
"""A document's table has as many: about 1,000 tokens."""
END_TIMEOUT = 120.0


def replicas(tracker: str) -> list[dict[str, Any]]:
    """What the tracker knows of each."""

    async def status() -> Any:
        return await (await xoscar.actor_ref(address=tracker, uid=tracker_uid(UID))).status()

    groups = asyncio.run(status())["namespaces"].values()
    return [replica for group in groups for replica in group["replicas"]]


def wait_until_sharing(tracker: str) -> None:
    """They compare themselves before anybody asks them anything."""

    def serve() -> bool:
        return [replica["serves"] for replica in replicas(tracker)] == [True, True]

    def compared() -> bool:
        counts = [replica["stats"]["comparison"]["compared"] for replica in replicas(tracker)]
        return counts == [1, 1]

    wait_for_engine(serve, "both can be fetched from")
    wait_until(compared, "they are compared")


class Answer(NamedTuple):
    text: str
    logprobs: list[float]
    """The log-probabilities of the tokens that were chosen."""
    prompt: int
    cached: int
    """Tokens of the prompt, and those that were reused."""

    @property
    def whole(self) -> int:
        """Tokens in whole chunks."""
        return self.prompt // CHUNK * CHUNK

    def equals(self, other: "Answer") -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.text == other.text and all(abs(a - b) < TOLERANCE for a, b in pairs)


class Server:
    """One server, and the adapters that it knows from its start."""

    def __init__(self, name: str, tracker: str, model: Path, adapter: Path) -> None:
        options = {
            "--address": tracker,
            "--name": name,
            "--xavier_pool_bytes": "256MiB",
            "--xavier_min_fetch_tokens": "256",  # fetch however busy the machine is
        }
        asked = [XAVIER, "transfer-config", UID, *chain(*options.items())]
        config = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        self.endpoint = f"http://{HOST}:{(port := free_port(HOST))}"
        self._log = ROOT / "build" / f"test-vllm-server-{name}.log"
        self._log.unlink(missing_ok=True)
        self._words = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", HOST, "--port", f"{port}", "--kv-transfer-config", config),
            *("--enable-lora", "--max-loras", "2", "--lora-modules", f"{BY_FLAG}={adapter}"),
            *("--enable-prompt-tokens-details", *ARGUMENTS),
        ]

    def start(self) -> None:
        environment = ENVIRONMENT | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        self.process = start(self._words, self._log, environment, append=True)

    def wait_until_ready(self) -> None:
        health = f"{self.endpoint}/health"
        wait_for_engine(
            lambda: self.process.poll() is not None or answers(health), f"{self._log} is ready"
        )
        assert self.process.poll() is None, self._log.read_text()[-4000:]

    def end(self) -> None:
        end(self.process, END_TIMEOUT)

    def load(self, name: str, adapter: Path) -> None:
        self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(adapter))

    def complete(self, model: str, prompt: str, **more: Any) -> Answer:
        """`model` is the name of an adapter."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer = self.post(COMPLETIONS, **body, **more).json()
        (choice,), usage = answer["choices"], answer["usage"]
        logprobs = choice["logprobs"]["token_logprobs"]
        return Answer(choice["text"], logprobs, *_tokens(usage))

    def post(self, path: str, **body: Any) -> httpx.Response:
        answer = httpx.post(f"{self.endpoint}{path}", json=body, timeout=ANSWER_PATIENCE)
        return answer.raise_for_status()

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream(
            "POST", f"{self.endpoint}{path}", json=asked, timeout=ANSWER_PATIENCE
        ) as answer:
            for line in answer.raise_for_status().iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["prompt_tokens_details"] or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0


class Pair(NamedTuple):
    tracker: str
    first: Server
    second: Server
    adapters: dict[str, Path]

    def wait_until_sharing(self) -> None:
        for server in (self.first, self.second):
            server.wait_until_ready()
        wait_until_sharing(self.tracker)

    def wait_until_published(self, before: int, prompt: int) -> None:
        """Since there were `before` chunks, those of a prompt with so many tokens were added."""
        added = prompt // CHUNK
        wait_until(lambda: self.holdings() >= before + added, f"{added} chunks are published")

    def holdings(self) -> int:
        return sum(replica["holdings"] for replica in replicas(self.tracker))

    def compute(self, adapter: str, text: str) -> Answer:
        """The first server's answer, once its chunks are published."""
        before = self.holdings()
        answer = self.first.complete(adapter, text)
        self.wait_until_published(before, answer.prompt)
        return answer


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("adapters")
    names = (BY_FLAG, BY_ROUTE)
    adapters = {
        name: write_adapter(folder / name, model_folder, seed=n) for n, name in enumerate(names)
    }
    address = f"{HOST}:{free_port(HOST)}"
    with ExitStack() as stack:
        tracker = start(
            [XAVIER, "tracker", UID, "--address", address], ROOT / "build" / "test-vllm-tracker.log"
        )
        stack.callback(end, tracker, END_TIMEOUT)
        first, second = (
            Server(name, address, model_folder, adapters[BY_FLAG]) for name in ("first", "second")
        )
        for server in (first, second):
            server.start()
            stack.callback(server.end)
        pair = Pair(address, first, second, adapters)
        pair.wait_until_sharing()
        for server in (first, second):
            server.load(BY_ROUTE, adapters[BY_ROUTE])
        yield pair


@pytest.mark.long
def test_what_one_server_of_the_example_has_computed_the_other_copies(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its README says how. At the end, the script stops everything that it started. This test is
    the first, before the servers of the others run."""
    tracker, *ports = (str(free_port(HOST)) for _ in range(3))
    environment = ENVIRONMENT | {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "TRACKER_PORT": tracker,
        "PORTS": " ".join(ports),
        "POOL": "256MiB",
    }
    environment.pop("PYTHONHASHSEED", None)
    log = ROOT / "build" / "test-plain-vllm.log"
    script = start([SCRIPT, model_folder, *ARGUMENTS], log, environment)
    started = psutil.Process(script.pid)
    try:
        endpoints = [f"http://{HOST}:{port}" for port in ports]
        health = [f"{endpoint}/health" for endpoint in endpoints]
        wait_for_engine(
            lambda: script.poll() is not None or all(map(answers, health)), "both servers answer"
        )
        assert script.poll() is None, log.read_text()[-4000:]
        wait_until_sharing(f"{HOST}:{tracker}")
        ask.main([*endpoints, "--rows", "40"])
    finally:
        processes = started.children(recursive=True) if script.poll() is None else []
        script.send_signal(signal.SIGTERM)
        script.wait(END_TIMEOUT)
        _, left = psutil.wait_procs(processes, timeout=END_TIMEOUT)
        for process in left:
            process.kill()
    assert left == []
    first, second = re.findall(r"(\d+) of (\d+) tokens reused", capsys.readouterr().out)
    assert first[0] == "0"
    assert int(second[0]) > 0.9 * int(second[1])


def test_each_adapter_shares_with_itself_only(pair: Pair) -> None:
    text = question(1, rows=ROWS)
    answered = list[Answer]()
    for adapter in (BY_FLAG, BY_ROUTE):
        first = pair.compute(adapter, text)
        second = pair.second.complete(adapter, text)
        cold = pair.second.complete(adapter, text, cache_salt="shares with nobody")
        assert (first.cached, second.cached, cold.cached) == (0, first.whole, 0)
        assert first.equals(cold)
        assert second.equals(cold)
        answered.append(cold)
    one, other = answered
    assert not one.equals(other)


def test_a_chat_that_is_streamed_copies_too(pair: Pair) -> None:
    chat = {
        "model": BY_FLAG,
        "messages": [{"role": "user", "content": question(2, rows=ROWS)}],
        "max_tokens": 8,
        "temperature": 0,
    }
    before = pair.holdings()
    answer = pair.first.post(CHAT, **chat).json()
    prompt, _ = _tokens(answer["usage"])
    pair.wait_until_published(before, prompt)
    *events, last = pair.second.stream(CHAT, **chat)
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in events)
    assert text == answer["choices"][0]["message"]["content"]
    assert _tokens(last["usage"]) == (prompt, prompt // CHUNK * CHUNK)


def test_a_server_that_starts_again_shares_again(pair: Pair) -> None:
    text = question(3, rows=ROWS)
    before = [pair.compute(adapter, text) for adapter in (BY_FLAG, BY_ROUTE)]
    pair.second.end()
    pair.second.start()
    pair.wait_until_sharing()
    pair.second.load(BY_ROUTE, pair.adapters[BY_ROUTE])
    for adapter, first in zip((BY_FLAG, BY_ROUTE), before, strict=True):
        second = pair.second.complete(adapter, text)
        assert second.cached == first.whole
        assert second.equals(first)
