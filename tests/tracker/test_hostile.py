"""A tracker and its replicas refuse each other's malformed messages; a tracker refuses and counts
excess. Other replicas do not notice."""

import asyncio
import re
from typing import Any

import pytest
import xoscar as xo

from tests.tracker_pools import NAMESPACE as NS
from tests.tracker_pools import join, look, wait_for_update
from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol import tracker as checks_module
from xinference_xavier.protocol.load import Load, RequestReport, Serving
from xinference_xavier.protocol.tracker import (
    Change,
    Member,
    Outcome,
    Settings,
    TrackerFullError,
    Update,
)
from xinference_xavier.tracker import log as membership_module
from xinference_xavier.tracker import namespaces as namespaces_module

A, B = Member("a", "127.0.0.1:1"), Member("b", "127.0.0.1:1")
OWN = Member("own", "127.0.0.1:1")
KEY, OTHER = b"key1", b"key2"
UPDATE = Update(
    1, "epoch", False, Settings(1, True), 4, (OWN, A), (Change("a", 1, KEY, b"", False),)
)
NEXT = UPDATE._replace(revision=2, changes=(Change("a", 2, OTHER, KEY, False),))
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)
PROMPT = RequestReport("r", 100, b"k" * 12)


def with_change(**fields: Any) -> Update:
    return NEXT._replace(changes=(NEXT.changes[0], NEXT.changes[0]._replace(**fields)))


@pytest.mark.parametrize(
    "update",
    [
        None,
        tuple(NEXT)[:-2],
        NEXT._replace(revision=-1),
        NEXT._replace(revision="2"),  # type: ignore[arg-type]
        NEXT._replace(epoch=None),  # type: ignore[arg-type]
        NEXT._replace(settings=None),  # type: ignore[arg-type]
        NEXT._replace(settings=Settings(2, 0)),  # type: ignore[arg-type]
        NEXT._replace(key_bytes=0),
        NEXT._replace(key_bytes=2000),
        NEXT._replace(members=[OWN]),  # type: ignore[arg-type]
        NEXT._replace(members=None),  # type: ignore[arg-type]
        NEXT._replace(members=(OWN, Member("a", "nowhere"))),
        NEXT._replace(members=(OWN, Member([], "h:1"))),  # type: ignore[arg-type]
        NEXT._replace(members=(OWN, A._replace(serves=1))),  # type: ignore[arg-type]
        NEXT._replace(left=("a", 1)),  # type: ignore[arg-type]
        NEXT._replace(changes=None),  # type: ignore[arg-type]
        NEXT._replace(changes=(NEXT.changes[0], None)),  # type: ignore[arg-type]
        with_change(incarnation=[]),
        with_change(sequence=-1),
        with_change(sequence="3"),
        with_change(added=[KEY]),
        with_change(added=b"12345"),
        with_change(removed=b"1"),
        with_change(removed=None),
    ],
)
def test_a_mirror_takes_over_all_of_an_update_or_nothing(update: Any) -> None:
    """Half an update would be believed from then on."""
    mirror = Mirror("own")
    mirror.apply(UPDATE)
    with pytest.raises(ValueError, match=r".+"):
        mirror.apply(update)
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == (("a",), ())
    assert (mirror.peers, mirror.address("a")) == ({"a"}, A.address)
    assert (mirror.revision, mirror.settings) == (1, Settings(1, True))
    mirror.apply(NEXT)
    assert (mirror.holders(KEY), mirror.holders(OTHER)) == ((), ("a",))


