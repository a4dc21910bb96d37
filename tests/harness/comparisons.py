"""Replicas that have computed the same canary, as most tests need them."""

from collections.abc import Iterable

from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.protocol.sketches import Sketch, pack_canaries
from xinference_xavier.protocol.tracker import (
    CanaryReport,
    Change,
    Comparison,
    Member,
    Update,
    Verdict,
    pack_short,
)

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


def compared_index(own: str = "own") -> Index[Peers]:
    """The index of a replica that was compared."""
    index = Index(Peers(own))
    index.members.set_compared(True)
    return index


def usable_holders(index: Index[Peers], key: bytes) -> tuple[str, ...]:
    return tuple(sorted(index.members.names(index.usable_set(key))))


def all_holders(index: Index[Peers], key: bytes) -> tuple[str, ...]:
    """Also those that nothing is fetched from."""
    return tuple(sorted(index.members.names(index.full_set(key))))


def snapshot(*members: Member, **holdings: Iterable[bytes]) -> Update:
    """These members, and what they hold."""
    changes = (Change(name, 1, pack_short(keys), b"", True) for name, keys in holdings.items())
    return Update(1, "epoch", True, (*members, *changes))
