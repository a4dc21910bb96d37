"""The links that two transfer actors make: by which transport, with whom, and for how long."""

import logging
import threading
import time
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.faults import _FaultyGloo
from tests.logged import messages
from tests.transfer.no_transport import NoTransport
from tests.transfer.sides import PATIENCE, Side, Sides
from xinference_xavier.errors import LinkError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.transfer import PullResult, Startup
from xinference_xavier.transfer import links
from xinference_xavier.transfer.__main__ import load_transport, usable
from xinference_xavier.transfer.transports.base import Acceptance, Transport
from xinference_xavier.transfer.transports.gloo import GlooTransport
from xinference_xavier.transfer.transports.nixl import NixlTransport


async def test_only_kept_peers_have_links(sides: Sides, consumer: Side, donor: Side) -> None:
    other = await sides.start("other")
    await consumer.pull(donor, [0])
    await other.pull(donor, [0])
    await consumer.actor.close_links_except(frozenset({"other"}))
    await donor.actor.close_links_except(frozenset({"other"}))
    assert (await consumer.links(), await donor.links(), await other.links()) == (0, 1, 1)
    assert (await consumer.pull(donor, [1]))[:2] == (1, None)


class Better(_FaultyGloo):
    name = "better"


class Refusing(Better):
    """A donor that does not use it on its host."""

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        raise LinkError("no such device")


class Silent(Better):
    """A donor that never comes to its half of the link."""

    def accept(self, hello: bytes, deadline: float) -> Acceptance:
        acceptance: Any = super().accept(hello, deadline)
        acceptance.complete = self._say_nothing
        return acceptance  # type: ignore[no-any-return]

    def _say_nothing(self, deadline: float) -> NoReturn:
        threading.Event().wait(deadline - time.monotonic())
        raise LinkError("nothing was sent")


AUTO = (Better, GlooTransport)


class TestSeveralTransports:
    """The best one that makes a link is used, in the same fetch."""

    @pytest.mark.parametrize("better", [Refusing, Silent])
    async def test_a_donor_that_the_better_one_does_not_reach_is_linked_by_the_other(
        self, sides: Sides, better: type[Transport]
    ) -> None:
        consumer = await sides.start("consumer", *AUTO)
        donor = await sides.start("donor", better, GlooTransport)
        result = await consumer.actor.pull(consumer.order(donor, [1], timeout=4.0))
        assert result[:3] == (1, None, "gloo")
        stats = await consumer.actor.stats()
        assert (stats["linked_to"], stats["transport"]) == ({"donor": "gloo"}, "gloo")
        assert [*stats["obstacles"]["donor"]] == ["best", "better"]
        assert np.array_equal(consumer.rows[1], donor.rows[1])

    async def test_a_donor_refuses_what_it_does_not_have(self, sides: Sides) -> None:
        consumer = await sides.start("consumer", NixlTransport, GlooTransport)
        with_it = await sides.start("with", NixlTransport, GlooTransport)
        without = await sides.start("without", GlooTransport)
        assert await consumer.actor.pull(consumer.order(with_it, [1])) == PullResult(
            1, None, "nixl"
        )
        refusal = "the donor offers gloo, not 'nixl'"
        result = await consumer.actor.pull(consumer.order(without, [1]))
        assert result == PullResult(1, None, "gloo")
        assert refusal in (await consumer.actor.stats())["obstacles"]["without"]["nixl"]

    @pytest.mark.parametrize(("retry_after", "then"), [(600.0, "gloo"), (0.0, "better")])
    async def test_a_better_transport_that_failed_is_tried_again_after_a_while(
        self, sides: Sides, monkeypatch: pytest.MonkeyPatch, retry_after: float, then: str
    ) -> None:
        monkeypatch.setattr(links, "RETRY_AFTER", retry_after)
        consumer = await sides.start("consumer", *AUTO)
        donor = await sides.start("donor", Refusing, GlooTransport)
        order = consumer.order(donor, [1])
        assert (await consumer.actor.pull(order)).transport == "gloo"
        monkeypatch.setattr(Refusing, "accept", Better.accept)
        assert (await consumer.actor.pull(order)).transport == then
        assert await consumer.links() == 1

    async def test_a_trial_opens_a_link(self, sides: Sides) -> None:
        consumer, donor = [await sides.start(name, *AUTO) for name in ("consumer", "donor")]
        assert await consumer.actor.try_link("donor", donor.endpoint, PATIENCE) is None
        assert (await consumer.actor.stats())["linked_to"] == {"donor": "better"}


def test_a_transport_is_found_by_its_path() -> None:
    assert (
        load_transport("xinference_xavier.transfer.transports.gloo:GlooTransport") is GlooTransport
    )
    for wrong in ("xinference_xavier.transfer.transports.gloo:GlooLink", "json:dumps"):
        with pytest.raises(TypeError, match="is not a Transport"):
            load_transport(wrong)


class Far(NoTransport):
    name = "far"


class Unfit(NoTransport):
    name = "unfit"

    @classmethod
    def unfit(cls) -> str | None:
        return "no such device"


class Broken(NoTransport):
    name = "broken"

    def __init__(self, region: Region, host: str, port_range: tuple[int, int] | None) -> None:
        raise TransportError("it burns")


@pytest.fixture(scope="module")
def region() -> Region:
    return Region.create(1, 4096)


def startup(*transports: type[Transport]) -> Startup:
    paths = tuple(f"{kind.__module__}:{kind.__name__}" for kind in transports)
    return Startup("a", 3, 1, 4096, "", None, paths)


def test_a_better_transport_that_this_host_cannot_use_is_left_out(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found, unusable = usable(startup(Unfit, Broken, Far), region)
    assert [transport.name for transport in found] == ["far"]
    assert unusable == {
        "unfit": "no such device",
        "broken": "it burns",
    }
    assert ["broken" in message for message in messages(caplog)] == [True]


def test_a_replica_that_has_only_neighbours_needs_no_transport(region: Region) -> None:
    assert usable(startup(), region) == ([], {})


def test_the_last_transport_must_work(region: Region) -> None:
    (unfit,), unusable = usable(startup(Unfit), region)
    assert (unfit.name, unusable) == ("unfit", {}), "nobody asked for another one"
    with pytest.raises(TransportError, match="it burns"):
        usable(startup(Far, Broken), region)
