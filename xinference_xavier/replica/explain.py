"""Where the chunks of a prompt are, and what a request for it would reuse, replica by replica.

An estimate of what the scheduler would find now: vLLM's own prefix cache is left out, a chunk
counts only if all its KV-cache groups are there, and a fetch is taken to succeed and to be quicker
than computing. Every replica is taken to have the same `xavier_min_fetch_tokens`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica.mirror import Mirror


class Chunked(NamedTuple):
    """A prompt's whole chunks in order: each is its keys, one per KV-cache group."""

    prompt_tokens: int
    chunk_tokens: int
    chunks: list[tuple[bytes, ...]]


Chunker = Callable[[dict[str, Any]], Chunked]
"""Makes chunks of `{"prompt": text}` or `{"messages": [...]}`. Blocks; raises ExplainError."""


def explanation(
    chunked: Chunked, *, incarnation: str, pool: Pool, mirror: Mirror, min_fetch_tokens: int
) -> dict[str, Any]:
    """As seen by the replica `incarnation`, whose are `pool` and `mirror`; JSON-able.

    `reuse` counts tokens: "computed" are those that are neither in the own pool nor fetched.
    """
    held = {incarnation: [all(map(pool.lookup, keys)) for keys in chunked.chunks]}
    for peer in sorted(mirror.peers):
        held[peer] = [
            all(peer in mirror.all_holders(key) for key in keys) for keys in chunked.chunks
        ]
    min_chunks = max(1, -(-min_fetch_tokens // chunked.chunk_tokens))
    size = chunked.chunk_tokens
    return {
        "prompt_tokens": chunked.prompt_tokens,
        "chunk_tokens": size,
        "chunks": [
            {
                "from": place * size,
                "to": (place + 1) * size,
                "replicas": {
                    replica: "pool" if chunks[place] else "none" for replica, chunks in held.items()
                },
            }
            for place in range(len(chunked.chunks))
        ],
        "reuse": {
            replica: _reuse(replica, held, mirror.enabled, min_chunks, chunked) for replica in held
        },
    }


def _reuse(
    replica: str, held: dict[str, list[bool]], sharing: bool, min_chunks: int, chunked: Chunked
) -> dict[str, int]:
    """The scheduler's way through the chunks: own ones, then one donor's, and so on."""
    own = held[replica]
    others = [chunks for peer, chunks in held.items() if peer != replica] if sharing else []
    place = from_pool = from_peers = 0
    while place < len(own):
        if own[place]:
            place, from_pool = place + 1, from_pool + 1
            continue
        wanted = _run(own, place, False)
        fetched = min(wanted, max((_run(chunks, place, True) for chunks in others), default=0))
        if fetched < min_chunks:
            break
        place, from_peers = place + fetched, from_peers + fetched
    size = chunked.chunk_tokens
    return {
        "local_pool": from_pool * size,
        "remote": from_peers * size,
        "computed": chunked.prompt_tokens - (from_pool + from_peers) * size,
    }


def _run(chunks: list[bool], start: int, value: bool) -> int:
    """How many chunks from `start` on are all `value`."""
    length = 0
    while start + length < len(chunks) and chunks[start + length] is value:
        length += 1
    return length
