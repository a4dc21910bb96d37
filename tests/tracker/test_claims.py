"""The first of several replicas that want a prefix computes it; the others learn how much."""

from typing import Any

import pytest

from tests.harness.comparisons import report
from tests.tracker_pools import MODEL, join
from tests.tracker_pools import NAMESPACE as NS
from xinference_xavier.protocol.tracker import Member, NotMemberError
from xinference_xavier.tracker import claims as claims_module
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.claims import Claims

ONE = [b"a", b"b", b"c"]
LONGER = [*ONE, b"d"]
BRANCH = [b"a", b"b", b"x", b"y"]


@pytest.fixture
def claims() -> Claims:
    claims = Claims()
    assert claims.claim("first", ONE, now=0.0, seconds=10.0) == 0
    return claims


def test_the_first_to_ask_computes_and_may_ask_again(claims: Claims) -> None:
    assert claims.claim("first", ONE, 1.0, 10.0) == 0


def test_others_learn_how_many_chunks_it_computes(claims: Claims) -> None:
    assert claims.claim("second", ONE, 1.0, 10.0) == 3
    assert claims.claim("second", LONGER, 1.0, 10.0) == 3
    assert claims.claim("second", BRANCH, 1.0, 10.0) == 2
    assert claims.claim("second", ONE[:1], 1.0, 10.0) == 1


def test_a_replica_that_may_wait_claims_nothing(claims: Claims) -> None:
    claims.claim("second", LONGER, 1.0, 10.0)
    assert claims.claim("third", [b"d"], 1.0, 10.0) == 0


def test_chunks_before_a_claimed_one_count_as_claimed(claims: Claims) -> None:
    """The first chunks were published a moment ago, and the second replica does not know yet."""
    claims.release("first", ONE[:2])
    assert claims.claim("second", ONE, 1.0, 10.0) == 3


def test_a_replica_releases_only_its_own_claims(claims: Claims) -> None:
    claims.release("second", ONE)
    claims.forget("second")
    assert claims.claim("second", ONE, 1.0, 10.0) == 3


def test_beyond_the_limit_everybody_computes(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "MAX_CLAIMED", 4)
    assert claims.claim("second", [b"x", b"y"], 1.0, 10.0) == 0
    assert claims.claim("third", [b"x", b"y"], 1.0, 10.0) == 0
    assert len(claims) == 3


def test_expired_claims_make_room(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "MAX_CLAIMED", 4)
    claims.claim("second", [b"x", b"y"], 10.0, 10.0)
    assert len(claims) == 2


MEMBERS = [Member(name, "127.0.0.1:1") for name in ("first", "second", "third")]
KEYS = b"key 00000001key 00000002"


@pytest.mark.parametrize("end", ["published", "replaced", "released", "left", "expired"])
async def test_a_claim_ends(end: str) -> None:
    now = 100.0
    tracker = BlockTracker(MODEL, clock=lambda: now)
    await join(tracker, *MEMBERS)
    for member in MEMBERS:
        await tracker.compare(NS, member.incarnation, report(short=1.0))
    assert await tracker.claim(NS, "first", KEYS, 5.0) == 0
    assert await tracker.claim(NS, "second", KEYS, 5.0) == 2
    match end:
        case "published":
            await tracker.publish(NS, "first", 1, KEYS, b"")
        case "replaced":
            await tracker.publish(NS, "first", 1, KEYS, b"", True)
        case "released":
            await tracker.release(NS, "first", KEYS)
        case "left":
            await tracker.leave(NS, "first")
        case "expired":
            now += 5.0
    assert await tracker.claim(NS, "second", KEYS, 5.0) == 0
    assert await tracker.claim(NS, "third", KEYS, 5.0) == 2


async def test_only_members_claim(tracker: Any) -> None:
    await join(tracker, MEMBERS[0])
    with pytest.raises(NotMemberError, match="'second' is not a member"):
        await tracker.claim(NS, "second", KEYS, 60.0)
    await tracker.release(NS, "second", KEYS)
    await tracker.release("elsewhere", "second", KEYS)
