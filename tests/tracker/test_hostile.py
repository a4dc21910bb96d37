"""A tracker refuses a replica's malformed reports, and counts excess; other replicas do not
notice."""

import asyncio
import re
from typing import Any

import pytest
import xoscar as xo

from tests.harness.comparisons import all_holders, compared, compared_index
from tests.tracker_pools import NAMESPACE as NS
from tests.tracker_pools import join, look
from xinference_xavier.protocol import tracker as checks_module
from xinference_xavier.protocol.load import Load, RequestReport, Serving
from xinference_xavier.protocol.tracker import (
    Change,
    Member,
    Outcome,
    Settings,
    Update,
)

A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")
KEY, OTHER = b"key 00000001", b"key 00000002"
UPDATE = Update(1, "epoch", False, (Settings(1), compared("a"), Change("a", 1, KEY)))
NEXT = Update(2, "epoch", False, (Settings(2, enabled=False), Change("a", 2, OTHER, KEY)))
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)
PROMPT = RequestReport("r", 100, b"k" * 12)


def with_change(**fields: Any) -> Update:
    return NEXT._replace(news=(*NEXT.news, Change("a", 3, OTHER)._replace(**fields)))


@pytest.mark.parametrize(
    "update",
    [with_change(added=b"12345"), with_change(removed=b"1"), with_change(removed=None)],
    ids=["added", "removed", "nothing"],
)
def test_an_index_takes_over_all_of_an_update_or_nothing(update: Any) -> None:
    """Half an update would be believed from then on."""
    index = compared_index()
    index.apply(UPDATE)
    with pytest.raises(ValueError, match=r".+"):
        index.apply(update)
    assert (all_holders(index, KEY), all_holders(index, OTHER)) == (("a",), ())
    assert (index.revision, index.members.settings) == (1, Settings(1))
    index.apply(NEXT)
    assert (all_holders(index, KEY), all_holders(index, OTHER)) == ((), ("a",))
    assert (index.revision, index.members.enabled) == (2, False)


@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        ("join", (NS, A, Settings(), "", 99), "run the same version of xinference-xavier"),
        ("publish", (NS, "b", 1, [KEY], b""), "added is list"),
        ("publish", (NS, "b", 1, b"", b"123"), "not a multiple of key length 12"),
        ("publish", (NS, "b", 1, b"123", b"", True), "not a multiple of key length 12"),
        ("claim", (NS, "b", b"123", 1.0), "not a multiple of key length 12"),
        ("release", (NS, "b", b"123"), "not a multiple of key length 12"),
        ("heartbeat", (NS, "b", []), "stats is list"),
        ("heartbeat", (NS, "b", {"x": b""}), "cannot be written as JSON"),
        ("heartbeat", (NS, "b", {"x": "x" * 70_000}), "more than 65536"),
    ],
)
async def test_what_one_replica_sends_cannot_break_the_others(
    tracker: Any, method: str, arguments: tuple[Any, ...], complaint: str
) -> None:
    await join(tracker, B)
    before, events = await look(tracker, "b"), await tracker.events()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        await getattr(tracker, method)(*arguments)
    assert await look(tracker, "b") == before
    assert await tracker.events() == events


@pytest.mark.parametrize(
    ("load", "requests"),
    [
        (LOAD._replace(requests=-1), (PROMPT,)),
        (LOAD, (PROMPT, PROMPT._replace(keys=b"k"))),
    ],
    ids=["load", "request"],
)
async def test_a_report_of_load_is_taken_over_as_a_whole_or_not_at_all(
    tracker: Any, load: Load, requests: tuple[RequestReport, ...]
) -> None:
    """A router refuses all that a tracker says if one load is malformed."""
    await join(tracker, A)
    await tracker.report_load(NS, "a", LOAD, ())
    before = await tracker.observe("", 0, 0, 0.0)
    with pytest.raises(ValueError, match=r"malformed|not a multiple"):
        await tracker.report_load(NS, "a", load, requests)
    after = await tracker.observe("", 0, 0, 0.0)
    assert (after.version, after.requests) == (before.version, ())
    assert await tracker.report_load(NS, "a", LOAD, (PROMPT,))


async def test_a_publication_is_bounded(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PACKED_BYTES", 24)
    await join(tracker, A)
    with pytest.raises(ValueError, match="has 36 bytes, more than 24"):
        await tracker.publish(NS, "a", 1, KEY + OTHER + KEY, b"")
    assert await tracker.publish(NS, "a", 1, KEY + OTHER, b"", True) is Outcome.APPLIED


async def test_of_several_startup_errors_the_first_is_told_once(tracker: Any) -> None:
    """Others may be its consequences."""
    await tracker.report_startup_error("m-0", "cause")
    await tracker.report_startup_error("m-0", "a consequence")
    assert await tracker.pop_startup_error("m-0") == "cause"
    assert await tracker.pop_startup_error("m-0") is None


async def test_noise_on_its_port_does_not_disturb_replicas(tracker: Any) -> None:
    """Headers without a body, random bytes, nothing at all; all connections stay open."""
    host, _, port = tracker.address.rpartition(":")
    noise = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x01" + b"\xff" * 10, bytes(range(256)) * 40]
    connections = []
    for part in noise * 5:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(part)
        connections.append(writer)
    other = await xo.actor_ref(address=tracker.address, uid=tracker.uid)
    assert (await other.join(NS, A, Settings())).sequence == 0
    assert await other.publish(NS, "a", 1, KEY, b"") is Outcome.APPLIED
    for writer in connections:
        writer.close()
