"""Operations on all rows of a pool."""

import pytest

from tests.pool.test_pool import ready
from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, flush, protect, shared_keys


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
