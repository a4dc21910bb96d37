"""Replicas that have computed the same canary, as most tests need them."""

from xinference_xavier.mirror import Mirror
from xinference_xavier.protocol.sketches import Sketch, pack_canaries
from xinference_xavier.protocol.tracker import CanaryReport, Comparison, Member, Verdict

COMPARED = Comparison(Verdict.COMPARED)
SAMPLES = [1.0, -2.0, 3.0]


def sketch(factor: float = 1.0) -> Sketch:
    """The numbers of the second layer are multiplied by `factor`."""
    return {
        "layer 0": ("float32", SAMPLES),
        "layer 1": ("float32", [factor * sample for sample in SAMPLES]),
    }


def report(**factors: float) -> CanaryReport:
    """Canaries by name, with the factors of their second layers."""
    return CanaryReport(pack_canaries({name: sketch(each) for name, each in factors.items()}))


def compared(name: str, address: str = "127.0.0.1:1", serves: bool = True) -> Member:
    return Member(name, address, serves, COMPARED)


def compared_mirror(name: str) -> Mirror:
    """The mirror of a replica that was compared."""
    mirror = Mirror(name)
    mirror.set_compared(True)
    return mirror
