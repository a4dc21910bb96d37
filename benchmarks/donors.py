"""Part `donors`: a prefix from one donor, and from two that divide its rows between them.

Three replicas of one model run behind xinference, each on a host of its own: a network namespace of
this machine, whose link is slowed down until it is the bottleneck of a fetch. In each round one
document is fetched from the only replica that has it, and another from the two that have it. The
time is that of a one-token answer at the consumer's actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.engines import CHUNK, DTYPE, own_model
from benchmarks.figures import figure, ratio, shown
from benchmarks.report import ROOT
from examples.documents import document
from examples.local_cluster import Completion
from examples.make_model import CONTEXT
from tests.e2e.host_cluster import SUPERVISOR, HostCluster
from tests.e2e.hosts import Hosts
from tests.replica_process import wait_until

TITLE = "Two donors"
ROUNDS = 5
MEGABITS = 500
"""Mbit/s out of each host."""
_ROWS = 80  # of a document, each about 50 tokens
_DONORS = ("first", "second")
_CONSUMER = "third"
_UID = "donors"
_LOG = ROOT / "build" / "bench-donors.log"


class Sample(NamedTuple):
    tokens: int
    seconds: float
    sent: tuple[int, ...]  # bytes, by each of the donors' hosts


def measure() -> dict[str, Any]:
    """The result has `why_not` if such hosts cannot be made here."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(SUPERVISOR, *_DONORS, _CONSUMER))
        except RuntimeError as error:
            return {"why_not": str(error)}
        workers = (*_DONORS, _CONSUMER)
        cluster = stack.enter_context(HostCluster(_LOG, hosts, workers=workers))
        cluster.register(own_model(), "small")
        cluster.launch(
            "small",
            _UID,
            replica=len(workers),
            dtype=DTYPE,
            block_size=CHUNK,
            max_model_len=CONTEXT,
            enable_xavier=True,
            xavier_routing="off",  # in turn
            xavier_pool_bytes="2GiB",
        )
        for donor in _DONORS:
            stack.enter_context(hosts.slow(donor, MEGABITS))
        return summary(*_in_turns(_Asking(cluster, hosts)))


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
    def __init__(self, cluster: HostCluster, hosts: Hosts) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._documents = 0

    def fetched(self, donors: Sequence[str]) -> Sample:
        """Fetch a new document that the first of `donors` computed and the others fetched."""
        self._documents += 1
        text = document(self._documents, _ROWS)
        for donor in donors:
            self._publish(donor, text)
        before = self._sent()
        answer = self._ask(_CONSUMER, text)
        chunks = answer.prompt_tokens // CHUNK
        if answer.cached_tokens // CHUNK < chunks - 1:
            raise RuntimeError(f"{answer.cached_tokens} of {answer.prompt_tokens} were reused")
        sent = tuple(now - then for now, then in zip(self._sent(), before, strict=True))
        return Sample(answer.prompt_tokens, answer.seconds, sent)

    def _publish(self, donor: str, text: str) -> None:
        before = self._cluster.holdings(_UID)
        answer = self._ask(donor, text)
        chunks = answer.prompt_tokens // CHUNK
        wait_until(
            lambda: self._cluster.holdings(_UID) >= before + chunks,
            "the prompt is published",
            interval=0.2,
        )

    def _ask(self, host: str, text: str) -> Completion:
        return self._cluster.complete_at(host, _UID, text, max_tokens=1)

    def _sent(self) -> list[int]:
        return [self._hosts.sent(donor) for donor in _DONORS]


def summary(one: Sequence[Sample], two: Sequence[Sample]) -> dict[str, Any]:
    both = [sample.seconds for sample in two]
    alone = [sample.seconds for sample in one]
    return {
        "megabits": MEGABITS,
        "tokens": figure([float(sample.tokens) for sample in two]),
        "one_ms": figure([1e3 * seconds for seconds in alone]),
        "two_ms": figure([1e3 * seconds for seconds in both]),
        "two/one": ratio(both, alone),
        "lesser_share": figure([min(sample.sent) / sum(sample.sent) for sample in two]),
    }


def markdown(part: dict[str, Any]) -> str:
    if "why_not" in part:
        return f"Not measured here: {part['why_not']}."
    tokens, share = part["tokens"]["median"], part["lesser_share"]
    lines = [
        f"Time of a one-token answer, ms: {tokens:.0f} tokens ({DTYPE}) that one replica holds, or "
        f"two, each on a host whose link carries {part['megabits']} Mbit/s. With two donors, "
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
    axes.set_ylabel("ms to a one-token answer")
    axes.legend()
