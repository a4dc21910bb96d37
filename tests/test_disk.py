"""A store gives back the rows that were written to it, whatever happens to its files: or none."""

import mmap
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest

from xinference_xavier.disk import (
    WEEK,
    Store,
    StoreGoneError,
    discard,
    folder_of,
    is_damage,
    locked,
    remove,
    remove_unused,
    summaries,
)
from xinference_xavier.pool.region import checksum

ROW_BYTES = 8192
SLOTS = 4
ROW = np.frombuffer(mmap.mmap(-1, ROW_BYTES), np.uint8)
"""Memory that begins with a page, as files opened past the page cache require."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(36)


class NumberedStore(Store):
    """Its chunks have numbers, and the bytes of their rows tell them."""

    def __init__(self, folder: Path, clock: Clock, slots: int = SLOTS) -> None:
        self.clock = clock
        super().__init__(folder, ROW_BYTES, slots * ROW_BYTES + ROW_BYTES // 2, clock=clock)

    def another(self, slots: int = SLOTS) -> Self:
        """A store in the same folder."""
        return type(self)(self.folder, self.clock, slots)

    def save(self, *numbers: int) -> list[int]:
        """Write these rows; returns their slots."""
        slots = self.reserve(len(numbers))
        entries = []
        for slot, number in zip(slots, numbers, strict=False):
            ROW[:] = number
            self.write(slot, ROW.data)
            entries.append((slot, key(number), checksum(ROW.data, key(number))))
        self.commit(entries)
        self.refresh()
        return slots

    def reads(self, number: int) -> bool:
        """Reads and verifies a row as a replica does. False if its bytes are missing or wrong."""
        place = self.index[key(number)]
        ROW[:] = 0
        complete = self.read(place.slot, ROW.data)
        found = complete and checksum(ROW.data, key(number)) == place.checksum
        assert not found or np.all(number == ROW)
        return found

    def saved(self) -> set[int]:
        self.refresh()
        return {int.from_bytes(each) for each in self.index}


@pytest.fixture
def store(tmp_path: Path) -> NumberedStore:
    return NumberedStore(folder_of(tmp_path, "namespace", ROW_BYTES), Clock())


def test_a_row_is_there_after_a_restart(store: NumberedStore) -> None:
    store.save(1, 2)
    store.close()
    again = store.another()
    assert again.saved() == {1, 2}
    assert again.reads(1)
    assert again.reads(2)


def test_others_find_it_when_they_look(store: NumberedStore) -> None:
    other = store.another()
    store.save(1)
    assert other.index == {}
    other.refresh()
    assert other.reads(1)


def test_the_least_recently_used_goes_first_and_the_limit_holds(store: NumberedStore) -> None:
    store.save(1, 2, 3, 4)
    store.touch([key(1)])
    store.save(5, 6)
    assert store.saved() == {1, 4, 5, 6}
    assert (store.folder / "rows").stat().st_size <= SLOTS * ROW_BYTES


def test_a_slot_has_no_entry_while_it_is_written(store: NumberedStore) -> None:
    store.save(1, 2, 3, 4)
    store.reserve(2)
    assert store.saved() == {3, 4}


def test_no_two_writers_get_one_slot(store: NumberedStore) -> None:
    other = store.another()
    slots = store.reserve(2) + other.reserve(2)
    assert sorted(slots) == [0, 1, 2, 3]
    assert store.reserve(1) == []


def test_slots_of_a_writer_that_died_are_handed_out_later(store: NumberedStore) -> None:
    """One that only stood still enters nothing over what has taken its place."""
    late = store.another()
    slots = late.reserve(SLOTS)
    store.clock.now += 599.0
    assert store.save(1) == slots[:1]
    late.commit([(slots[0], key(2), 0)])
    assert store.saved() == {1}


def test_a_chunk_that_two_have_written_is_there_once(store: NumberedStore) -> None:
    other = store.another()
    store.save(1)
    other.save(1)
    assert other.reads(1)
    assert len(store.reserve(SLOTS)) == SLOTS, "the second one's slot is free at once"


def test_a_chunk_that_has_got_another_slot_is_found_there(store: NumberedStore) -> None:
    other = store.another()
    (slot, *_) = store.save(1, 2, 3, 4)
    other.save(5)
    other.save(1)
    other.remove([(key(5), slot)])
    assert store.saved() == {1, 3, 4}
    assert store.reads(1)


def test_a_void_row_is_removed_for_all(store: NumberedStore) -> None:
    other = store.another()
    (slot, _) = store.save(1, 2)
    store.remove([(key(1), slot)])
    assert other.saved() == {2}


def test_what_another_chunk_has_taken_since_is_not_removed(store: NumberedStore) -> None:
    (slot, *_) = store.save(1, 2, 3, 4)
    assert store.save(5) == [slot]
    store.remove([(key(1), slot)])
    assert store.saved() == {2, 3, 4, 5}


@pytest.mark.parametrize("damage", ["flipped", "cut off", "swapped", "torn"])
def test_a_damaged_row_is_no_row(store: NumberedStore, damage: str) -> None:
    store.save(1, 2)
    rows = store.folder / "rows"
    whole = bytearray(rows.read_bytes())
    match damage:
        case "flipped":
            whole[100] ^= 1
        case "cut off":
            del whole[100:]
        case "swapped":
            whole = whole[ROW_BYTES:] + whole[:ROW_BYTES]
        case "torn":
            whole[4096:ROW_BYTES] = bytes(4096)
    rows.write_bytes(whole)
    assert not store.reads(1)


@pytest.mark.parametrize("damage", [b"no database at all", b""])
def test_a_damaged_index_is_begun_anew(store: NumberedStore, damage: bytes) -> None:
    store.save(1)
    store.close()
    (store.folder / "index.db").write_bytes(damage)
    again = store.another()
    assert again.index == {}
    again.save(2)
    assert again.reads(2)


def test_what_passes_is_no_damage() -> None:
    assert not is_damage(sqlite3.OperationalError("database is locked"))
    assert not is_damage(StoreGoneError())
    assert is_damage(sqlite3.DatabaseError("database disk image is malformed"))


def test_a_fault_of_ours_costs_no_store() -> None:
    assert not is_damage(KeyError(b"chunk"))
    assert not is_damage(sqlite3.ProgrammingError("Cannot operate on a closed database."))


def test_only_the_store_that_is_damaged_is_removed(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have found the damage, too, and have begun it anew."""
    store.save(1)
    store._connection.execute("UPDATE slots SET checksum = NULL, revision = revision + 1")
    others = []

    @contextmanager
    def later(_: Path) -> Iterator[None]:
        monkeypatch.undo()
        discard(store.folder)
        others.append(store.another())
        others[0].save(2)
        yield

    monkeypatch.setattr("xinference_xavier.disk.locked", later)
    with pytest.raises(StoreGoneError):
        store.refresh()
    assert others[0].saved() == {2}
    assert others[0].reads(2)


