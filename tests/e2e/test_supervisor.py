"""Level 4: the tracker and the supervisor disappear, hang, and come back, also at another address.

Meanwhile the model actors answer requests, and the replicas still use what they know about each
other's holdings. Afterwards hits return without intervention.
"""

import asyncio
import time
from collections.abc import Callable

import pytest
import xoscar

from examples.documents import document
from examples.processes import free_port
from tests.e2e.conftest import REPLICAS, SEPARATE_UID, can_fetch, wait_for_engine, wait_until
from tests.e2e.test_recovery import assert_shares, compute, members, question
from tests.harness import processes
from tests.harness.clusters import SeparateCluster
from xinference_xavier.client import XavierClient
from xinference_xavier.protocol.tracker import tracker_uid

pytestmark = pytest.mark.long

UID = SEPARATE_UID
FIRST, SECOND = REPLICAS
BLOCKED = 30.0  # seconds


@pytest.fixture
def model(separate_cluster: SeparateCluster) -> SeparateCluster:
    wait_for_engine(lambda: can_fetch(separate_cluster, UID, 2), "both replicas can fetch")
    return separate_cluster


def assert_mirrored_hit(cluster: SeparateCluster, seed: int, expected: tuple[str, ...]) -> None:
    """SECOND hits what FIRST computed before the outage, and both answer without the supervisor."""
    answer = cluster.ask(SECOND, question(seed))
    assert answer.tokens == expected
    assert answer.cached_tokens > 0
    assert cluster.ask(FIRST, question(seed)).tokens == expected


def mirrored(cluster: SeparateCluster, seed: int) -> tuple[str, ...]:
    """Have FIRST compute a document, and wait until SECOND knows: it fetches a later one."""
    cold = compute(cluster, FIRST, seed)
    assert_shares(cluster, FIRST, SECOND, seed + 1)
    return cold.tokens


def destroy_tracker(cluster: SeparateCluster) -> None:
    async def destroy() -> None:
        address = f"127.0.0.1:{cluster.control_port}"
        await xoscar.destroy_actor(await xoscar.actor_ref(address, tracker_uid(UID)))

    asyncio.run(destroy())


def test_a_tracker_that_was_destroyed_is_made_again(model: SeparateCluster) -> None:
    """At once, so there may be no time without one in which the old holdings count."""
    expected = mirrored(model, 500)
    before = set(members(model))
    destroy_tracker(model)
    assert model.ask(SECOND, question(500)).tokens == expected
    wait_until(lambda: can_fetch(model, UID, 2), "both have joined a new tracker")
    assert set(members(model)) == before
    assert_shares(model, SECOND, FIRST, 502)


def test_nobody_expires_while_the_supervisor_stands_still(model: SeparateCluster) -> None:
    """The control process is suspended for three leases. The tracker forgives its own pause."""
    expected = mirrored(model, 510)
    before = members(model)
    logged = model.log.stat().st_size
    with processes.frozen([model.control_process]):
        asleep = time.monotonic()
        assert_mirrored_hit(model, 510, expected)
        while time.monotonic() - asleep < BLOCKED:
            assert model.ask(FIRST, question(511)).cached_tokens > 0
            time.sleep(1.0)
    wait_until(lambda: can_fetch(model, UID, 2), "the tracker answers")
    assert set(members(model)) == set(before)
    with model.log.open() as log:
        log.seek(logged)
        assert "lease expired" not in log.read()
    assert_shares(model, SECOND, FIRST, 512)


@pytest.mark.parametrize("port", ["same", "other"])
def test_a_supervisor_that_died_is_found_again(
    model: SeparateCluster, port: str, record_property: Callable[[str, object], None]
) -> None:
    """It is killed and started again, at the same control address or another one. All replicas find
    the new tracker through their worker, publish again and share."""
    seed = 520 if port == "same" else 530
    expected = mirrored(model, seed)
    before = set(members(model))
    model.kill_supervisor()
    assert_mirrored_hit(model, seed, expected)
    model.start_supervisor(model.control_port if port == "same" else free_port("127.0.0.1"))
    back = time.monotonic()
    assert model.ask(FIRST, question(seed)).tokens == expected
    wait_for_engine(lambda: can_fetch(model, UID, 2), "both have joined the new tracker")
    assert set(members(model)) == before
    assert_shares(model, SECOND, FIRST, seed + 2)
    record_property("seconds until there are hits again", time.monotonic() - back)
    assert model.complete(UID, question(seed)).tokens == expected  # REST works again


@pytest.mark.parametrize("lost", ["tracker", "supervisor"])
def test_names_survive_the_loss_of(model: SeparateCluster, lost: str) -> None:
    """With the supervisor goes the process that keeps them. What is lost afterwards is computed
    again."""
    with XavierClient(model.endpoint) as client:
        client.add_prefix(UID, lost, document(540, 40), retention="hard", copies="all")
        wait_until(lambda: client.prefix(UID, lost).state == "kept", "it is kept")
        before = client.prefix(UID, lost)
    if lost == "tracker":
        destroy_tracker(model)
    else:
        model.kill_supervisor()
        model.start_supervisor(model.control_port)
    wait_for_engine(lambda: can_fetch(model, UID, 2), "both have joined the new tracker")
    with XavierClient(model.endpoint) as client:
        wait_for_engine(lambda: client.prefix(UID, lost).state == "kept", "it is kept")
        found = client.prefix(UID, lost)
        assert (found.created, found.tokens) == (before.created, before.tokens)
        assert {copy.firm for copy in found.replicas.values()} == {True}
        client.flush(UID)
        wait_until(lambda: client.prefix(UID, lost).state != "kept", "it is lost")
        wait_for_engine(lambda: client.prefix(UID, lost).state == "kept", "it is computed again")
        client.remove_prefix(UID, lost)
