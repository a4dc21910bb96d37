"""Whether the members of one namespace compute the same. Runs on the tracker's event loop."""

from typing import NamedTuple

from xinference_xavier.protocol.sketches import Canaries, Difference, Sketch, difference
from xinference_xavier.protocol.tracker import Comparison, Verdict


class _First(NamedTuple):
    """The member that computed a canary first, and its sketch, with further layers of members that
    agree. Both stay when it leaves."""

    incarnation: str
    sketch: Sketch


class Judge:
    """Compares each member with whoever computed a canary first."""

    def __init__(self) -> None:
        self._firsts: dict[str, _First] = {}  # by the canary's name

    def compare(self, incarnation: str, canaries: Canaries, cannot: str = "") -> Comparison:
        """All of a member's `canaries`, or why it `cannot` compute any."""
        if cannot:
            return Comparison(Verdict.CANNOT, cannot)
        common = [
            (first, sketch)
            for name, sketch in canaries.items()
            if (first := self._firsts.get(name)) and first.sketch.keys() & sketch.keys()
        ]
        for first, sketch in common:
            if (found := difference(sketch, first.sketch)) is not None:
                return _differs(first.incarnation, found)
        if not canaries or (self._firsts and not common):
            return Comparison()
        for name, sketch in canaries.items():
            first = self._firsts.get(name) or _First(incarnation, sketch)
            self._firsts[name] = first._replace(sketch={**sketch, **first.sketch})
        return Comparison(Verdict.COMPARED)


def _differs(peer: str, found: Difference) -> Comparison:
    return Comparison(Verdict.DIFFERS, str(found), peer, found)
