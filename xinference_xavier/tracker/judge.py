"""The judgement whether the members of one namespace compute the same. Runs on the tracker's event
loop."""

from typing import NamedTuple

from xinference_xavier.protocol.sketches import Canaries, Sketch, difference
from xinference_xavier.protocol.tracker import Comparison, Verdict


class _First(NamedTuple):
    """The member that computed a canary first, and its sketch."""

    incarnation: str
    sketch: Sketch


class Judge:
    """Compares each member with whoever computed a canary first. `alike` are the members that agree
    with these: what they computed first stays as long as there are any."""

    def __init__(self) -> None:
        self.alike: set[str] = set()
        self._firsts: dict[str, _First] = {}  # by the canary's name

    def compare(self, canaries: Canaries, cannot: str = "") -> Comparison:
        """All canaries of a member, or why it `cannot` compute any."""
        if cannot:
            return Comparison(Verdict.CANNOT, cannot)
        for name, sketch in canaries.items():
            first = self._firsts.get(name)
            if first is not None and (found := difference(sketch, first.sketch)) is not None:
                return Comparison(Verdict.DIFFERS, str(found), first.incarnation, found)
        if not canaries or (self._firsts and not canaries.keys() & self._firsts):
            return Comparison()
        return Comparison(Verdict.COMPARED)

    def add(self, incarnation: str, canaries: Canaries) -> None:
        """A member that was compared and agrees."""
        self.alike.add(incarnation)
        self._firsts = {
            **{name: _First(incarnation, sketch) for name, sketch in canaries.items()},
            **self._firsts,
        }

    def forget(self, incarnation: str) -> None:
        """It is no member any more, or is compared anew."""
        self.alike.discard(incarnation)
        if not self.alike:
            self._firsts.clear()
