"""How each kind of fault is injected, and how its effect is observed.

A kind is a function of the cluster and the step. It returns whether the effect was observed, and
undoes whatever would last. If it concerns one replica, that replica is up when it is called.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from examples.processes import until
from tests.chaos import disk, near
from tests.chaos.cluster import DRAIN, FETCH_TIMEOUT, Cluster
from tests.chaos.schedule import Step, Weights
from tests.chaos.tracker import LEASE
from tests.chaos.transport import EFFECTS, OF_CONSUMER, bring_about, suspend
from tests.faults import Order, order, withdraw
from tests.harness.remote import EndedError
from xinference_xavier.protocol.load import Drain

EFFECT_TIME = 6.0
"""Seconds that a fault waits for an opportunity, and that we wait for its effect."""

Kind = Callable[[Cluster, Step], bool]


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


# -- of the transport -------------------------------------------------------------------------

_OF_TRANSPORT: Weights = {
    Order.DAMAGE: 60,
    Order.SWAP: 50,
    Order.LATE: 25,
    Order.OVERSIZE: 8,
    Order.REFUSE: 40,
    Order.DIE_RECEIVING: 8,
    Order.STALL: 30,
    Order.TOO_FEW: 30,
    Order.SLOW: 50,
    Order.CUT: 40,
    Order.DIE_SENDING: 8,
}


def _of_transport(fault: Order) -> Kind:
    """Its effect is counted by this replica if it is the consumer, by any if it is the donor."""

    def inject(cluster: Cluster, step: Step) -> bool:
        node = cluster.nodes[step.target]

        def of_node() -> Counter[str]:
            return Counter(node.figures()["replica"]["fetches"]["rolled_back"])

        rollbacks = of_node if fault in OF_CONSUMER else cluster.rollbacks
        return bring_about(fault, node.folder, rollbacks, EFFECT_TIME)

    return inject


def _data_port_closed(cluster: Cluster, step: Step) -> bool:
    """The others leave the replica out until they can fetch from it again."""
    node, donor = cluster.nodes[step.target], cluster.nodes[step.target].incarnation

    def left_out() -> bool:
        others = [each for each in cluster.nodes.values() if each is not node]
        return any(donor in each.figures().get("left_out", ()) for each in others)

    order(node.folder, Order.CLOSED)
    seen = until(left_out, EFFECT_TIME)
    withdraw(node.folder, Order.CLOSED)
    return until(lambda: not left_out(), 2 * EFFECT_TIME) and seen


def _transfer_process_stopped(cluster: Cluster, step: Step) -> bool:
    """Suspend it for up to twice the deadline; if a fetch waits for it, its engine may replace
    it."""
    transfer = cluster.nodes[step.target].transfer()
    if transfer is None:
        return False
    return suspend(transfer, FETCH_TIMEOUT * (0.3 + 1.7 * step.strength))


# -- of replicas ------------------------------------------------------------------------------


def _killed(cluster: Cluster, step: Step) -> bool:
    node = cluster.nodes[step.target]
    with cluster.membership:
        cluster.restart(step.target)
    return until(lambda: not cluster.is_member(node.incarnation), 4 * LEASE, 0.1)


def _drained(cluster: Cluster, step: Step) -> bool:
    """Its peers get what only it holds. Then it stays, as after a removal that was cancelled."""
    incarnation = cluster.nodes[step.target].incarnation
    handed_over = _begins_to_drain(cluster, incarnation) and until(
        lambda: (state := _drain(cluster, incarnation)).seconds > 0 and not state.handing_over,
        DRAIN + EFFECT_TIME,
    )
    with suppress(EndedError):
        cluster.tracker.call("undrain", incarnation)
    return handed_over


def _drain(cluster: Cluster, incarnation: str) -> Drain:
    """Ask the tracker once, as the removal of a replica does again and again."""
    try:
        state: Drain = cluster.tracker.call("drain", incarnation)
    except EndedError:  # another lane is killing the tracker
        return Drain(0.0)
    return state


def _begins_to_drain(cluster: Cluster, incarnation: str) -> bool:
    return until(lambda: _drain(cluster, incarnation).seconds > 0, EFFECT_TIME)


def _killed_while_it_drains(cluster: Cluster, step: Step) -> bool:
    drains = _begins_to_drain(cluster, cluster.nodes[step.target].incarnation)
    return _killed(cluster, step) and drains


def _stopped(cluster: Cluster, step: Step) -> bool:
    """Suspend it for a moment, or beyond a fetch's deadline."""
    with cluster.stop(step.target) as stands_still:
        seen = until(stands_still, 1.0)
        _wait(0.1 + step.strength * (0.6 * LEASE - 0.1))
    return seen


def _stopped_beyond_the_lease(cluster: Cluster, step: Step) -> bool:
    with cluster.membership:
        incarnation = cluster.nodes[step.target].incarnation
        cluster.partings += 1
        with cluster.stop(step.target):
            gone = until(lambda: not cluster.is_member(incarnation), 4 * LEASE, 0.1)
        back = until(lambda: cluster.is_member(incarnation), 4 * LEASE, 0.1)
    return gone and back


