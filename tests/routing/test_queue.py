"""Requests wait in order of arrival, and not too many of them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from xinference_xavier.routing.router import Queue

BOUND, PATIENCE = 3, 10.0


@pytest.fixture
def queue() -> Queue:
    queue = Queue(BOUND, PATIENCE)
    for time, request in enumerate("abc"):
        assert queue.join(request, time)
    return queue


def test_the_first_to_come_is_the_first_to_go(queue: Queue) -> None:
    waited = []
    while request := queue.first:
        waited.append((request, queue.admit(5.0)))
    assert waited == [("a", 5.0), ("b", 4.0), ("c", 3.0)]


def test_a_full_queue_refuses(queue: Queue) -> None:
    assert not queue.join("d", 3.0)
    queue.leave("b")
    assert queue.join("d", 3.0)
    assert [queue.admit(4.0) for _ in range(3)] == [4.0, 2.0, 1.0]


def test_nobody_is_admitted_from_an_empty_queue() -> None:
    queue = Queue(BOUND, PATIENCE)
    assert queue.first == ""
    with pytest.raises(KeyError):
        queue.admit(0.0)


def test_retry_after_is_as_long_as_the_queue_will_take(queue: Queue) -> None:
    assert queue.retry_after(3.0) == 10  # nothing is known
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