BAD_NAMES: list[Any] = ["", "x" * 257, None, 7, [], {}]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: f"{name!r:.9}")
async def test_names_are_checked_in_every_call(tracker: Any, name: Any) -> None:
    await join(tracker, A)
    for namespace, incarnation in ((name, "a"), (NS, name)):
        for call in (
            tracker.join(namespace, Member(incarnation, A.address), 4, Settings()),
            tracker.heartbeat(namespace, incarnation, {}),
            tracker.publish(namespace, incarnation, 1, KEY, b""),
            tracker.replace(namespace, incarnation, 1, KEY),
            tracker.watch(namespace, incarnation, "", 0, 0.0),
            tracker.set_serving(namespace, incarnation, True),
            tracker.claim(namespace, incarnation, KEY, 1.0),
            tracker.release(namespace, incarnation, KEY),
            tracker.report_load(namespace, incarnation, LOAD),
            tracker.leave(namespace, incarnation),
        ):
            with pytest.raises(ValueError, match=r"(namespace|incarnation)="):
                await call
    for call in (tracker.report_startup_error(name, "cause"), tracker.pop_startup_error(name)):
        with pytest.raises(ValueError, match="is not a text of"):
            await call
    assert await tracker.publish(NS, "a", 1, KEY, b"") is Outcome.APPLIED


@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        ("join", (NS, None, 4, Settings()), "malformed member"),
        ("join", (NS, "ab", 4, Settings()), "malformed member"),
        ("join", (NS, ("a",), 4, Settings()), "malformed member"),
        ("join", (NS, ("a", "h:1", 1), 4, Settings()), "malformed member"),
        ("join", (NS, Member("a", 5), 4, Settings()), "address=5"),  # type: ignore[arg-type]
        ("join", (NS, Member("a", "nowhere"), 4, Settings()), "address"),
        ("join", (NS, Member("a", "h:"), 4, Settings()), "address"),
        ("join", (NS, Member("a", "h:x"), 4, Settings()), "address"),
        ("join", (NS, Member("a", "h:99999"), 4, Settings()), "address"),
        ("join", (NS, Member("a", "unixsocket:///1"), 4, Settings()), "address"),
        ("join", (NS, A, 0, Settings()), "key_bytes=0"),
        ("join", (NS, A, 5, Settings()), "keys of 5 bytes among keys of 4 bytes"),
        ("join", (NS, A, 4, None), "malformed settings"),
        ("join", (NS, A, 4, Settings(-1, True)), "malformed settings: version=-1"),
        ("join", (NS, A, 4, Settings(1, 2)), "enabled=2"),  # type: ignore[arg-type]
        ("join", (NS, A, 4, Settings(), "", 99), "run the same version of xinference-xavier"),
        ("publish", (NS, "b", 0, KEY, b""), "sequence=0"),
        ("publish", (NS, "b", True, KEY, b""), "sequence=True"),
        ("publish", (NS, "b", 1, [KEY], b""), "added is list"),
        ("publish", (NS, "b", 1, b"", None), "removed is NoneType"),
        ("publish", (NS, "b", 1, b"", b"123"), "not a multiple of key length 4"),
        ("replace", (NS, "b", 1, bytearray(4)), "keys is bytearray"),
        ("replace", (NS, "b", 1, b"123"), "not a multiple of key length 4"),
        ("claim", (NS, "b", [KEY], 1.0), "keys is list"),
        ("claim", (NS, "b", b"123", 1.0), "not a multiple of key length 4"),
        ("claim", (NS, "b", KEY, float("nan")), "seconds=nan"),
        ("claim", (NS, "b", KEY, 601.0), "seconds=601"),
        ("release", (NS, "b", None), "keys is NoneType"),
        ("release", (NS, "b", b"123"), "not a multiple of key length 4"),
        ("watch", (NS, "b", "", -1, 1.0), "revision=-1"),
        ("watch", (NS, "b", "", 0, float("nan")), "timeout=nan"),
        ("watch", (NS, "b", "", 0, float("inf")), "timeout=inf"),
        ("watch", (NS, "b", "", 0, "1"), "timeout='1'"),
        ("observe", ("", -1, 0, 0.0), "revision=-1"),
        ("observe", ("", "0", 0, 0.0), "revision='0'"),
        ("observe", ("", 0, -1, 0.0), "version=-1"),
        ("observe", ("", 0, None, 0.0), "version=None"),
        ("observe", ("", 0, 1 << 63, 0.0), "version="),
        ("observe", ("", 0, 0, float("inf")), "timeout=inf"),
        ("observe", ("", 0, 0, "1"), "timeout='1'"),
        ("set_serving", (NS, "b", 1), "serves=1 is neither True nor False"),
        ("heartbeat", (NS, "b", []), "stats is list"),
        ("heartbeat", (NS, "b", {"x": b""}), "cannot be written as JSON"),
        ("heartbeat", (NS, "b", {"x": "x" * 70_000}), "more than 65536"),
        ("set_enabled", ("false",), "enabled='false'"),
        *(
            ("set_enabled", (False, wrong), "is not a time from 0 to 3600 s")
            for wrong in (-1.0, 3601, float("nan"), "60")
        ),
        ("report_startup_error", ("r", None), "cause=None is not text"),
        *(
            ("set_routing", (wrong,), "is not one of auto, backlog, off")
            for wrong in ("fast", "", None, "OFF", ["off"], {}, 1)
        ),
    ],
)
async def test_malformed_input_is_refused(
    tracker: Any, method: str, arguments: tuple[Any, ...], complaint: str
) -> None:
    await join(tracker, B)
    before, events = await look(tracker, "b"), await tracker.wait_events(0, 0.0)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        await getattr(tracker, method)(*arguments)
    assert await look(tracker, "b") == before
    assert await tracker.wait_events(0, 0.0) == events
    assert (await tracker.status())["watches"] == 0


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


