"""Rows that vLLM's workers are writing (stores) or reading (loads).

Belongs to the scheduler thread. After a reset vLLM no longer reports the jobs under way, so their
rows stay in quarantine until a later job ends, as jobs of one direction end in order, or until a
step that began with a flush of all jobs has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from xinference_xavier.pool.pool import Pool, Row


class Jobs:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._stores: dict[tuple[str, bytes], Row] = {}  # by request and vLLM's key
        self._void: set[tuple[str, bytes]] = set()  # of the stores
        self._loads: dict[str, list[Row]] = {}  # by request, pinned
        self._stale_stores: list[Row] = []
        self._stale_loads: list[Row] = []

    def __bool__(self) -> bool:
        return bool(self._stores or self._loads)

    def begin_store(self, req_id: str, rows: Iterable[tuple[bytes, Row]]) -> None:
        """`rows` come with vLLM's keys."""
        self._stores.update(((req_id, key), row) for key, row in rows)

    def void_store(self, req_id: str, keys: Iterable[bytes]) -> None:
        """These rows do not get their chunks' bytes."""
        self._void.update((req_id, key) for key in keys)

    def end_store(self, req_id: str, keys: Iterable[bytes], success: bool) -> list[Row]:
        """Returns the rows that became READY."""
        self.free_stale()
        ready = []
        for key in keys:
            row = self._stores.pop((req_id, key))
            if not success or (req_id, key) in self._void:
                self._void.discard((req_id, key))
                self._pool.abort(row)
            elif self._pool.commit(row):
                ready.append(row)
        return ready

    def take_store(self, req_id: str, keys: Iterable[bytes]) -> list[Row]:
        """Like `end_store`, for rows that no lookup may find: they are quarantined until the caller
        aborts them."""
        self.free_stale()
        taken = []
        for key in keys:
            row = self._stores.pop((req_id, key))
            self._pool.quarantine(row)
            if (req_id, key) in self._void:
                self._void.discard((req_id, key))
                self._pool.abort(row)
            else:
                taken.append(row)
        return taken

    def begin_load(self, req_id: str, rows: list[Row]) -> None:
        """`rows` must be pinned."""
        self._loads[req_id] = rows

    @property
    def requests_loading(self) -> Set[str]:
        return self._loads.keys()

    def loading(self, req_id: str) -> Sequence[Row]:
        return self._loads.get(req_id, ())

    def end_load(self, req_id: str) -> None:
        self.free_stale()
        self._pool.unpin(self._loads.pop(req_id))

    def reset(self) -> None:
        """vLLM will not report the jobs under way."""
        self._stale_stores += self._stores.values()
        self._stores.clear()
        self._void.clear()
        for rows in self._loads.values():
            self._stale_loads += rows
        self._loads.clear()

    def free_stale(self) -> None:
        """No job from before the last reset is under way any more."""
        self._pool.abort(*self._stale_stores)
        self._pool.unpin(self._stale_loads)
        self._stale_stores, self._stale_loads = [], []
