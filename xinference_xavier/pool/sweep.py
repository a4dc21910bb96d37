"""Operations on many rows of a pool, a portion at a time.

Between two portions other threads run, or the scheduler thread would wait for the pool's lock, or
5 ms for Python's. It must not call these functions itself.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from xinference_xavier.pool.eviction import Protection
from xinference_xavier.pool.pool import Pool, Row, RowState

PORTION = 1024  # rows
_PAUSE = 1e-6  # seconds
_T = TypeVar("_T")


def shared_keys(pool: Pool) -> list[bytes]:
    """Keys of all rows that peers may fetch: READY, with a checksum."""
    return [
        row.key
        for rows in _in_portions(pool.rows())
        for row in rows
        if row.state is RowState.READY and row.checksum is not None
    ]


def flush(pool: Pool, of: Callable[[Row], bool] = lambda _: True) -> list[bytes]:
    """Make lookups miss every READY row, or those for which `of` is true; returns their keys."""
    return [
        row.key
        for rows in _in_portions(pool.rows())
        for row in pool.flush(row for row in rows if of(row))
    ]


def protect(pool: Pool, keys: Sequence[bytes], how: Protection) -> None:
    for portion in _in_portions(keys):
        pool.protect(portion, how)


def _in_portions(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]
        time.sleep(_PAUSE)
