"""Which request is at which replica, and which of them another replica can still answer.

A request whose replica is lost goes to another one if it has not been answered a byte yet, but only
once: a request that brings its replica down must not bring down all. Pure; belongs to one thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Request:
    replica: str
    answered: bool = False
    moved: bool = False


class InFlight:
    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def sent(self, request: str, replica: str) -> None:
        known = self._requests.setdefault(request, _Request(""))
        assert not known.replica, "it is at a replica"
        known.replica = replica

    def answered(self, request: str) -> None:
        """A byte of the answer has arrived."""
        if (known := self._requests.get(request)) is not None:
            known.answered = True

    def at(self, request: str) -> str:
        """The replica that the request is at; empty if at none, or if it has ended."""
        known = self._requests.get(request)
        return known.replica if known else ""

    def ended(self, request: str) -> str:
        """The replica that the request was at, as `at` says."""
        replica = self.at(request)
        self._requests.pop(request, None)
        return replica

    def failed(self, request: str) -> bool:
        """Its replica is of no use to it. True if it can go elsewhere; if not, it has ended."""
        known = self._requests.get(request)
        if known is None or known.answered or known.moved:
            self._requests.pop(request, None)
            return False
        known.replica, known.moved = "", True
        return True

    def lost(self, replica: str) -> list[str]:
        """The replica has failed or hangs. Returns the requests that can go elsewhere, in the order
        in which they were sent; its others have ended."""
        there = [request for request, known in self._requests.items() if known.replica == replica]
        return [request for request in there if self.failed(request)]
