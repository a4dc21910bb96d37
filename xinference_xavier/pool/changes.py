"""Which rows lookups find, or no longer find, since somebody last took the changes.

A row that came and went meanwhile is no change. So there are at most two changes for each slot of
the pool, even if nobody ever takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xinference_xavier.pool.pool import Row


class Changes:
    """`Pool` calls all methods under its lock."""

    def __init__(self) -> None:
        self._changes: dict[bytes, tuple[bytes, bool]] = {}  # by the rows' keys

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, rows: Iterable[Row], held: bool) -> None:
        """Lookups find these rows from now on, or no longer, in turn for each key."""
        for row in rows:
            if self._changes.pop(row.key, None) is None:  # else it is as it was before
                self._changes[row.key] = (row.alias or row.key, held)

    def restart(self, rows: Iterable[Row]) -> None:
        """Whoever takes the changes has forgotten all rows. Lookups find these."""
        self._changes = {row.key: (row.alias or row.key, True) for row in rows}

    def take(self, later: Set[bytes]) -> Iterable[tuple[bytes, bool]]:
        """vLLM's keys of the rows, and whether they are held. Held ones with a key in `later` are
        left for another call."""
        taken, self._changes = self._changes, {}
        for key in taken.keys() & later:
            if taken[key][1]:
                self._changes[key] = taken.pop(key)
        return taken.values()
