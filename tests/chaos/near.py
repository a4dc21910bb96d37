"""Faults of replicas that load each other's rows in place.

All replicas are on one host; here they act as if they were on two.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from examples.processes import until
from tests.chaos.node import Node, host_of
from tests.chaos.tracker import LEASE
from tests.faults import ORDERED
from tests.harness.remote import EndedError
from xinference_xavier.options import TRANSPORTS
from xinference_xavier.replica import neighbours

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster
    from tests.chaos.kinds import Kind
    from tests.chaos.schedule import Step

AUTO = "auto"
"""The transport with which neighbours' rows are loaded in place, and all others copied."""
_EFFECT_TIME = 6.0
_PAUSE = 2.0


def see_one_host(own: str) -> None:
    """Let this process find no neighbours but those on the host of `own`, and look for them soon
    again if it fails."""
    connect = neighbours._connect

    def connect_here(donor: str, consumer: str) -> socket.socket:
        if host_of(donor) != host_of(own):
            raise ConnectionRefusedError
        return connect(donor, consumer)

    neighbours._connect = connect_here
    neighbours.MOST_PAUSE = _PAUSE  # type: ignore[attr-defined]
    gloo = ORDERED["gloo"]
    TRANSPORTS[AUTO] = (f"{gloo.__module__}:{gloo.__name__}",)


def are_neighbours(one: str, other: str) -> bool:
    return one != other and host_of(one) == host_of(other)


@contextmanager
def _halted(borrower: Node, lender: str = "") -> Iterator[str]:
    """Its worker stands still before it loads rows of this neighbour, or of any. Yields whose rows;
    nothing if there is no such load."""
    found: str = borrower.call("halt_load", lender, _EFFECT_TIME)
    try:
        yield found
    finally:
        if found:
            with suppress(EndedError):
                borrower.call("go_on")


def _lends(cluster: Cluster, lender: str, borrower: str) -> bool:
    for node in list(cluster.nodes.values()):
        if node.incarnation == lender:
            with suppress(EndedError):
                return bool(node.call("lends", borrower))
    return False


# -- of those that borrow ---------------------------------------------------------------------


def _while_it_borrows(harm: Callable[[Cluster, Step, str], bool]) -> Kind:
    """`harm` gets the name of the lender, too."""

    def bring_about(cluster: Cluster, step: Step) -> bool:
        borrower = cluster.nodes[step.target]
        with _halted(borrower) as lender:
            happened = bool(lender) and harm(cluster, step, lender)
        returned = until(lambda: not _lends(cluster, lender, borrower.incarnation), _EFFECT_TIME)
        return happened and (returned or borrower in cluster.nodes.values())

    return bring_about


def _killed(cluster: Cluster, step: Step, _: str = "") -> bool:
    node = cluster.nodes[step.target]
    with cluster.membership:
        cluster.restart(step.target)
    return until(lambda: not cluster.is_member(node.incarnation), 4 * LEASE, 0.1)


def _stopped_beyond_the_lease(cluster: Cluster, step: Step, lender: str) -> bool:
    """What it loads must stay, although it is no member any more."""
    borrower = cluster.nodes[step.target].incarnation
    with cluster.membership:
        cluster.partings += 1
        with cluster.stop(step.target):
            gone = until(lambda: not cluster.is_member(borrower), 4 * LEASE, 0.1)
            stays = _lends(cluster, lender, borrower)
        back = until(lambda: cluster.is_member(borrower), 4 * LEASE, 0.1)
    return gone and stays and back


def _reset(cluster: Cluster, step: Step, _: str = "") -> bool:
    with cluster.resets:
        cluster.partings += 2
        cluster.nodes[step.target].call("reset", f"own {step.number}")
        cluster.share(step.target)
    return True


def _takes_no_orders(cluster: Cluster, step: Step) -> bool:
    """It starts with a worker that maps nothing for a while: until then it copies."""
    with cluster.membership:
        cluster.restart(step.target, takes_orders=False)
    node = cluster.nodes[step.target]

    def copies() -> bool:
        received = node.figures()["replica"]["received_from"]
        return any(are_neighbours(node.incarnation, donor) for donor in received)

    copied = until(copies, _EFFECT_TIME)
    node.call("take_orders")
    return until(lambda: bool(node.figures()["mapped"]), _EFFECT_TIME) and copied


# -- of those that lend -----------------------------------------------------------------------


def _while_it_lends(harm: Callable[[Cluster, Step, ExitStack], bool]) -> Kind:
    """`harm` may close the stack, and the load goes on."""

    def bring_about(cluster: Cluster, step: Step) -> bool:
        lender = cluster.nodes[step.target].incarnation
        nodes = list(cluster.nodes.values())
        near = [node for node in nodes if are_neighbours(node.incarnation, lender)]
        if not near:
            return False
        borrower = near[step.number % len(near)]
        with suppress(EndedError), ExitStack() as load:  # its own lane may kill it
            if load.enter_context(_halted(borrower, lender)):
                return harm(cluster, step, load)
        return False

    return bring_about


def _lender_stopped(cluster: Cluster, step: Step, load: ExitStack) -> bool:
    with cluster.stop(step.target) as stands_still:
        seen = until(stands_still, 1.0)
        load.close()
        threading.Event().wait(step.strength * 0.6 * LEASE)
    return seen


def _lender_killed(cluster: Cluster, step: Step, load: ExitStack) -> bool:
    """What it lent stays mapped for as long as it is loaded."""
    lender = cluster.nodes[step.target].incarnation
    gone = _killed(cluster, step)
    load.close()

    def is_mapped() -> bool:
        return any(lender in node.figures().get("mapped", ()) for node in cluster.nodes.values())

    return gone and until(lambda: not is_mapped(), _EFFECT_TIME)


KINDS: dict[str, Kind] = {
    "replica killed while it borrows": _while_it_borrows(_killed),
    "replica stopped beyond the lease while it borrows": _while_it_borrows(
        _stopped_beyond_the_lease
    ),
    "replica reset while it borrows": _while_it_borrows(_reset),
    "replica's worker takes no orders": _takes_no_orders,
    "replica stopped while it lends": _while_it_lends(_lender_stopped),
    "replica killed while it lends": _while_it_lends(_lender_killed),
    "replica reset while it lends": _while_it_lends(lambda cluster, step, _: _reset(cluster, step)),
}
