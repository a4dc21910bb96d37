"""A tracker's status as a report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.stats.report import report
from xinference_xavier.tracker.actor import BlockTracker

RAISES = "json:loads"
"""This hook raises at every event, because none is JSON text."""


@pytest.fixture
async def tracker() -> AsyncIterator[Any]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        yield await xo.create_actor(
            BlockTracker, "m", max_keys=1, hooks=RAISES, address=pool.external_address, uid="t"
        )


async def test_what_a_tracker_drops_and_loses_is_reported(tracker: Any) -> None:
    await tracker.join("ns", Member("a", "127.0.0.1:1"), 2, Settings())
    await tracker.replace("ns", "a", 1, b"k1k2k3")

    async def hook_has_raised() -> dict[str, Any]:
        while True:
            reported = report(await tracker.status())
            if reported["tracker"]["hooks"]["failed"]:
                return reported

    async with asyncio.timeout(30):
        reported = await hook_has_raised()
    assert reported["tracker"] == {
        "dropped": 2,
        "refused": 0,
        "watches": 0,
        "hooks": {"failed": 1, "dropped": 0},
    }
    (replica,) = reported["replicas"]
    assert (replica["holdings"], reported["totals"]["holdings"]) == (1, 1)


def entry(name: str, **stats: Any) -> dict[str, Any]:
    return {"incarnation": f"i{name}", "replica": name, "holdings": 2, "stats": stats}


def test_replicas_of_all_namespaces_in_the_order_of_their_names() -> None:
    groups = {"n": [entry("m-10"), entry("m-2")], "o": [entry("m-3")]}
    namespaces = {name: {"replicas": members} for name, members in groups.items()}
    reported = report({"model_uid": "m", "enabled": True, "namespaces": namespaces})
    assert [(each["replica"], each["namespace"]) for each in reported["replicas"]] == [
        ("m-2", "n"),
        ("m-3", "o"),
        ("m-10", "n"),
    ]


def test_a_peer_breaks_neither_the_sums_nor_the_page() -> None:
    """Its report has the schema's shape, whatever it sent."""
    broken = entry("m-0", hits="many", fetches=[1], pool=None, requests=-5, colour="red")
    good = entry("m-1", hits={"remote": 3}, requests=2)
    namespaces = {"n": {"replicas": [broken, good]}}
    reported = report({"model_uid": "m", "enabled": True, "namespaces": namespaces})
    first = reported["replicas"][0]
    assert first["hits"] == {"prefix_cache": 0, "local_pool": 0, "remote": 0, "computed": 0}
    assert (first["fetches"]["rolled_back"], first["pool"]["rows"]) == ({}, 0)
    assert first["colour"] == "red", "a newer replica's field"
    assert (reported["totals"]["hits"]["remote"], reported["totals"]["requests"]) == (3, 2)
