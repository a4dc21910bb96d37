"""Requests of real services, and how they are spread over a number of replicas."""

from __future__ import annotations

import gzip
import json
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
            found.append(Request(line["timestamp"] / 1000, tokens, chunks))
    return found


def _key(number: int) -> bytes:
    return sha256(str(number).encode()).digest() + GROUP


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
            Request(request.at + copy * length, request.tokens, [keys[key] for key in request.keys])
            for request in trace
        ]
    return found


def _key_of_copy(key: bytes, copy: int) -> bytes:
    return sha256(key + bytes([copy])).digest() + GROUP
