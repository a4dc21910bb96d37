"""Requests of real services, and how they are spread over a number of replicas."""

import gzip
import itertools
import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

NAMES = ("conversation", "synthetic")
CHUNK = 512
"""Tokens."""
GROUP = bytes(4)
"""The end of a chunk key."""


class Request(NamedTuple):
    at: float
    """Seconds."""
    tokens: int
    keys: Sequence[bytes]
    """The prompt's whole chunks."""
    answer: int
    """Tokens; at least 1."""


def load(name: str) -> list[Request]:
    """In order of arrival."""
    file = Path(__file__).parent / f"mooncake-{name}.jsonl.gz"
    keys: dict[int, bytes] = {}
    found = []
    with gzip.open(file, "rt") as lines:
        for line in map(json.loads, lines):
            tokens: int = line["input_length"]
            ids = line["hash_ids"][: tokens // CHUNK]
            chunks = [keys.setdefault(each, _key(each)) for each in ids]
            at, answer = line["timestamp"] / 1000, max(1, line["output_length"])
            found.append(Request(at, tokens, chunks, answer))
    return found


def _key(name: object) -> bytes:
    return sha256(str(name).encode()).digest() + GROUP


class Rounds(NamedTuple):
    """Sessions of many rounds, in the shape of production-stack's `multi-round-qa`: all begin with
    one system prompt, then each user's own history, and each round adds a question and an answer.
    Lengths are in tokens."""

    system: int = 1000
    history: int = 20_000
    added: int = 200
    answer: int = 100
    """Tokens of the answer, among those added."""
    rounds: int = 10
    pause: float = 10.0
    """Mean seconds between two rounds of a session."""

    @property
    def new(self) -> int:
        """Tokens of a session that nobody has computed before."""
        return self.history + self.rounds * self.added

    def requests(self, tokens_per_s: float, seconds: float) -> list[Request]:
        """The requests of so many seconds. Sessions begin at random, so that the new tokens come at
        this rate."""
        source = random.Random(0)
        found = list[Request]()
        begin = 0.0
        for user in itertools.count():
            begin += source.expovariate(tokens_per_s / self.new)
            if begin > seconds:
                break
            at, tokens = begin, self.system + self.history
            shared = [_key(chunk) for chunk in range(self.system // CHUNK)]
            own = [_key((user, chunk)) for chunk in range((self.new + CHUNK) // CHUNK)]
            for _ in range(self.rounds):
                tokens += self.added
                keys = [*shared, *own][: tokens // CHUNK]
                found.append(Request(at, tokens, keys, self.answer))
                at += self.pause * source.uniform(0.7, 1.3)
        return sorted((each for each in found if each.at <= seconds), key=lambda each: each.at)


class Common(NamedTuple):
    """Short questions after one system prompt, with long answers. Lengths are in tokens."""

    system: int = 5120
    question: int = 80
    answer: int = 1000
    """On average: lengths are distributed exponentially, unless they are `fixed`."""
    fixed: bool = False

    def requests(self, per_s: float, seconds: float) -> list[Request]:
        """The requests of so many seconds, which arrive at random."""
        source = random.Random(0)
        tokens = self.system + self.question
        keys = [_key(chunk) for chunk in range(self.system // CHUNK)]
        found = list[Request]()
        at = source.expovariate(per_s)
        while at <= seconds:
            answer = max(1, round(source.expovariate(1 / self.answer)))
            found.append(Request(at, tokens, keys, self.answer if self.fixed else answer))
            at += source.expovariate(per_s)
        return found


def spread(trace: Sequence[Request], tokens_per_s: float, pieces: int) -> list[Request]:
    """The trace cut into `pieces` that are played at once, at a speed that makes `tokens_per_s`.

    So many replicas see the requests of many clients, and yet a client that asks again takes its
    time.
    """
    size = -(-len(trace) // pieces)
    starts = range(0, len(trace), size)
    shifted = [
        request._replace(at=request.at - trace[start].at)
        for start in starts
        for request in trace[start : start + size]
    ]
    shifted.sort(key=lambda request: request.at)
    seconds = sum(request.tokens for request in shifted) / tokens_per_s
    slower = seconds / shifted[-1].at
    return [request._replace(at=request.at * slower) for request in shifted]


def copied(trace: Sequence[Request], times: int) -> list[Request]:
    """The trace one time after another. No copy shares a prefix with another one."""
    length = trace[-1].at
    found = list(trace)
    for copy in range(1, times):
        keys = {key: _key_of_copy(key, copy) for request in trace for key in request.keys}
        found += [
            request._replace(
                at=request.at + copy * length, keys=[keys[key] for key in request.keys]
            )
            for request in trace
        ]
    return found


def _key_of_copy(key: bytes, copy: int) -> bytes:
    return sha256(key + bytes([copy])).digest() + GROUP
