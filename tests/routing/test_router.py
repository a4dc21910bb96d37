"""A burst between two reports spreads, and follows the chunks that are expected. What has to wait
waits in order of arrival."""

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.routing.holdings import Held
from xinference_xavier.mirror import PeerSets
from xinference_xavier.routing.choice import Choice, Chunks, Prompt
from xinference_xavier.routing.load import Rates, Report
from xinference_xavier.routing.router import Expected, Queue, Router

SIZE = Chunks(tokens=100, bytes=1000)
RATES = Rates(token_s=0.001, fetch_s=0.01, byte_s=1e-5)


def prompt(name: str, chunks: int = 10) -> Prompt:
    return Prompt(chunks * 100, [f"{name} {number}".encode() for number in range(chunks)])


class Cluster:
    def __init__(self, *names: str) -> None:
        self.held = Held({name: [] for name in names})
        self.router = Router(self.held, SIZE, random.Random(0))
        self.sent = 0
        for name in names:
            self.router.loads.report(name, Report(0.0, 0, 0.0, 0, RATES), limit=8)

    def report(
        self, names: str, made: float, backlog: float = 0.0, requests: int = 0, **more: Any
    ) -> None:
        for name in names:
            self.router.loads.report(name, Report(made, 0, backlog, requests, RATES, **more))

    def send(self, asked: Prompt, now: float = 0.0) -> Choice:
        choice = self.router.choose(asked, now)
        self.sent += 1
        self.router.sent(f"{self.sent}", choice, now)
        return choice


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(*"abcd")


def test_a_new_session_goes_where_the_least_work_went_lately() -> None:
    """Although another replica would answer first now: the next rounds follow the session."""
    cluster = Cluster("a", "b")
    first = cluster.send(prompt("long", 30), now=0.0).replica
    (other,) = {"a", "b"} - {first}
    cluster.report(first, 4.0)
    cluster.report(other, 4.0, 0.5, 1)
    assert cluster.send(prompt("new", 10), now=4.0).replica == other
    assert cluster.send(prompt("long", 31), now=4.0).replica == first, "it is not new"
    late = Cluster("a", "b")
    first = late.send(prompt("long", 30), now=0.0).replica
    (other,) = {"a", "b"} - {first}
    late.report(first, 60.0)
    late.report(other, 60.0, 0.5, 1)
    assert late.send(prompt("new", 10), now=60.0).replica == first, "that is long ago"


@pytest.mark.parametrize(("sent_before", "stays"), [(0, False), (150, True)])
def test_where_queues_stand_a_session_does_not_leave_its_prefix(
    sent_before: int, stays: bool
) -> None:
    """Computing it once more would delay each prompt that comes before the queue is empty. A queue
    that has just begun may be one long prompt."""
    cluster = Cluster("a", "b")
    cluster.report("ab", 0.1, 1.0)
    for number in range(sent_before):
        cluster.send(prompt(f"{number}"))
    first = cluster.send(prompt("chat")).replica
    (other,) = {"a", "b"} - {first}
    cluster.report(first, 1.0, 100.0, 20)
    cluster.report(other, 1.0, 50.0, 20)
    again = cluster.send(prompt("chat", 11), now=1.0).replica
    assert (again == first) == stays


def test_the_next_turn_follows_the_first_before_it_is_computed(cluster: Cluster) -> None:
    first = cluster.send(prompt("chat", 10), now=0.0)
    again = cluster.send(prompt("chat", 12), now=0.9)
    assert again.replica == first.replica
    assert again.reason == "local"
    assert again.terms == pytest.approx((0.1, 0.0, 0.2))


def test_what_is_expected_is_not_expected_for_ever(cluster: Cluster) -> None:
    cluster.send(prompt("chat"), now=0.0)
    assert cluster.router.choose(prompt("chat"), 3.1).reason == "backlog"


