"""A backlog is what was reported, less the time since, plus what was sent since."""

import math

import numpy as np
import pytest

from tests.routing.holdings import Held
from xinference_xavier.mirror import PIECE, Mirror, PeerSets
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update, pack
from xinference_xavier.routing.load import IN_TRANSIT, Loads, Rates, Report
from xinference_xavier.stats.schema import KnownLoad

RATES = Rates(0.001)


@pytest.fixture
def loads() -> Loads:
    return Loads(Held({}))


def report(made: float, seconds: float | None = 0.0, requests: int = 0, **fields: object) -> Report:
    return Report(made, 1000, seconds, requests, **{"rates": RATES, **fields})  # type: ignore[arg-type]


def backlog(loads: Loads, name: str, now: float) -> float:
    return float(loads.backlog(now)[loads.names.index(name)])


def test_reported_work_takes_its_time(loads: Loads) -> None:
    loads.report("a", report(10.0, 3.0))
    assert [backlog(loads, "a", now) for now in (10.0, 12.0, 15.0)] == [3.0, 1.0, 0.0]


def test_what_was_sent_since_a_report_is_added(loads: Loads) -> None:
    loads.report("a", report(10.0, 3.0))
    loads.sent("a", "1", 2.0, 100, now=11.0)
    assert backlog(loads, "a", 11.0) == 4.0
    loads.sent("a", "2", 2.0, 100, now=17.0)  # when it had been idle
    assert backlog(loads, "a", 17.0) == 2.0


def test_a_report_replaces_what_it_includes_and_nothing_else(loads: Loads) -> None:
    loads.report("a", report(10.0))
    loads.sent("a", "3", 5.0, 100, now=10.5)
    loads.sent("a", "4", 1.0, 100, now=12.0 - IN_TRANSIT / 2)
    loads.report("a", report(12.0, 2.0))
    assert backlog(loads, "a", 12.0) == pytest.approx(3.0)


def test_a_late_report_is_ignored(loads: Loads) -> None:
    loads.report("a", report(10.0, 3.0))
    loads.report("a", report(9.0, 100.0))
    assert backlog(loads, "a", 10.0) == 3.0


def test_a_replica_that_does_not_report_gets_nothing(loads: Loads) -> None:
    loads.report("a", report(10.0))
    loads.report("b", report(15.0))
    assert backlog(loads, "a", 19.9) == 0.0
    assert backlog(loads, "a", 20.0) == math.inf
    assert backlog(loads, "b", 20.0) == 0.0
    assert [*loads.known(20.0)] == ["b"]
    loads.report("a", report(20.0))
    assert backlog(loads, "a", 20.0) == 0.0


def test_a_replica_at_its_limit_gets_nothing_until_a_request_ends(loads: Loads) -> None:
    loads.report("a", report(10.0), limit=2)
    loads.sent("a", "5", 0.0, 1, now=10.0)
    assert backlog(loads, "a", 10.0) == 0.0
    loads.sent("a", "6", 0.0, 1, now=10.0)
    assert backlog(loads, "a", 10.0) == math.inf
    loads.ended("a", "6")
    assert backlog(loads, "a", 10.0) == 0.0


def test_it_says_what_each_replica_has_to_do() -> None:
    """Only of those that report. One at its limit has work, too."""
    loads = Loads(Held({}))
    loads.report("silent", report(1.0, 100.0))
    loads.report("a", report(10.0, 3.0, requests=2), limit=3)
    loads.report("b", report(10.0))
    loads.sent("a", "1", 2.0, 100, now=11.0)
    loads.ended("b", "never sent")
    assert loads.known(11.0) == {
        "a": KnownLoad(4.0, 3, accepts=False),
        "b": KnownLoad(0.0, 0, accepts=True),
    }


def test_requests_of_others_count_too(loads: Loads) -> None:
    loads.report("a", report(10.0))
    loads.sent("a", "7", 0.0, 1, now=10.0)
    loads.report("a", report(12.0, requests=3))
    loads.renumber()
    assert loads.running.tolist() == [3]
    loads.ended("a", "7")
    assert loads.running.tolist() == [2]


def test_a_request_counts_until_the_replica_knows_it(loads: Loads) -> None:
    """It may wait before the scheduler for longer than any time that could be assumed."""
    loads.report("a", report(10.0, 0.0, known=()))
    loads.sent("a", "first", 3.0, 100, now=10.0)
    loads.sent("a", "second", 4.0, 100, now=10.0)
    loads.report("a", report(12.0, 1.0, known=("first", "another")))
    assert backlog(loads, "a", 12.0) == 1.0 + 4.0