def test_an_index_of_another_version_is_begun_anew(store: NumberedStore) -> None:
    store.save(1)
    store.close()
    with sqlite3.connect(store.folder / "index.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert store.another().index == {}


@pytest.mark.parametrize("removed", [remove, discard])
def test_whoever_has_a_removed_store_open_notices(
    store: NumberedStore, removed: Callable[[Path], None]
) -> None:
    store.save(1)
    removed(store.folder)
    with pytest.raises(StoreGoneError):
        store.refresh()
    with pytest.raises(StoreGoneError):
        store.reserve(1)
    store.another()
    with pytest.raises(StoreGoneError):
        store.refresh()


def test_a_lower_limit_holds_at_once(store: NumberedStore) -> None:
    store.save(1, 2, 3, 4)
    store.close()
    smaller = store.another(slots=2)
    assert len(smaller.saved()) == 2
    assert (store.folder / "rows").stat().st_size == 2 * ROW_BYTES


def test_a_lower_limit_of_one_disturbs_no_other(store: NumberedStore) -> None:
    other = store.another()
    store.save(1, 2, 3, 4)
    assert other.saved() == {1, 2, 3, 4}
    smaller = store.another(slots=2)
    assert other.saved() == store.saved() == {1, 2}, "nobody lists what is gone"
    smaller.save(5)
    assert other.saved() == store.saved() == {2, 5}
    store.save(6, 7)
    assert other.saved() == smaller.saved() == {2, 5, 6, 7}
    assert all(other.reads(number) for number in (2, 5, 6, 7))


def test_a_store_that_is_there_is_opened_without_a_write(store: NumberedStore) -> None:
    """The file system may be full."""
    store.save(1)
    store.note("model", "qwen")

    def version() -> int:
        """Changes when another connection writes."""
        (number,) = store._connection.execute("PRAGMA data_version").fetchone()
        return number

    before = version()
    other = store.another()
    assert other.note("model", "qwen") == "qwen"
    assert other.reads(1)
    assert version() == before


def test_what_a_failed_write_has_cost_is_used_before_rows_that_can_be_read(
    store: NumberedStore,
) -> None:
    store.save(1, 2, 3, 4)
    lost = store.reserve(1)
    store.touch([key(2)])
    store.clock.now += 601.0
    store.touch([key(4)])
    assert store.reserve(1) == lost
    assert store.saved() == {2, 3, 4}


def test_a_full_disk_is_used_as_far_as_it_goes(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, 2)
    slot, _ = store.reserve(2)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", lambda *_: 100)
        with pytest.raises(OSError, match="No space left"):
            store.write(slot, ROW.data)
    assert len(store.save(3, 4)) == 2
    assert store.saved() == {3, 4}


def test_a_process_that_stands_still_while_it_opens_the_store_blocks_nobody_for_ever(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xinference_xavier.disk._PATIENCE", 0.0)
    with locked(store.folder), pytest.raises(BlockingIOError):
        store.another()
    store.another()


def test_notes_are_everybodys(store: NumberedStore) -> None:
    assert store.note("canary", {"layer": [1.5]}) == {"layer": [1.5]}
    assert store.another().note("canary", {"layer": [2.5]}) == {"layer": [1.5]}


def test_what_is_noted_already_may_be_merged_with(store: NumberedStore) -> None:
    def both(value: Any, noted: Any) -> Any:
        return {**noted, **value}

    assert store.note("canary", {"one": 1}, both) == {"one": 1}
    assert store.note("canary", {"two": 2}, both) == {"one": 1, "two": 2}
    assert store.another().note("canary", {}) == {"one": 1, "two": 2}


def test_any_thread_can_ask_whether_a_row_is_still_there(store: NumberedStore) -> None:
    other = store.another()
    (slot, *_) = store.save(1, 2, 3, 4)
    place = store.index[key(1)]
    assert store.has(key(1), place)
    assert not store.has(key(1), place._replace(checksum=0))
    other._connection.execute("BEGIN IMMEDIATE")  # it waits for nobody
    assert store.has(key(1), place)
    other._connection.execute("ROLLBACK")
    assert other.save(5) == [slot]
    assert not store.has(key(1), place)


def test_questions_of_several_threads_leave_no_file_open(store: NumberedStore) -> None:
    def opened() -> list[str]:
        files = psutil.Process().open_files()
        return sorted(file.path for file in files if Path(file.path).parent == store.folder)

    store.save(1)
    place, before = store.index[key(1)], opened()
    together = threading.Barrier(4)

    def ask(_: int) -> bool:
        together.wait()
        return all(store.has(key(1), place) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, range(4)))
    assert opened() == before


def test_only_the_owner_can_read_it(store: NumberedStore) -> None:
    store.save(1)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in store.folder.iterdir()} == {0o600}


def test_a_summary_tells_what_a_store_has(store: NumberedStore, tmp_path: Path) -> None:
    store.note("model", "qwen")
    store.save(1, 2)
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.notes, summary.rows) == (store.folder, {"model": "qwen"}, 2)
    assert summary.bytes == 2 * ROW_BYTES


def test_a_store_that_is_just_being_made_has_no_rows_yet(
    store: NumberedStore, tmp_path: Path
) -> None:
    (store.folder / "rows").unlink()
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.rows, summary.bytes) == (store.folder, 0, 0)


def test_a_store_that_is_removed_while_one_looks_is_left_out(
    store: NumberedStore, tmp_path: Path
) -> None:
    (store.folder / "lock").unlink()
    assert summaries(tmp_path) == []


def test_what_nobody_has_used_for_a_week_is_removed(store: NumberedStore, tmp_path: Path) -> None:
    (used,) = (each.used for each in summaries(tmp_path))
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other").mkdir()
    assert remove_unused(tmp_path, used + WEEK) == []
    assert remove_unused(tmp_path, used + WEEK + 1) == [store.folder]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "other"]
