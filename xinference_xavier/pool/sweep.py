"""Operations on all rows of a pool, a portion at a time.

Between two portions other threads run, or the scheduler thread would wait for the pool's lock, or
5 ms for Python's. It must not call these functions itself.
"""

import time
from collections.abc import Iterator

from xinference_xavier.pool.pool import Pool, Row, RowState

PORTION = 1024  # rows
_PAUSE = 1e-6  # seconds


def shared_keys(pool: Pool) -> list[bytes]:
    """Keys of all rows that peers may fetch: READY, with a checksum."""
    return [
        row.key
        for rows in _portions(pool)
        for row in rows
        if row.state is RowState.READY and row.checksum is not None
    ]


def flush(pool: Pool, origin: str | None = None) -> list[bytes]:
    """Make lookups miss every READY row, or those from `origin`; returns their keys."""
    return [
        row.key
        for rows in _portions(pool)
        for row in pool.flush(row for row in rows if origin in (None, row.origin))
    ]


def _portions(pool: Pool) -> Iterator[list[Row]]:
    rows = pool.rows()
    for start in range(0, len(rows), PORTION):
        yield rows[start : start + PORTION]
        time.sleep(_PAUSE)
