"""The links that two transfer actors make: by which transport, with whom, and for how long."""

import threading
import time
from typing import NoReturn

import numpy as np
import pytest

from tests.transfer.sides import NOBODY, PATIENCE, Side, Sides
from xinference_xavier.errors import LinkError
from xinference_xavier.protocol.transfer import PullResult
from xinference_xavier.transfer.__main__ import load_transport
from xinference_xavier.transfer.transports.base import Acceptance, Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport
from xinference_xavier.transfer.transports.shared_memory import SharedMemoryTransport


async def test_only_kept_peers_have_links(sides: Sides, consumer: Side, donor: Side) -> None:
    other = await sides.start("other")
    await consumer.pull(donor, [0])
    await other.pull(donor, [0])
    await consumer.actor.close_links_except(frozenset({"other"}))
    await donor.actor.close_links_except(frozenset({"other"}))
    assert (await consumer.links(), await donor.links(), await other.links()) == (0, 1, 1)
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


class Elsewhere(SharedMemoryTransport):
    """A donor that wrongly claims to be on our host, like a machine restored from the same
    snapshot: nothing listens on the socket that it names."""

    def accept(self, hello: bytes, deadline: float) -> Acceptance:  # type: ignore[override]
        acceptance = super().accept(hello, deadline)
        acceptance.answer = b"elsewhere " + acceptance.answer[:6]
        return acceptance


class Silent(SharedMemoryTransport):
    """A donor that accepts the connection and sends no descriptor."""

    def accept(self, hello: bytes, deadline: float) -> Acceptance:  # type: ignore[override]
        acceptance = super().accept(hello, deadline)
        acceptance.complete = self._say_nothing  # type: ignore[method-assign]
        return acceptance

    def _say_nothing(self, deadline: float) -> NoReturn:
        threading.Event().wait(deadline - time.monotonic())
        raise LinkError("nothing was sent")


AUTO = (SharedMemoryTransport, GlooTransport)


class TestAuto:
    """Shared memory where it works, Gloo where it does not, in the same fetch."""

    @pytest.mark.parametrize(
        ("says", "transport"),
        [
            ({}, "shared_memory"),
            ({"host": None}, "gloo"),
            ({"host": "another-boot 1 0"}, "gloo"),
        ],
    )
    async def test_donors_of_this_host_are_linked_by_shared_memory_others_by_gloo(
        self, sides: Sides, says: dict[str, str | None], transport: str
    ) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        endpoint = donor.endpoint._replace(**says)
        order = consumer.order(donor, [1], endpoint=endpoint)
        assert await consumer.actor.pull(order) == PullResult(1, None, transport)
        stats = await consumer.actor.stats()
        assert (stats["transport"], stats["fallbacks"]) == (transport, 0)

    @pytest.mark.parametrize("near", [Elsewhere, Silent])
    async def test_a_donor_whose_memory_cannot_be_mapped_is_linked_by_gloo_at_once_and_later(
        self, sides: Sides, near: type[Transport]
    ) -> None:
        consumer = await sides.start("consumer", *AUTO)
        donor = await sides.start("donor", near, GlooTransport)
        for slot in range(2):
            order = consumer.order(donor, [slot], timeout=4.0)
            assert await consumer.actor.pull(order) == PullResult(1, None, "gloo")
            await donor.actor.close_links_except(NOBODY)  # the next fetch opens another link
        stats = await consumer.actor.stats()
        assert (stats["linked_to"], stats["fallbacks"]) == ({"donor": "gloo"}, 1)
        assert np.array_equal(consumer.rows[:2], donor.rows[:2])

    async def test_of_several_transports_the_best_that_works_is_used(self, sides: Sides) -> None:
        """A donor without RDMA refuses it; one with it is read by it."""
        three = (SharedMemoryTransport, NixlTransport, GlooTransport)
        consumer = await sides.start("consumer", *three)
        with_it = await sides.start("with", *three[1:])
        without = await sides.start("without", GlooTransport)
        for donor, transport in ((with_it, "nixl"), (without, "gloo")):
            result = await consumer.actor.pull(consumer.order(donor, [1]))
            assert result == PullResult(1, None, transport)
        stats = await consumer.actor.stats()
        refusal = "the donor offers gloo, not 'nixl'"
        assert stats["obstacles"] == {
            "with": {"shared_memory": "memory not shared"},
            "without": {"shared_memory": "memory not shared", "nixl": refusal},
        }
        assert stats["fallbacks"] == 1

    async def test_a_probe_opens_a_link(self, sides: Sides) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        assert await consumer.actor.probe_link("donor", donor.endpoint, PATIENCE) is None
        assert (await consumer.actor.stats())["linked_to"] == {"donor": "shared_memory"}


@pytest.mark.parametrize(
    ("says", "reason"), [(None, "memory not shared"), ("another-boot 1 0", "other machine")]
)
async def test_a_consumer_that_requires_shared_memory_learns_why_it_is_impossible(
    sides: Sides, says: str | None, reason: str
) -> None:
    consumer = await sides.start("consumer", SharedMemoryTransport)
    donor = await sides.start("donor", *AUTO)
    endpoint = donor.endpoint._replace(host=says)
    assert await consumer.pull(donor, [1], endpoint=endpoint) == PullResult(0, reason)
    told = await consumer.actor.probe_link("donor", endpoint, PATIENCE)
    assert told == f"no link by shared_memory: {reason}"
    assert (await consumer.pull(donor, [1])).verified == 1


def test_a_transport_is_found_by_its_path() -> None:
    assert (
        load_transport("xinference_xavier.transfer.transports.gloo:GlooTransport") is GlooTransport
    )
    for wrong in ("xinference_xavier.transfer.transports.gloo:GlooLink", "json:dumps"):
        with pytest.raises(TypeError, match="is not a Transport"):
            load_transport(wrong)
