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
from tests.e2e.model import Model, wait_for_engine, wait_until
from tests.e2e.test_recovery import short_question
from tests.harness import processes
from tests.harness.clusters import SeparateCluster
from xinference_xavier.client import XavierClient
from xinference_xavier.protocol.tracker import tracker_uid

pytestmark = pytest.mark.long

BLOCKED = 30.0  # seconds


def assert_mirrored_hit(model: Model, seed: int, expected: tuple[str, ...]) -> None:
    """The second hits what the first computed before the outage, and both answer without the
    supervisor."""
    answer = model.answer(model.second, short_question(seed))
    assert answer.tokens == expected
    assert answer.cached_tokens > 0
    assert model.answer(model.first, short_question(seed)).tokens == expected


def mirrored(model: Model, seed: int) -> tuple[str, ...]:
    """Have the first compute a document, and wait until the second knows: it fetches a later
    one."""
    cold = model.compute(model.first, short_question(seed))
    model.share(model.first, model.second, short_question(seed + 1))
    return cold.tokens


def destroy_tracker(cluster: SeparateCluster) -> None:
    async def destroy() -> None:
        address = f"127.0.0.1:{cluster.control_port}"
        await xoscar.destroy_actor(await xoscar.actor_ref(address, tracker_uid("separate")))

    asyncio.run(destroy())


def test_a_tracker_that_was_destroyed_is_made_again(
    separate: Model, separate_cluster: SeparateCluster
) -> None:
    """At once, so there may be no time without one in which the old holdings count."""
    expected = mirrored(separate, 500)
    before = separate.incarnations()
    destroy_tracker(separate_cluster)
    assert separate.answer(separate.second, short_question(500)).tokens == expected
    wait_until(separate.is_sharing, "both have joined a new tracker")
    assert separate.incarnations() == before
    separate.share(separate.second, separate.first, short_question(502))


def test_nobody_expires_while_the_supervisor_stands_still(
    separate: Model, separate_cluster: SeparateCluster
) -> None:
    """The control process is suspended for three leases. The tracker forgives its own pause."""
    expected = mirrored(separate, 510)
    before = separate.incarnations()
    logged = separate_cluster.log.stat().st_size
    with processes.frozen([separate_cluster.control_process]):
        asleep = time.monotonic()
        assert_mirrored_hit(separate, 510, expected)
        while time.monotonic() - asleep < BLOCKED:
            assert separate.answer(separate.first, short_question(511)).cached_tokens > 0
            time.sleep(1.0)
    wait_until(separate.is_sharing, "the tracker answers")
    assert separate.incarnations() == before
    with separate_cluster.log.open() as log:
        log.seek(logged)
        assert "lease expired" not in log.read()
    separate.share(separate.second, separate.first, short_question(512))


@pytest.mark.parametrize("port", ["same", "other"])
def test_a_supervisor_that_died_is_found_again(
    separate: Model,
    separate_cluster: SeparateCluster,
    port: str,
    record_property: Callable[[str, object], None],
) -> None:
    """It is killed and started again, at the same control address or another one. All replicas find
    the new tracker through their worker, publish again and share."""
    cluster, seed = separate_cluster, 520 if port == "same" else 530
    expected = mirrored(separate, seed)
    before = separate.incarnations()
    cluster.kill_supervisor()
    assert_mirrored_hit(separate, seed, expected)
    cluster.start_supervisor(cluster.control_port if port == "same" else free_port("127.0.0.1"))
    back = time.monotonic()
    assert separate.answer(separate.first, short_question(seed)).tokens == expected
    separate.wait_until_sharing()  # both have joined the new tracker
    assert separate.incarnations() == before
    separate.share(separate.first, separate.second, short_question(seed + 2))
    record_property("seconds until there are hits again", time.monotonic() - back)
    assert separate.complete(short_question(seed)).tokens == expected  # REST works again


@pytest.mark.parametrize("lost", ["tracker", "supervisor"])
def test_names_survive_the_loss_of(
    separate: Model, separate_cluster: SeparateCluster, lost: str
) -> None:
    """With the supervisor goes the process that keeps them. What is lost afterwards is computed
    again."""
    with XavierClient(separate.endpoint) as client:
        client.add_prefix(separate.uid, lost, document(540, 40), retention="hard", copies="all")
        wait_until(lambda: client.prefix(separate.uid, lost).state == "kept", "it is kept")
        before = client.prefix(separate.uid, lost)
    if lost == "tracker":
        destroy_tracker(separate_cluster)
    else:
        separate_cluster.kill_supervisor()
        separate_cluster.start_supervisor(separate_cluster.control_port)
    separate.wait_until_sharing()  # both have joined the new tracker
    with XavierClient(separate.endpoint) as client:
        wait_for_engine(lambda: client.prefix(separate.uid, lost).state == "kept", "it is kept")
        found = client.prefix(separate.uid, lost)
        assert (found.created, found.tokens) == (before.created, before.tokens)
        assert {copy.firm for copy in found.replicas.values()} == {True}
        client.flush(separate.uid)
        wait_until(lambda: client.prefix(separate.uid, lost).state != "kept", "it is lost")
        wait_for_engine(
            lambda: client.prefix(separate.uid, lost).state == "kept", "it is computed again"
        )
        client.remove_prefix(separate.uid, lost)
