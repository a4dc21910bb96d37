"""What end-to-end tests ask of a model under xinference, and what its tracker then knows."""

import asyncio
from collections.abc import Callable
from typing import Any

import requests
import xoscar

from examples.documents import document, prompt, questions
from examples.local_cluster import Completion, LocalCluster
from tests.e2e.conftest import wait_until
from tests.e2e.text_routes import COMPLETIONS, body_of
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import reachable_address

CHUNK = 128
"""Tokens; also the block size."""
ROWS = 60
"""Rows of a document's table: about 3,000 tokens."""
TIMEOUT = 90.0


def question(seed: int, number: int = 0, *, rows: int = ROWS) -> str:
    """One of the questions about a document."""
    return prompt(document(seed, rows), questions(seed, rows)[number])


# -- what the tracker knows ---------------------------------------------------------------------


def published(
    cluster: LocalCluster, uid: str, ask: Callable[[], Completion], by: str | None = None
) -> tuple[str, Completion]:
    """Ask one replica; return when the prompt's chunks are published, by the incarnation `by` if
    it is known. Returns the replica's incarnation and its answer."""
    before = cluster.members(uid)
    answer = ask()
    whole = answer.prompt_tokens // CHUNK

    def publishers() -> list[str]:
        return [
            incarnation
            for incarnation, replica in cluster.members(uid).items()
            if incarnation in ({by} if by is not None else before)
            and replica["holdings"] >= before[incarnation]["holdings"] + whole
        ]

    wait_until(lambda: bool(publishers()), f"{whole} chunks are published")
    return publishers()[0], answer


def tracker_exists(cluster: LocalCluster, uid: str) -> bool:
    async def look() -> bool:
        address = reachable_address(cluster.supervisor_address())
        try:
            await xoscar.actor_ref(address, tracker_uid(uid))
        except xoscar.ActorNotExist:
            return False
        return True

    return asyncio.run(look())


# -- requests to the text routes ----------------------------------------------------------------


def post(
    uid: str, cluster: LocalCluster, path: str, text: str, tokens: int = 1, **more: Any
) -> requests.Response:
    answer = requests.post(
        f"{cluster.endpoint}{path}",
        json=body_of(path, uid, text, tokens, **more),
        headers={"anthropic-version": "2023-06-01"},
        timeout=TIMEOUT,
    )
    answer.raise_for_status()
    return answer


def complete(
    uid: str, cluster: LocalCluster, text: str, tokens: int = 1, **more: Any
) -> requests.Response:
    """The answer must have as many tokens as were asked for."""
    return post(uid, cluster, COMPLETIONS, text, tokens, ignore_eos=True, **more)


def cached_tokens(answer: requests.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
