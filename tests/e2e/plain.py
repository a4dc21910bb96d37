"""vLLM's API servers without xinference, and what their tracker knows."""

import asyncio
from typing import Any

import xoscar

from tests.e2e.model import wait_until
from xinference_xavier.protocol.tracker import tracker_uid

HOST = "127.0.0.1"
UID = "plain"
ARGUMENTS = (
    *("--block-size", "128", "--dtype", "float32"),
    *("--enforce-eager", "--max-model-len", "4096"),
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def replicas(tracker: str) -> list[dict[str, Any]]:
    """What the tracker knows of each."""

    async def ask() -> Any:
        return await (await xoscar.actor_ref(address=tracker, uid=tracker_uid(UID))).status()

    groups = asyncio.run(ask())["namespaces"].values()
    return [replica for group in groups for replica in group["replicas"]]


def serve(tracker: str) -> bool:
    return [replica["serves"] for replica in replicas(tracker)] == [True, True]


def wait_until_compared(tracker: str) -> None:
    """They compare themselves before anybody asks them anything."""

    def compared() -> bool:
        counts = [replica["stats"]["comparison"]["compared"] for replica in replicas(tracker)]
        return counts == [1, 1]

    wait_until(compared, "they are compared")
