"""A new replica has what its peers use most before it takes its first request, and takes it in time
whatever its peers do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    make_key,
    replicas,
    wait_until,
)
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.transfer import HotChunks
from xinference_xavier.replica.warm_join import Answer, chosen

ROWS = 64
SHORT = 1.0
LOAD = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)


def answer(letters: str, uses: tuple[int, ...], named: int = 0) -> Answer:
    keys = [letter.encode() for letter in letters]
    return Answer(HotChunks(b"".join(keys), uses, named), keys)


def letters(found: dict[str, list[bytes]]) -> dict[str, str]:
    return {donor: b"".join(keys).decode() for donor, keys in found.items()}


def test_uses_at_all_peers_count_together() -> None:
    answers = {"one": answer("abxy", (3, 3, 2, 2)), "two": answer("xy", (2, 2))}
    assert letters(chosen(answers, 2)) == {"one": "xy"}
    assert letters(chosen(answers, 4)) == {"one": "xyab"}


def test_named_prefixes_come_first() -> None:
    answers = {"one": answer("ab", (9, 9)), "two": answer("xy", (0, 0), named=2)}
    assert letters(chosen(answers, 3)) == {"two": "xy", "one": "a"}


@contextmanager
def started(
    tracker: TrackerProcess, name: str, transport: str = "auto", **options: object
) -> Iterator[ReplicaProcess]:
    with replicas(tracker.address, {name: transport}, rows=ROWS, **options) as (replica,):
        yield replica


@contextmanager
def new_replica(tracker: TrackerProcess, name: str, **options: object) -> Iterator[ReplicaProcess]:
    replica = ReplicaProcess(name, tracker.address, rows=ROWS, **options)
    try:
        wait_until(replica.is_warm, f"{name} takes requests")
        yield replica
    finally:
        if replica.process.is_alive():
            replica.stop()
        replica.kill()


def offer(tracker: TrackerProcess, donor: ReplicaProcess, keys: list[bytes], uses: int = 2) -> None:
    """Return when peers can know of it."""
    before = tracker.holdings()
    donor.store(keys)
    donor.use([keys] * uses)
    wait_until(lambda: tracker.holdings() >= before + len(keys), "it is published")


@pytest.fixture
def tracker() -> Iterator[TrackerProcess]:
    process = TrackerProcess()
    yield process
    process.kill()


@pytest.mark.process
class TestReplicas:
    def test_a_new_replica_has_the_hottest_prefixes(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            hot, cold = fresh_keys(20), fresh_keys(10)
            offer(tracker, donor, hot, uses=2)
            offer(tracker, donor, cold, uses=1)
            with new_replica(tracker, "new") as new:
                assert sorted(new.held()) == sorted(hot)
                assert new.wrong_rows() == []
                assert new.counts().pinned == 0
                assert new.stats()["warm_join"]["chunks"] == len(hot)
                (line,) = (text for _, text in new.logged() if text.startswith("warm join:"))
                assert "chunks=20" in line
                wait_until(lambda: donor.holders(hot[-1]) == ("new",), "peers can fetch them")

    def test_only_free_rows_are_filled_and_with_whole_prefixes(
        self, tracker: TrackerProcess
    ) -> None:
        with started(tracker, "donor") as donor:
            prefixes = [fresh_keys(15) for _ in range(4)]
            for uses, prefix in enumerate(prefixes):
                offer(tracker, donor, prefix, uses=2 + uses)
            small = ReplicaProcess("small", tracker.address, rows=20)
            try:
                wait_until(small.is_warm, "it takes requests")
                hottest = [*prefixes[3], *prefixes[2]]
                assert sorted(small.held()) == sorted(hottest[:20])
            finally:
                small.stop()
                small.kill()

    def test_without_anything_to_fetch_it_does_not_wait(self, tracker: TrackerProcess) -> None:
        with started(tracker, "first") as first:
            assert first.stats()["warm_join"]["seconds"] < SHORT
            with new_replica(tracker, "second") as second:
                assert second.stats()["warm_join"] == {
                    "chunks": 0,
                    "seconds": pytest.approx(0.0, abs=SHORT),
                    "failures": 0,
                }

    def test_it_can_be_switched_off(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            with new_replica(tracker, "new", warm_join=0.0) as new:
                wait_until(lambda: new.holders(keys[0]) == ("donor",), "it knows what is held")
                assert new.held() == []

    def test_it_takes_no_request_before(self, tracker: TrackerProcess) -> None:
        """A router sends requests to replicas that report their load. Here the donor hangs."""
        with started(tracker, "donor", "tests.faults:StallingGloo") as donor:
            keys = fresh_keys(10)
            offer(tracker, donor, keys)
            new = ReplicaProcess(
                "new", tracker.address, rows=ROWS, transport="gloo", warm_join=SHORT
            )
            try:
                new.report_load(LOAD)
                wait_until(lambda: new.filled() == ROWS_BEFORE_STALL, "some have arrived")
                assert not new.is_warm()
                assert tracker.loads() == []
                wait_until(new.is_warm, "it takes requests, in time")
                wait_until(lambda: tracker.loads() == ["new"], "routers know it")
                wait_until(
                    lambda: new.counts().filling + new.counts().quarantined == 0, "rows are free"
                )
                assert new.wrong_rows() == []
            finally:
                new.stop()
                new.kill()

    def test_a_peer_that_cannot_be_trusted_is_not_waited_for(self, tracker: TrackerProcess) -> None:
        """Their weights differ, which they find out by a chunk that both have computed."""
        canary = make_key(-1)
        with started(tracker, "donor", factor=1.0) as donor:
            keys = fresh_keys(5)
            donor.store([canary])
            offer(tracker, donor, keys)
            new = ReplicaProcess("new", tracker.address, rows=ROWS, factor=2.0, warm_join=60.0)
            try:
                wait_until(lambda: new.all_holders(keys[0]) == ("donor",), "it knows what is held")
                assert not new.is_warm()
                new.store([canary])
                wait_until(new.is_warm, "it takes requests")
                assert new.held() == [canary]
            finally:
                new.stop()
                new.kill()

    def test_a_peer_that_hangs_costs_no_more_than_the_limit(self, tracker: TrackerProcess) -> None:
        with started(tracker, "donor") as donor:
            keys = fresh_keys(5)
            offer(tracker, donor, keys)
            donor.send_signal(signal.SIGSTOP)
            try:
                with new_replica(tracker, "new", warm_join=SHORT) as new:
                    assert new.held() == []
                    assert new.stats()["warm_join"]["failures"] == 1
            finally:
                donor.send_signal(signal.SIGCONT)
