"""Part `donors`: a prefix from one donor, and from two that divide its rows between them.

There are three vLLM engines, each on a host of its own: a network namespace of this machine. The
links of both donors are slowed down until they are the bottleneck of a fetch. In each round one
prompt is fetched from the only engine that has it, and another from the two that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.engines import ALWAYS_FETCH, CHUNK, DTYPE, Fleet, Kind, Prompts, whole_chunks
from benchmarks.figures import figure, ratio, shown
from tests.e2e.hosts import Hosts

TITLE = "Two donors"
ROUNDS = 5
TOKENS = 3000
MEGABITS = 500
"""Mbit/s out of each donor's host."""
_DONORS = ("first", "second")
_CONSUMER = "third"


class Sample(NamedTuple):
    seconds: float  # to the first token
    sent: tuple[int, ...]  # bytes, by each of the donors' hosts


def measure() -> dict[str, Any]:
    """The result has `why_not` if such hosts cannot be made here."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(*_DONORS, _CONSUMER))
        except RuntimeError as error:
            return {"why_not": str(error)}
        kinds = {
            name: Kind(options=ALWAYS_FETCH, network=hosts.network(name))
            for name in (*_DONORS, _CONSUMER)
        }
        fleet = stack.enter_context(Fleet(kinds, host=hosts.our_address))
        for donor in _DONORS:
            stack.enter_context(hosts.slow(donor, MEGABITS))
        return summary(*_in_turns(_Asking(fleet, hosts)))


def _in_turns(asking: _Asking) -> tuple[list[Sample], list[Sample]]:
    one: list[Sample] = []
    two: list[Sample] = []
    for turn in range(-2 * len(_DONORS), ROUNDS):
        donors = _DONORS[turn % 2 :] + _DONORS[: turn % 2]
        alone = asking.fetched(donors[:1])
        if turn >= 0:  # earlier turns make the links and learn their rates
            one.append(alone)
            two.append(asking.fetched(donors))
    return one, two


class _Asking:
    def __init__(self, fleet: Fleet, hosts: Hosts) -> None:
        self._fleet = fleet
        self._hosts = hosts
        self._prompts = Prompts()

    def fetched(self, donors: Sequence[str]) -> Sample:
        """Fetch a new prompt that the first of `donors` computed and the others fetched."""
        prompt = self._prompts.fresh(TOKENS)
        chunks = whole_chunks(TOKENS)
        for donor in donors:
            self._fleet[donor].ask(prompt)
            self._fleet.wait_published(donor, chunks)
        before = self._sent()
        answer = self._fleet[_CONSUMER].ask(prompt)
        if answer.cached != chunks * CHUNK:
            raise RuntimeError(f"{answer.cached} of {TOKENS} tokens were reused")
        sent = tuple(now - then for now, then in zip(self._sent(), before, strict=True))
        self._fleet.flush()
        return Sample(answer.first, sent)

    def _sent(self) -> list[int]:
        return [self._hosts.sent(donor) for donor in _DONORS]


def summary(one: Sequence[Sample], two: Sequence[Sample]) -> dict[str, Any]:
    both = [sample.seconds for sample in two]
    alone = [sample.seconds for sample in one]
    return {
        "megabits": MEGABITS,
        "one_ms": figure([1e3 * seconds for seconds in alone]),
        "two_ms": figure([1e3 * seconds for seconds in both]),
        "two/one": ratio(both, alone),
        "lesser_share": figure([min(sample.sent) / sum(sample.sent) for sample in two]),
    }


def markdown(part: dict[str, Any]) -> str:
    if "why_not" in part:
        return f"Not measured here: {part['why_not']}."
    share = part["lesser_share"]
    lines = [
        f"Time to first token at the engine, ms: {TOKENS} tokens ({DTYPE}) that one replica holds, "
        f"or two, each on a host whose link carries {part['megabits']} Mbit/s. With two donors, "
        f"{shown(share)} of the bytes came from the one that sent less. Medians, with minimum and "
        "maximum in brackets.",
        "",
        "| from one donor | from two | two ÷ one |",
        "|---|---|---|",
    ]
    cells = [shown(part["one_ms"], 0), shown(part["two_ms"], 0), shown(part["two/one"])]
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def plot(part: dict[str, Any], axes: Any) -> None:
    if "why_not" in part:
        return
    for label, name in {"from one donor": "one_ms", "from two": "two_ms"}.items():
        samples = part[name]["samples"]
        axes.plot(range(1, len(samples) + 1), samples, marker="o", label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_ylabel("ms to the first token")
    axes.legend()