def test_a_request_that_was_answered_counts_no_longer(loads: Loads) -> None:
    """Whatever the replica calls it."""
    loads.report("a", report(10.0, 0.0, known=()))
    loads.sent("a", "first", 3.0, 100, now=10.0)
    loads.computed("a", "first")
    assert backlog(loads, "a", 10.0) == 3.0, "the replica did not report since"
    loads.report("a", report(12.0, 1.0, known=("its-own-name",)))
    assert backlog(loads, "a", 12.0) == 1.0


def test_room_is_what_is_free_less_what_waits_or_was_sent(loads: Loads) -> None:
    loads.report("a", report(10.0, free_tokens=5000))
    loads.sent("a", "8", 1.0, 500, now=11.0)
    loads.renumber()
    assert loads.room.tolist() == [3500]


def test_a_replica_without_rates_is_taken_for_a_typical_one(loads: Loads) -> None:
    loads.report("new", report(9.0, None, rates=None))
    assert backlog(loads, "new", 9.0) == 0.0  # nobody knows
    loads.report("a", report(10.0, rates=Rates(0.002)))
    loads.report("b", report(10.0, rates=Rates(0.004)))
    assert backlog(loads, "new", 9.0) == pytest.approx(3.0)


def test_what_is_typical_changes_with_what_others_measure(loads: Loads) -> None:
    loads.report("new", report(9.0, rates=None))
    loads.report("a", report(10.0, rates=Rates(0.002)))
    loads.report("b", report(10.0, rates=Rates(0.004)))
    loads.report("a", report(11.0, rates=Rates(0.006, 0.1)))
    loads.renumber()
    assert pytest.approx(np.array([[0.005, 0.05], [0.006, 0.1], [0.004, 0.0]])) == loads.rates[:2].T
    loads.forget("a")
    loads.renumber()
    assert loads.rates[0, loads.number("new")] == pytest.approx(0.004)


def test_loads_follow_the_numbers_of_the_index() -> None:
    index = Held({})
    loads = Loads(index)
    loads.report("a", report(10.0, 1.0))
    loads.report("b", report(10.0, 2.0))
    loads.renumber()
    assert (loads.number("a"), loads.number("b")) == (0, 1)
    index.sets.bit("a")
    index.sets.bit("b")
    assert not loads.renumber()  # nobody else has an old number
    index.sets.bit("c")
    assert not loads.renumber()
    index.sets.forget(["a"])
    index.sets.bit("d")
    loads.forget("a")
    assert loads.renumber()
    assert (loads.names[1], loads.backlog(10.0)[1]) == ("b", 2.0)
    assert loads.number("a") is None
    index.sets = PeerSets()
    assert loads.renumber()
    assert backlog(loads, "b", 10.0) == 2.0


def test_a_number_without_a_replica_gets_nothing() -> None:
    index = Held({})
    index.sets.bit("silent")
    loads = Loads(index)
    loads.report("a", report(10.0))
    assert loads.backlog(10.0).tolist() == [math.inf, 0.0]


def test_a_replica_without_a_number_costs_the_index_nothing() -> None:
    """One of another namespace reports its load, too. The mirror would forget its number with each
    update, in a pass over all keys."""
    held = [b"key %08d" % number for number in range(10 * PIECE)]
    mirror = Mirror("")
    loads = Loads(mirror)
    members = (Member("a", "127.0.0.1:1"),)
    changes = (Change("a", 1, pack(held), b"", False),)
    mirror.apply(Update(1, "epoch", True, Settings(), 12, members, changes))
    for name in ("elsewhere", "a"):
        loads.report(name, report(10.0))
    for revision in (2, 3):
        assert sorted(loads.backlog(10.0).tolist()) == [0.0, 0.0]
        key = b"new %08d" % revision
        changes = (Change("a", revision, pack([key]), b"", False),)
        update = Update(revision, "epoch", False, Settings(), 12, (), changes)
        assert [*mirror.apply_in_pieces(update)] == []
        assert loads.names[mirror.full_set(key).bit_length() - 1] == "a"


def test_a_replica_that_drains_gets_nothing_until_it_stays(loads: Loads) -> None:
    loads.report("a", report(10.0))
    loads.close("a", 12.0)
    loads.drain("a", True)
    loads.report("a", report(13.0))
    assert (backlog(loads, "a", 13.0), loads.works(13.0)) == (math.inf, False)
    loads.drain("a", False)
    assert (backlog(loads, "a", 13.0), loads.works(13.0)) == (0.0, True)
    assert (backlog(loads, "a", 11.0), loads.works(11.0)) == (math.inf, False), "it is closed"
