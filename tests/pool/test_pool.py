"""The pool against a model that is too simple to be wrong, and its rules one by one."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, Row, RowState, flush, protect, shared_keys

SLOTS = 6
KEYS = st.sampled_from([bytes([n]) for n in range(12)])
KEY_LISTS = st.lists(KEYS, max_size=8, unique=True)
CHECKSUMS = st.integers(0, 9)
STEPS = 50


class PoolAgainstModel:
    """The model: a list of rows per state; `idle` has the least recently used first, of the READY
    ones. No row here is redundant or protected; see `test_eviction.py` for those. `draw` decides
    what is left to chance."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.pool = Pool(SLOTS)
        self.writing: list[Row] = []  # reserved, and neither committed nor aborted yet
        self.ended: list[Row] = []  # aborted
        self.filling: list[Row] = []
        self.idle: list[Row] = []
        self.flushed: list[Row] = []  # unpinned
        self.pinned: list[Row] = []  # once per pin
        self.quarantined: list[Row] = []  # without a reader

    def go_on(self) -> None:
        """One of the events that are possible now, more often those that fill the pool."""
        steps = [*6 * [self.reserve], *2 * [self.pin], self.borrow, self.touch, self.set_checksum]
        steps += [self.flush, self.reset]
        if self.writing:
            steps = [*12 * [self.commit], self.abort, self.quarantine, *steps]
        if self.pinned:
            steps += 4 * [self.unpin]
        if self.pinned or self.ended:
            steps += [self.pin_row, self.share_row, self.end_what_is_not_being_written]
        self.draw(st.sampled_from(steps))()

    def one_of(self, rows: Sequence[Row]) -> Row:
        row: Row = self.draw(st.sampled_from(rows))
        return row

    def held(self) -> set[bytes]:
        return {row.key for row in (*self.filling, *self.idle, *self.live())}

    def live(self) -> list[Row]:
        """Pinned rows that no reset has voided."""
        states = (RowState.READY, RowState.FLUSHED)
        return [row for row in dict.fromkeys(self.pinned) if row.state in states]

    def ready(self) -> list[Row]:
        return [row for row in (*self.idle, *self.live()) if row.state is RowState.READY]

    def in_use(self) -> set[int]:
        rows = (*self.filling, *self.idle, *self.pinned, *self.quarantined)
        return {row.slot for row in own(rows)}

    def borrow(self) -> None:
        keys, held = self.draw(KEY_LISTS), self.held()
        rows = self.pool.borrow(keys)
        self.flushed = [row for row in self.flushed if row.state is RowState.FLUSHED]
        assert [row.key for row in rows] == [key for key in keys if key not in held]
        assert all(row.is_lent and row.slot >= SLOTS for row in rows), "it takes no slot"
        self.filling += rows
        self.writing += rows

    def reserve(self) -> None:
        some = st.lists(KEYS, unique=True) | st.permutations([row.key for row in self.idle])
        keys, before = self.draw(KEY_LISTS), self.draw(st.none() | some)
        prefix = [] if before is None else [*dict.fromkeys([*before, *keys])]
        held, in_use = self.held(), self.in_use()
        free = SLOTS - len(in_use)
        wanted = [key for key in keys if key not in held]
        assert [not self.pool.holds(key) for key in keys] == [key in wanted for key in keys]
        kept = [row for row in self.idle if row.key in prefix]
        self.idle = [row for row in self.idle if row not in kept]
        self.idle += sorted(kept, key=lambda row: prefix.index(row.key), reverse=True)
        victims = list(takewhile(lambda row: row.key not in prefix, self.idle))
        victims = victims[: max(0, len(wanted) - free)]
        rows, evicted = self.pool.reserve(keys, prefix)
        assert evicted == [row.key for row in victims], "the least recently used, and none to keep"
        del self.idle[: len(victims)]
        expected = wanted[: free + len(victims)]
        assert [row.key for row in rows] == expected, "in order, dropped from the tail"
        taken = {row.slot for row in rows}
        assert len(taken) == len(rows)
        assert not taken & self.in_use(), "a slot has two rows"
        self.flushed = [row for row in self.flushed if row.state is RowState.FLUSHED]
        assert not taken & {row.slot for row in self.flushed}
        assert not set(expected) & {row.key for row in self.flushed}
        self.filling += rows
        self.writing += rows

    def commit(self) -> None:
        row, pins = self.one_of(self.writing), self.draw(st.sampled_from([0, 0, 0, 1, 2]))
        checksum = self.draw(st.none() | CHECKSUMS)
        if row.is_lent:
            pins, checksum = max(1, pins), None
        live = row in self.filling
        assert self.pool.commit(row, checksum, pins) == live
        if not live:  # there was a reset or a quarantine
            return
        self.writing.remove(row)
        self.filling.remove(row)
        self.pinned += [row] * pins
        if not pins:
            self.idle.append(row)
        assert self.pool.lookup(row.key) is row

    def abort(self) -> None:
        row = self.one_of(self.writing)
        self.writing.remove(row)
        self.ended.append(row)
        self.pool.abort(row)
        if row in self.filling:
            self.filling.remove(row)
        elif row in self.quarantined:
            self.quarantined.remove(row)
        assert row.state is RowState.FREE

    def quarantine(self) -> None:
        row = self.one_of(self.writing)
        self.pool.quarantine(row)
        if row in self.filling:
            self.filling.remove(row)
            self.quarantined.append(row)

    def end_what_is_not_being_written(self) -> None:
        """It does no harm, even if another row has the slot by now."""
        row = self.one_of([*self.pinned, *self.ended])
        self.pool.abort(row)
        self.pool.quarantine(row)
        assert not self.pool.commit(row)

    def pin(self) -> None:
        """Flushed rows, too: the scheduler pins by key what it looked up in the same step."""
        here = st.permutations([row.key for row in (*self.idle, *self.flushed)])
        keys, shared = self.draw(here | KEY_LISTS), self.draw(st.booleans())
        run = self.pool.pin_shared(keys) if shared else self.pool.pin(keys)
        rows = self.ready() if shared else [*self.idle, *self.flushed, *self.live()]
        found = {row.key: row for row in rows if not shared or row.checksum is not None}
        assert run == [found[key] for key in takewhile(found.__contains__, keys)]
        for row in run:
            self.pins(row)

    def pins(self, row: Row) -> None:
        for unpinned in (self.idle, self.flushed):
            if row in unpinned:
                unpinned.remove(row)
        self.pinned.append(row)

    def pin_row(self) -> None:
        """Any handle, old or new: only a READY row can be pinned."""
        row = self.one_of([*self.pinned, *self.ended])
        ready = row in self.ready()
        assert self.pool.pin_row(row) == ready
        if ready:
            self.pins(row)

    def share_row(self) -> None:
        row = self.one_of([*self.pinned, *self.ended])
        if row.is_lent:  # only stored rows are shared
            return
        assert self.pool.set_checksum(row, self.draw(CHECKSUMS)) == (row in self.ready())

    def unpin(self) -> None:
        row = self.one_of(self.pinned)
        self.pool.unpin([row])
        self.pinned.remove(row)
        if row not in self.pinned and row.is_lent:
            assert row.state is RowState.FREE, "whoever borrowed it gives it back"
            assert self.pool.lookup(row.key) is not row
        if row not in self.pinned and row.state is RowState.READY:
            self.idle.append(row)
        if row not in self.pinned and row.state is RowState.FLUSHED:
            self.flushed.append(row)

    def touch(self) -> None:
        keys = self.draw(KEY_LISTS)
        self.pool.touch(keys)
        for key in keys:
            for row in self.idle:
                if row.key == key:
                    self.idle.remove(row)
                    self.idle.append(row)
                    break

    def set_checksum(self) -> None:
        row, checksum = self.pool.lookup(self.draw(KEYS)), self.draw(CHECKSUMS)
        if row is not None and not row.is_lent:
            assert self.pool.set_checksum(row, checksum)
            assert row.checksum == checksum

    def flush(self) -> None:
        rows = self.ready()
        assert set(flush(self.pool)) == {row.key for row in rows}
        assert all(row.state is RowState.FLUSHED for row in rows)
        self.flushed += self.idle
        self.idle = []

    def reset(self) -> None:
        self.pool.reset()
        self.quarantined += self.filling
        self.filling, self.idle, self.flushed = [], [], []
        assert not shared_keys(self.pool)

    def check(self) -> None:
        """Counts and lookups agree with the model."""
        self.pool.check_integrity()
        assert all(row.state is RowState.FILLING for row in self.filling)
        assert all(row.state is RowState.READY for row in self.idle)
        live, ready = self.live(), self.ready()
        counts = self.pool.counts()
        pinned = set(self.pinned)
        assert counts.rows == SLOTS
        assert counts.ready == len(own(ready))
        assert counts.filling == len(own(self.filling))
        assert counts.pinned == len(own(pinned))
        void = {*own(pinned)} - {*live}
        assert counts.quarantined == len(own(self.quarantined)) + len(void)
        for row in (*self.idle, *self.flushed, *live):
            assert self.pool.lookup(row.key) is (row if row in ready else None)
        for row in self.filling:
            assert self.pool.lookup(row.key) is None
            assert self.pool.holds(row.key)
        shared = {row.key for row in ready if row.checksum is not None}
        assert set(shared_keys(self.pool)) == shared