@pytest.mark.parametrize("timeout", [-(10**4000), 10**4000], ids=["low", "high"])
async def test_nobody_waits_longer_than_the_tracker_allows(tracker: Any, timeout: int) -> None:
    """Here both calls return at once."""
    await join(tracker, A)
    assert (await tracker.watch(NS, "a", "", 0, timeout)).members == (A,)
    assert (await tracker.observe([], 0, 0, timeout)).complete


async def test_a_publication_is_bounded(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "MAX_PACKED_BYTES", 8)
    await join(tracker, A)
    with pytest.raises(ValueError, match="has 12 bytes, more than 8"):
        await tracker.publish(NS, "a", 1, KEY + OTHER + KEY, b"")
    assert await tracker.replace(NS, "a", 1, KEY + OTHER) is Outcome.APPLIED


async def test_calls_beyond_a_limit_are_refused_and_counted(
    tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits apply to watches, members and startup errors; earlier ones stay."""
    monkeypatch.setattr(namespaces_module, "MAX_WATCHES", 1)
    monkeypatch.setattr(namespaces_module, "MAX_MEMBERS", 2)
    monkeypatch.setattr(membership_module, "MAX_STARTUP_ERRORS", 2)
    await join(tracker, A, B)
    waiting = await wait_for_update(tracker, "a")
    with pytest.raises(TrackerFullError, match="1 watches of this model are open"):
        await look(tracker, "a")
    with pytest.raises(TrackerFullError, match="replica 'c' exceeds the 2 of model"):
        await join(tracker, Member("c", "h:1"))
    for replica in ("one", "two", "three"):
        await tracker.report_startup_error(replica, "cause")
    await tracker.report_startup_error("one", "a consequence")
    assert (await tracker.status())["refused"] == 3
    assert await tracker.pop_startup_error("one") == "cause"
    assert await tracker.pop_startup_error("three") is None
    await tracker.publish(NS, "b", 1, KEY, b"")
    assert (await waiting).changes == (Change("b", 1, KEY, b"", False),)
    assert (await tracker.status())["watches"] == 0, "its place is free again"


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
    assert (await other.join(NS, A, 4, Settings())).sequence == 0
    assert await other.publish(NS, "a", 1, KEY, b"") is Outcome.APPLIED
    for writer in connections:
        writer.close()