@pytest.mark.parametrize(("retention", "reason"), [(60.0, "local"), (5.0, "backlog")])
def test_what_the_pool_has_evicted_may_still_be_on_the_card(
    cluster: Cluster, retention: float, reason: str
) -> None:
    cluster.report("a", 0.1, retention_s=retention)
    cluster.report("bcd", 0.1, 1.0)
    chat = prompt("chat")
    cluster.send(chat, now=0.2)
    cluster.router.loads.fill("a")  # a replica at its limit keeps it all the same
    cluster.router.scheduled("1", chat.keys, now=0.3)
    cluster.report("abcd", 30.0)
    choice = cluster.router.choose(chat, now=30.0)
    assert choice is not None
    assert choice.reason == reason
    assert (choice.replica == "a") or reason == "backlog"


def test_a_hot_prefix_spreads_when_its_owner_is_busy(cluster: Cluster) -> None:
    hot = prompt("hot", 9)
    for key in hot.keys:
        cluster.held._held[key] = cluster.held.sets.bit("a")
    asked = [Prompt(1000, [*hot.keys, f"own {number}".encode()]) for number in range(12)]
    spread = Counter(cluster.send(one).replica for one in asked)
    assert spread["a"] >= 2
    assert set(spread) == set("abcd")


@pytest.mark.parametrize(("busy", "copied"), [(False, True), (True, False)])
def test_busy_replicas_copy_less(cluster: Cluster, busy: bool, copied: bool) -> None:
    """The owner of ten chunks has to compute for 0.7 s. Copying them would take 0.12 s."""
    for key in prompt("hot", 10).keys:
        cluster.held._held[key] = cluster.held.sets.bit("a")
    for second in range(100):
        cluster.report("abcd", float(second), 0.5 * busy)
        cluster.send(prompt(f"{second}", 1), now=float(second))
    cluster.report("a", 100.0, 0.7)
    cluster.report("bcd", 100.0)
    choice = cluster.router.choose(prompt("hot", 10), 100.0)
    assert (choice.reason == "fetch") == copied


def test_a_lost_replica_gets_nothing_until_it_reports(cluster: Cluster) -> None:
    lost = cluster.send(prompt("chat")).replica
    assert cluster.router.lost(lost) == ["1"]
    again = cluster.send(prompt("chat"))
    assert again.replica != lost
    cluster.report(lost, 1.0)
    choices = [cluster.router.choose(prompt(f"{number}"), 1.0) for number in range(50)]
    assert lost in {choice.replica for choice in choices if choice}


def test_nothing_is_expected_of_a_replica_that_was_lost(cluster: Cluster) -> None:
    lost = cluster.send(prompt("chat")).replica
    cluster.router.lost(lost)
    cluster.report(lost, 1.0)
    assert cluster.router.choose(prompt("chat"), 1.0).reason == "backlog"


def test_an_unanswered_request_survives_the_loss_of_one_replica(cluster: Cluster) -> None:
    """A second loss may be its own doing, and must not bring down a third replica."""
    sent = {f"{number + 1}": cluster.send(prompt(f"{number}")).replica for number in range(12)}
    lost = sent["1"]
    moved = cluster.router.lost(lost)
    assert moved == [request for request, replica in sent.items() if replica == lost]
    assert cluster.router.lost(lost) == [], "they are at no replica"
    choice = cluster.router.choose(prompt("0"), 0.0)
    cluster.router.sent("1", choice, 0.0)
    there = [request for request, replica in sent.items() if replica == choice.replica]
    assert cluster.router.lost(choice.replica) == there
    assert len(cluster.router._requests) == 11


def test_a_request_is_at_one_replica_and_ends_once(cluster: Cluster) -> None:
    choice = cluster.send(prompt("chat"))
    with pytest.raises(AssertionError, match="it is at a replica"):
        cluster.router.sent("1", choice, 0.0)
    assert cluster.send(prompt("chat")).replica == choice.replica
    for _ in range(2):
        cluster.router.ended("1")
    assert cluster.router.loads.known(0.0)[choice.replica].requests == 1
    cluster.router.answered("1")


