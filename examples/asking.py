"""Ask a running model: the time to first token, and the sources of the prompt's tokens.

Nobody else may ask the model meanwhile: the sources are read from how much a replica's counters
have grown.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import httpx

from xinference_xavier.client import XavierClient
from xinference_xavier.stats.schema import Hits, ModelStatus

ANSWER_TIMEOUT = 300.0
COUNTERS_TIMEOUT = 60.0

Messages = Sequence[Mapping[str, str]]


class Answer(NamedTuple):
    """`first_token_s` is measured at the client; `hits` are the prompt's tokens by source."""

    text: str
    first_token_s: float
    replica: str
    hits: Hits

    def __str__(self) -> str:
        hits = self.hits
        return (
            f"{self.first_token_s:6.3f} s to the first token, {hits.total:,} tokens: "
            f"{hits.prefix_cache:,} prefix cache, {hits.local_pool:,} local pool, "
            f"{hits.disk:,} disk, {hits.remote:,} remote, {hits.computed:,} computed "
            f"({self.replica})"
        )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--endpoint", required=True, help="xinference's, such as http://host:9997")
    parser.add_argument("--model", required=True, help="uid of a model launched with enable_xavier")
    parser.add_argument("--api-key", help="if xinference requires one")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of each answer")
    return parser


class Asker:
    """Asks a model; `options` come from `arguments`."""

    def __init__(self, options: argparse.Namespace) -> None:
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._model: str = options.model
        self._max_tokens: int = options.max_tokens
        self._xavier = XavierClient(options.endpoint, options.api_key)
        self._http = httpx.Client(
            base_url=options.endpoint, headers=headers, timeout=ANSWER_TIMEOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._http.close()
        self._xavier.close()

    def complete(self, prompt: str) -> Answer:
        return self._ask("/v1/completions", {"prompt": prompt})

    def chat(self, messages: Messages) -> Answer:
        return self._ask("/v1/chat/completions", {"messages": list(messages)})

    def _ask(self, path: str, question: Mapping[str, Any]) -> Answer:
        before = self._xavier.status(self._model)
        body = {
            "model": self._model,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
            **question,
        }
        began = time.perf_counter()
        first: float | None = None
        pieces = []
        with self._http.stream("POST", path, json=body) as answer:
            if answer.is_error:
                raise SystemExit(f"{answer.status_code}: {answer.read().decode()}")
            for piece in streamed(answer.iter_lines()):
                if first is None:
                    first = time.perf_counter() - began
                pieces.append(piece)
        whole = time.perf_counter() - began
        replica, hits = self._counted(before)
        return Answer("".join(pieces), whole if first is None else first, replica, hits)

    def _counted(self, before: ModelStatus) -> tuple[str, Hits]:
        """The replica that has finished a request since `before`, and the sources of its tokens."""
        known = {replica.incarnation: replica for replica in before.replicas}
        deadline = time.monotonic() + COUNTERS_TIMEOUT
        while time.monotonic() < deadline:
            for replica in self._xavier.status(self._model).replicas:
                earlier = known.get(replica.incarnation)
                if earlier is not None and replica.requests > earlier.requests:
                    return replica.replica, _difference(replica.hits, earlier.hits)
            time.sleep(0.05)
        raise SystemExit(f"no replica has counted the question within {COUNTERS_TIMEOUT:.0f} s")


def streamed(lines: Iterator[str]) -> Iterator[str]:
    """Yield the texts of a streamed answer."""
    for line in lines:
        field, _, data = line.partition(":")
        if field != "data" or data.strip() == "[DONE]":
            continue
        part = json.loads(data)
        if "error" in part:
            raise SystemExit(f"the model failed: {part['error']}")
        for choice in part["choices"]:
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                yield text


def _difference(now: Hits, before: Hits) -> Hits:
    earlier = vars(before)
    return Hits(**{source: tokens - earlier[source] for source, tokens in vars(now).items()})