def own(rows: Iterable[Row]) -> list[Row]:
    """Without those that a neighbour lends."""
    return [row for row in rows if not row.is_lent]


@settings(max_examples=100, derandomize=True)
@given(st.data())
def test_the_pool_does_what_the_model_does(data: st.DataObject) -> None:
    model = PoolAgainstModel(data.draw)
    for _ in range(STEPS):
        model.go_on()
        model.check()


def ready(pool: Pool, *keys: bytes) -> list[Row]:
    rows = pool.reserve(keys).rows
    for row in rows:
        assert pool.commit(row, checksum=0)
    return rows


def test_a_few_rows_are_evicted_before_they_are_needed() -> None:
    pool = Pool(192)
    keys = [b"%d" % number for number in range(192)]
    ready(pool, *keys)
    assert pool.evict_ahead(most=2) == keys[:2]
    assert pool.evict_ahead(most=2) == keys[2:3], "one in 64 is free now"
    assert pool.evict_ahead(most=2) == []
    assert pool.counts().ready == 189
    assert pool.reserve([b"a", b"b", b"c", b"d"]).evicted == keys[3:4]


def test_flushed_rows_go_before_they_are_needed_too() -> None:
    pool = Pool(192)
    rows = ready(pool, *(b"%d" % number for number in range(192)))
    pool.flush(rows[100:102])
    assert pool.evict_ahead(most=3) == [b"0"]
    assert [row.state for row in rows[100:102]] == [RowState.FREE, RowState.FREE]


