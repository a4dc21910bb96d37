"""What operators ask a replica: where a prompt's chunks are (`Explainer`), and whether the replica
and its links work (`self_check`).

vLLM's own prefix cache is not looked at, and a chunk is there only if all its KV-cache groups are.
Of peers, it knows the pools but not the disks.

Threading: the replica's background loop. A check of a link may open it; later fetches use it.
"""

import asyncio
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xinference_xavier.config import XavierConfig
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.peers import IN_PLACE, SHARED_MEMORY, Peer, Peers
from xinference_xavier.protocol.tracker import unpack_question
from xinference_xavier.protocol.transfer import Endpoint
from xinference_xavier.replica.neighbours import Neighbours
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.aio import ask, in_thread
from xinference_xavier.runtime.host import process_info


class Chunked(NamedTuple):
    """A prompt's whole chunks in order, each as its keys, one per KV-cache group."""

    prompt_tokens: int
    context_tokens: int
    chunk_tokens: int
    chunks: list[tuple[bytes, ...]]


Chunker = Callable[[dict[str, Any]], Chunked]
"""Divides `{"prompt": text}` or `{"messages": [...]}` into chunks. Blocks; raises ExplainError."""


class Explainer:
    """One question at a time, because a long one takes a while."""

    def __init__(self, chunker: Chunker, incarnation: str, tier: PeerTier) -> None:
        self._chunker = chunker
        self._incarnation = incarnation
        self._tier = tier
        self._asked = asyncio.Lock()

    async def explain(self, packed: bytes) -> dict[str, Any]:
        """Answer a packed question with an `explanation`. Raises ExplainError if the chunker
        rejects it."""
        async with self._asked:
            chunked = await in_thread(self._chunked, packed)
        return self.explanation(chunked)

    def _chunked(self, packed: bytes) -> Chunked:
        return self._chunker(unpack_question(packed))

    def explanation(self, chunked: Chunked) -> dict[str, Any]:
        """JSON-able; where each replica has each chunk: "pool", "disk" or "none"."""
        held = {self._incarnation: [self._own_place(keys) for keys in chunked.chunks]}
        holders = [_common(self._tier.index.full_set, keys) for keys in chunked.chunks]
        for peer in sorted(self._tier.peers.members):
            bit = self._tier.peers.set_of((peer,))
            held[peer] = ["pool" if each & bit else "none" for each in holders]
        size = chunked.chunk_tokens
        return {
            "prompt_tokens": chunked.prompt_tokens,
            "context_tokens": chunked.context_tokens,
            "chunk_tokens": size,
            "chunks": [
                {
                    "from": place * size,
                    "to": (place + 1) * size,
                    "replicas": {replica: chunks[place] for replica, chunks in held.items()},
                }
                for place in range(len(chunked.chunks))
            ],
        }

    def _own_place(self, keys: Sequence[bytes]) -> str:
        missing = [key for key in keys if self._tier.pool.lookup(key) is None]
        if not missing:
            return "pool"
        return "disk" if all(key in self._tier.disk.index for key in missing) else "none"


def _common(holders: Callable[[bytes], int], keys: Sequence[bytes]) -> int:
    return functools.reduce(operator.and_, map(holders, keys))


MAX_PEERS = 64  # that are tried


async def self_check(
    config: XavierConfig,
    peers: Peers,
    process: TransferProcess,
    neighbours: Neighbours,
    fingerprint_fields: Mapping[str, str],
) -> dict[str, Any]:
    """JSON-able. `fingerprint_fields` are the namespace's.
    `peers` maps each peer to why nothing can be fetched from it; None if it can. `linked_to` has
    the transport of each, `obstacles` why a better one is not used."""
    asked = [peers[name] for name in sorted(peers.members)[:MAX_PEERS]]
    needs_memory = config.transport == SHARED_MEMORY
    tried = await asyncio.gather(*(_try(peer, process, neighbours, needs_memory) for peer in asked))
    stats = await process.stats()
    obstacles: dict[str, dict[str, str]] = stats.get("obstacles", {})
    for peer, reason in neighbours.obstacles.items():
        better = SHARED_MEMORY if neighbours.get(peer) is None else IN_PLACE
        obstacles[peer] = {better: reason, **obstacles.get(peer, {})}
    return {
        **process_info(),
        "config": config.to_dict(),
        "fingerprint_fields": dict(fingerprint_fields),
        "transfer_address": process.endpoint and process.endpoint.address,
        "transfer_starts": process.starts,
        "transfer_error": process.error,
        "peers": {peer.name: reason for peer, reason in zip(asked, tried, strict=True)},
        "linked_to": stats.get("linked_to", {}) | neighbours.linked_to,
        "obstacles": obstacles,
    }


async def _try(
    peer: Peer, process: TransferProcess, neighbours: Neighbours, needs_memory: bool
) -> str | None:
    if (address := peer.address) is None:
        return None  # it just left
    try:
        endpoint: Endpoint | None = await ask(
            CALL_DEADLINE, address, replica_uid(peer.name), "transfer_endpoint"
        )
    except Exception as error:  # xoscar raises whatever the peer raised
        return f"its engine at {address} does not answer: {str(error) or type(error).__name__}"
    if endpoint is None:
        return "it has no transfer process"
    if neighbours.get(peer.name) is not None:
        return None
    if needs_memory:
        return neighbours.obstacles.get(peer.name, "its memory is not mapped yet")
    return await process.try_link(peer.name, endpoint, CALL_DEADLINE)
