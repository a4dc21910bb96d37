"""The judgement whether the members of one namespace compute the same. Runs on the tracker's event
loop."""

from collections.abc import Mapping
from typing import NamedTuple

from xinference_xavier.protocol.sketches import Canaries, Difference, Sketch, difference
from xinference_xavier.protocol.tracker import Comparison, Verdict

Audited = Mapping[str, Difference]
"""How the rows of other replicas differ from what a replica computed in audits."""
NOTHING: Audited = {}


class _First(NamedTuple):
    """The member that computed a canary first, and its sketch."""

    incarnation: str
    sketch: Sketch


class Judge:
    """Compares each member with whoever computed a canary first. `alike` are the members that agree
    with these, each with the replicas whose rows it found to differ: what they computed first stays
    as long as there are any."""

    def __init__(self) -> None:
        self.alike: dict[str, Audited] = {}
        self._firsts: dict[str, _First] = {}  # by the canary's name

    def compare(
        self, incarnation: str, canaries: Canaries, cannot: str = "", audited: Audited = NOTHING
    ) -> Comparison:
        """All canaries of a member, or why it `cannot` compute any. An audit counts for both: it
        does not tell which of the two is wrong."""
        if cannot:
            return Comparison(Verdict.CANNOT, cannot)
        for other, theirs in self.alike.items():
            if (found := audited.get(other) or theirs.get(incarnation)) is not None:
                return Comparison(Verdict.DIFFERS, f"{found}, in an audit", other, found)
        for name, sketch in canaries.items():
            first = self._firsts.get(name)
            if first is not None and (found := difference(sketch, first.sketch)) is not None:
                return Comparison(Verdict.DIFFERS, str(found), first.incarnation, found)
        if not canaries or (self._firsts and not canaries.keys() & self._firsts):
            return Comparison()
        return Comparison(Verdict.COMPARED)

    def add(self, incarnation: str, canaries: Canaries, audited: Audited = NOTHING) -> None:
        """A member that was compared and agrees."""
        self.alike[incarnation] = audited
        self._firsts = {
            **{name: _First(incarnation, sketch) for name, sketch in canaries.items()},
            **self._firsts,
        }

    def forget(self, incarnation: str) -> None:
        """It is no member any more, or is compared anew."""
        self.alike.pop(incarnation, None)
        if not self.alike:
            self._firsts.clear()