def _reset(cluster: Cluster, step: Step) -> bool:
    """Reset, while it fetches or serves, to weights that no other replica has, and back."""
    node, serving = cluster.nodes[step.target], step.number % 2 == 0
    # Announced weights apply to every replica that was reset, so they must be true of all.
    with cluster.resets:
        cluster.partings += 2
        happened = bool(node.call("reset_while", serving, f"own {step.number}", EFFECT_TIME))
        if happened:
            _wait(0.3 * step.strength)
            cluster.share(step.target)
    return happened


def _computes_otherwise(wrong_rows: bool) -> Kind:
    """A replica claims to have the common weights, but computes other rows or makes wrong sketches:
    the others must part from it."""

    def bring_about(cluster: Cluster, step: Step) -> bool:
        node, other = cluster.nodes[step.target], f"other {step.number}"
        with cluster.resets:
            cluster.partings += 2
            node.call("reset", other if wrong_rows else cluster.weights, other)

            def has_parted() -> bool:
                if "+" in str(node.figures().get("namespace")):  # alone, since the reset
                    with suppress(EndedError):  # another lane is killing the tracker
                        cluster.tracker.call("set_weights_version", cluster.weights)
                return str(node.figures().get("namespace")).startswith(
                    f"namespace@{cluster.weights}~"
                )

            happened = until(has_parted, EFFECT_TIME, 0.1)
            cluster.share(step.target)
        return happened

    return bring_about


# -- of the tracker ---------------------------------------------------------------------------


def _tracker_stopped(cluster: Cluster, step: Step) -> bool:
    """No lease may expire because of it."""
    with cluster.membership:
        tracker = psutil.Process(cluster.tracker.pid)
        seen = suspend(tracker, LEASE * (1.1 + 0.4 * step.strength))
        _wait(2.0)
    return seen


def _tracker_lost(same_address: bool) -> Kind:
    def bring_about(cluster: Cluster, step: Step) -> bool:
        with cluster.membership:
            before = {name: node.figures()["epoch"] for name, node in cluster.nodes.items()}
            cluster.replace_tracker(same_address)
            return until(
                lambda: all(
                    node.figures()["epoch"] not in ("", before[name])
                    for name, node in cluster.nodes.items()
                ),
                15.0,
            )

    return bring_about


def _tracker_lost_while_one_drains(cluster: Cluster, step: Step) -> bool:
    """The new one learns of it as soon as somebody asks how far the replica is."""
    drained = [*cluster.nodes.values()][int(step.strength * len(cluster.nodes))]
    drains = _begins_to_drain(cluster, drained.incarnation)
    found = _tracker_lost(same_address=True)(cluster, step)
    drains_again = _begins_to_drain(cluster, drained.incarnation)
    cluster.tracker.call("undrain", drained.incarnation)
    return drains and found and drains_again


def _switched(cluster: Cluster, step: Step) -> bool:
    def all_are(enabled: bool) -> bool:
        return all(node.figures()["enabled"] == enabled for node in cluster.nodes.values())

    with cluster.membership:
        cluster.tracker.call("set_enabled", False)
        off = until(lambda: all_are(False), 5.0)
        cluster.tracker.call("set_enabled", True)
        return until(lambda: all_are(True), 5.0) and off


def _other_weights(cluster: Cluster, step: Step) -> bool:
    with cluster.membership:
        cluster.partings += len(cluster.nodes)
        cluster.change_weights()
    return True


REPLICA_KINDS: Mapping[str, tuple[int, Kind]] = {
    **{fault: (_OF_TRANSPORT[fault], _of_transport(fault)) for fault in EFFECTS},
    Order.CLOSED: (12, _data_port_closed),
    "transfer process stopped": (12, _transfer_process_stopped),
    "replica killed": (10, _killed),
    "replica drained": (12, _drained),
    "replica killed while it drains": (10, _killed_while_it_drains),
    "replica stopped": (32, _stopped),
    "replica stopped beyond the lease": (8, _stopped_beyond_the_lease),
    "replica reset": (60, _reset),
    "rows of other weights": (15, _computes_otherwise(wrong_rows=True)),
    "wrong sketch": (15, _computes_otherwise(wrong_rows=False)),
    **{kind: (12, inject) for kind, inject in near.KINDS.items()},
}
"""Kinds of faults of one replica: how often each occurs relative to the others, and how."""

TRACKER_KINDS: Mapping[str, tuple[int, Kind]] = {
    "tracker stopped beyond the lease": (10, _tracker_stopped),
    "tracker killed": (10, _tracker_lost(same_address=True)),
    "tracker moved": (10, _tracker_lost(same_address=False)),
    "tracker killed while a replica drains": (10, _tracker_lost_while_one_drains),
    "sharing switched off and on": (12, _switched),
    "other weights": (10, _other_weights),
    **{kind: (10, inject) for kind, inject in disk.KINDS.items()},
}

KINDS = {kind: inject for kind, (_, inject) in {**REPLICA_KINDS, **TRACKER_KINDS}.items()}


def weights(only: Sequence[str] | None = None) -> tuple[Weights, Weights]:
    """Weights of one replica's faults, and of the tracker's. `only` names the kinds to use. Raises
    ValueError for an unknown one."""
    if unknown := set(only or ()) - KINDS.keys():
        raise ValueError(f"no such kinds of faults: {sorted(unknown)}")
    of_one, of_tracker = (
        {kind: often for kind, (often, _) in kinds.items() if only is None or kind in only}
        for kinds in (REPLICA_KINDS, TRACKER_KINDS)
    )
    return of_one, of_tracker