def test_a_prefix_is_evicted_from_its_end() -> None:
    pool = Pool(4)
    ready(pool, b"1", b"2", b"3")
    ready(pool, b"other")
    pool.unpin(pool.pin_shared([b"1", b"2", b"3"]))
    assert pool.reserve([b"a", b"b", b"c"]).evicted == [b"other", b"3", b"2"]


def test_a_row_that_a_peer_copies_is_an_original() -> None:
    """At most one of two replicas may evict a row because the other holds it."""
    pool = Pool(3)
    rows = ready(pool, b"a", b"b", b"c")
    for row in rows:
        row.replicated_from = "peer"
    pool.unpin(pool.pin([b"a"]))
    pool.unpin(pool.pin_shared([b"b"]))
    assert [row.replicated_from for row in rows] == ["peer", None, "peer"]


def test_whoever_must_not_evict_takes_only_free_slots() -> None:
    """Nor those of flushed rows, which the evicting thread may have looked up."""
    pool = Pool(4)
    for row in pool.reserve([b"a", b"b"]).rows:
        pool.commit(row)
    flush(pool)
    rows, evicted = pool.reserve([b"a", b"c", b"d", b"e"], redundant=None)
    assert [row.key for row in rows] == [b"c", b"d"]
    assert evicted == []
    assert len(pool.reserve([b"x", b"y", b"z"]).rows) == 2, "flushed rows go when others need them"


# -- all rows of a pool ----------------------------------------------------------------------


def test_only_rows_from_one_donor_are_flushed() -> None:
    pool = Pool(3)
    rows = ready(pool, b"a", b"b", b"c")
    rows[1].origin = "peer"
    assert flush(pool, lambda row: row.origin == "peer") == [b"b"]
    assert [row.key for row in rows if pool.lookup(row.key)] == [b"a", b"c"]
    assert pool.reserve([b"d", b"e"]).evicted == [b"a"]


def test_others_get_their_turn_while_all_rows_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler thread must not wait for tens of thousands of rows."""
    pool = Pool(6)
    ready(pool, b"a", b"b", b"c", b"d", b"e", b"f")
    ready_then: list[int] = []

    def pause(seconds: float) -> None:
        ready_then.append(pool.counts().ready)
        pool.reserve([b"%d" % len(ready_then)])

    monkeypatch.setattr("xinference_xavier.pool.pool.PORTION", 2)
    monkeypatch.setattr("time.sleep", pause)
    assert shared_keys(pool) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert ready_then == [6, 5, 4], "some were evicted in the pauses"
    assert flush(pool) == [b"d", b"e", b"f"]
    assert ready_then[3:] == [1, 0, 0]


def test_rows_are_protected_now_or_later() -> None:
    pool = Pool(3)
    ready(pool, b"a", b"b")
    protect(pool, [b"a", b"c"], Protection.FIRM)
    ready(pool, b"c")
    assert pool.reserve([b"d", b"e"]).evicted == [b"b"]
    protect(pool, [b"a"], Protection.NONE)
    assert pool.reserve([b"e"]).evicted == [b"a"]