def test_a_prompt_whose_answer_has_begun_is_no_work_any_more(cluster: Cluster) -> None:
    """The next report does not have it."""
    replica = cluster.send(prompt("chat"), now=0.0).replica
    cluster.router.answered("1")
    cluster.report(replica, 0.1, known=())
    assert cluster.router.loads.known(0.1)[replica].backlog_s == 0.0


def test_a_request_that_has_moved_does_not_move_again_after_a_replica_that_had_not_begun(
    cluster: Cluster,
) -> None:
    choice = cluster.send(prompt("chat"))
    for begun, moves in ((True, True), (False, True), (True, False)):
        assert cluster.router.failed("1", begun=begun) == moves
        cluster.router.sent("1", choice, 0.0)


def test_nothing_is_expected_of_a_replica_that_has_another_number(cluster: Cluster) -> None:
    cluster.send(prompt("chat"))
    cluster.held.sets = PeerSets()
    for name in "zdcba":
        cluster.held.sets.bit(name)
    assert cluster.router.choose(prompt("chat"), 0.0).reason == "backlog"


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 4]), st.lists(st.sampled_from([b"a", b"b"])), st.integers(1, 9)
        )
    ),
    st.integers(0, 10),
)
def test_a_chunk_is_expected_as_long_as_any_request_promises_it(
    added: list[tuple[int, list[bytes], int]], now: int
) -> None:
    expected = Expected()
    for bit, keys, until in added:
        expected.add(bit, keys, until)
    expected.expire(now)
    sets: dict[bytes, int] = {}
    for bit, keys, until in added:
        for key in keys if until > now else ():
            sets[key] = sets.get(key, 0) | bit
    assert expected.sets == sets
    expected.expire(10)
    assert not expected._until
    assert not expected._ends


def test_no_more_chunks_are_remembered_than_fit_into_memory() -> None:
    expected = Expected(bound=4)
    expected.add(1, [b"a", b"b"], 1.0)
    expected.add(1, [b"a", b"c"], 2.0)
    assert set(expected.sets) == {b"a", b"b", b"c"}
    expected.add(1, [b"d"], 3.0)
    assert set(expected.sets) == {b"a", b"c", b"d"}


BOUND, PATIENCE = 3, 10.0


def test_nobody_is_admitted_from_an_empty_queue() -> None:
    queue = Queue(BOUND, PATIENCE)
    assert queue.first == ""
    with pytest.raises(KeyError):
        queue.admit(0.0)


def test_retry_after_is_as_long_as_the_queue_will_take() -> None:
    assert Queue(BOUND, PATIENCE).retry_after(3.0) == 10  # nothing is known
    queue = Queue(100, 60.0)
    for number in range(24):
        queue.join(f"{number}", 0.0)
    for time in range(4):
        queue.admit(2.0 * time)
    assert queue.retry_after(8.0) == 40  # 20 requests, 2 s each
    assert queue.retry_after(800.0) == 60


class Waiting(RuleBasedStateMachine):
    """A list of requests and their times does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(BOUND, PATIENCE)
        self.model: list[tuple[str, float]] = []
        self.now = 0.0
        self.count = 0

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def one_joins(self) -> None:
        self.count += 1
        joined = self.queue.join(f"{self.count}", self.now)
        assert joined == (len(self.model) < BOUND)
        if joined:
            self.model.append((f"{self.count}", self.now))

    @rule(number=st.integers(0, 20))
    def one_leaves(self, number: int) -> None:
        self.queue.leave(f"{number}")
        self.model = [entry for entry in self.model if entry[0] != f"{number}"]

    @precondition(lambda self: self.model)
    @rule()
    def one_is_admitted(self) -> None:
        name, arrived = self.model.pop(0)
        assert self.queue.first == name
        assert self.queue.admit(self.now) == self.now - arrived

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model) <= BOUND
        assert self.queue.first == (self.model[0][0] if self.model else "")
        assert 1 <= self.queue.retry_after(self.now) <= PATIENCE


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=60, derandomize=True)
