"""Faults of the transport, and processes that stand still."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from examples.processes import until
from tests.faults import Order, order, taken, withdraw
from tests.harness.processes import frozen

EFFECTS: Mapping[Order, tuple[str, ...]] = {
    Order.DAMAGE: ("checksum",),
    Order.SWAP: ("checksum",),
    Order.LATE: ("timeout",),
    Order.OVERSIZE: ("transfer process died",),
    Order.REFUSE: ("link",),
    Order.DIE_RECEIVING: ("transfer process died",),
    Order.STALL: ("timeout",),
    Order.TOO_FEW: ("timeout",),
    Order.SLOW: (),
    Order.CUT: ("link", "timeout"),
    Order.DIE_SENDING: ("link", "timeout"),
}
"""Reasons for rollbacks, one of which must be counted after the fault. Without any, it is enough
that the fault happened."""
OF_CONSUMER = [*EFFECTS][: [*EFFECTS].index(Order.STALL)]
"""The faults that hit the consumer of a fetch; the others hit the donor."""


def bring_about(
    fault: Order, folder: Path, rollbacks: Callable[[], Counter[str]], seconds: float
) -> bool:
    """Order the fault in `folder`, and return whether it happened and had its effect, each within
    `seconds`."""

    def seen() -> int:
        return sum(rollbacks()[effect] for effect in EFFECTS[fault])

    def has_happened() -> bool:
        return taken(folder)[fault] > happened

    before, happened = seen(), taken(folder)[fault]
    order(folder, fault)
    if not until(has_happened, seconds) and withdraw(folder, fault):
        return False
    return not EFFECTS[fault] or until(lambda: seen() > before, seconds)


def suspend(process: psutil.Process, seconds: float) -> bool:
    """Suspend a process for a while; return whether it stood still."""
    with frozen([process]) as stand_still:
        seen = until(stand_still, 1.0)
        threading.Event().wait(seconds)
    return seen
