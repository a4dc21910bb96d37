"""A store gives back the rows that were written to it, whatever happens to its files: or none."""

import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from xinference_xavier.pool.region import Region

ROW_BYTES = 8192
SLOTS = 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path, "namespace", ROW_BYTES)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(folder: Path, clock: Clock) -> Store:
    return opened(folder, clock)


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create(SLOTS, ROW_BYTES)
    yield region
    del region


def opened(folder: Path, clock: Clock, slots: int = SLOTS) -> Store:
    return Store(folder, ROW_BYTES, slots * ROW_BYTES + ROW_BYTES // 2, clock=clock)


def key(number: int) -> bytes:
    return number.to_bytes(36)


def save(store: Store, region: Region, *numbers: int) -> list[int]:
    """Write rows of bytes that tell their number; returns their slots."""
    slots = store.reserve(len(numbers))
    entries = []
    for slot, number in zip(slots, numbers, strict=False):
        region.row(0)[:] = number
        store.write(slot, region.row(0).data)
        entries.append((slot, key(number), region.checksum(0, key(number))))
    store.commit(entries)
    store.refresh()
    return slots


def read(store: Store, region: Region, number: int) -> bool:
    """Whether the row of this number is there, verified as replicas do."""
    place = store.index[key(number)]
    region.row(1)[:] = 0
    complete = store.read(place.slot, region.row(1).data)
    found = complete and region.checksum(1, key(number)) == place.checksum
    assert not found or np.all(region.row(1) == number)
    return found


def saved(store: Store) -> set[int]:
    store.refresh()
    return {int.from_bytes(each) for each in store.index}


def test_a_row_is_there_after_a_restart(folder: Path, store: Store, region: Region) -> None:
    save(store, region, 1, 2)
    store.close()
    again = opened(folder, Clock())
    assert saved(again) == {1, 2}
    assert read(again, region, 1)
    assert read(again, region, 2)


def test_others_find_it_when_they_look(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    other = opened(folder, clock)
    save(store, region, 1)
    assert other.index == {}
    other.refresh()
    assert read(other, region, 1)


def test_the_least_recently_used_goes_first_and_the_limit_holds(
    folder: Path, store: Store, region: Region
) -> None:
    save(store, region, 1, 2, 3, 4)
    store.touch([key(1)])
    save(store, region, 5, 6)
    assert saved(store) == {1, 4, 5, 6}
    assert (folder / "rows").stat().st_size <= SLOTS * ROW_BYTES


def test_a_slot_has_no_entry_while_it_is_written(store: Store, region: Region) -> None:
    save(store, region, 1, 2, 3, 4)
    store.reserve(2)
    assert saved(store) == {3, 4}


def test_no_two_writers_get_one_slot(folder: Path, store: Store, clock: Clock) -> None:
    other = opened(folder, clock)
    slots = store.reserve(2) + other.reserve(2)
    assert sorted(slots) == [0, 1, 2, 3]
    assert store.reserve(1) == []


def test_slots_of_a_writer_that_died_are_handed_out_later(store: Store, clock: Clock) -> None:
    store.reserve(SLOTS)
    clock.now += 599.0
    assert len(store.reserve(1)) == 1


def test_a_chunk_that_two_have_written_is_there_once(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    other = opened(folder, clock)
    save(store, region, 1)
    save(other, region, 1)
    assert read(other, region, 1)
    assert len(store.reserve(SLOTS)) == SLOTS, "the second one's slot is free at once"


def test_a_void_row_is_removed_for_all(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    other = opened(folder, clock)
    (slot, _) = save(store, region, 1, 2)
    store.remove([(key(1), slot)])
    assert saved(other) == {2}


def test_what_another_chunk_has_taken_since_is_not_removed(store: Store, region: Region) -> None:
    (slot, *_) = save(store, region, 1, 2, 3, 4)
    assert save(store, region, 5) == [slot]
    store.remove([(key(1), slot)])
    assert saved(store) == {2, 3, 4, 5}


@pytest.mark.parametrize("damage", ["flipped", "cut off", "swapped", "torn"])
def test_a_damaged_row_is_no_row(folder: Path, store: Store, region: Region, damage: str) -> None:
    save(store, region, 1, 2)
    rows = folder / "rows"
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
    assert not read(store, region, 1)


@pytest.mark.parametrize("damage", [b"no database at all", b""])
def test_a_damaged_index_is_begun_anew(
    folder: Path, store: Store, region: Region, clock: Clock, damage: bytes
) -> None:
    save(store, region, 1)
    store.close()
    (folder / "index.db").write_bytes(damage)
    again = opened(folder, clock)
    assert again.index == {}
    save(again, region, 2)
    assert read(again, region, 2)


def test_what_passes_is_no_damage() -> None:
    assert not is_damage(sqlite3.OperationalError("database is locked"))
    assert not is_damage(StoreGoneError())
    assert is_damage(sqlite3.DatabaseError("database disk image is malformed"))


def test_a_fault_of_ours_costs_no_store() -> None:
    assert not is_damage(KeyError(b"chunk"))
    assert not is_damage(sqlite3.ProgrammingError("Cannot operate on a closed database."))


def test_only_the_store_that_is_damaged_is_removed(
    folder: Path, store: Store, region: Region, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have found the damage, too, and have begun it anew."""
    save(store, region, 1)
    store._connection.execute("UPDATE slots SET checksum = NULL, revision = revision + 1")
    others = []

    @contextmanager
    def later(_: Path) -> Iterator[None]:
        monkeypatch.undo()
        discard(folder)
        others.append(opened(folder, clock))
        save(others[0], region, 2)
        yield

    monkeypatch.setattr("xinference_xavier.disk.locked", later)
    with pytest.raises(StoreGoneError):
        store.refresh()
    assert saved(others[0]) == {2}
    assert read(others[0], region, 2)


def test_an_index_of_another_version_is_begun_anew(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    save(store, region, 1)
    store.close()
    with sqlite3.connect(folder / "index.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    assert opened(folder, clock).index == {}


@pytest.mark.parametrize("removed", [remove, discard])
def test_whoever_has_a_removed_store_open_notices(
    folder: Path, store: Store, region: Region, clock: Clock, removed: Callable[[Path], None]
) -> None:
    save(store, region, 1)
    removed(folder)
    with pytest.raises(StoreGoneError):
        store.refresh()
    with pytest.raises(StoreGoneError):
        store.reserve(1)
    opened(folder, clock)  # another one
    with pytest.raises(StoreGoneError):
        store.refresh()


def test_a_lower_limit_holds_at_once(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    save(store, region, 1, 2, 3, 4)
    store.close()
    smaller = opened(folder, clock, slots=2)
    assert len(saved(smaller)) == 2
    assert (folder / "rows").stat().st_size == 2 * ROW_BYTES


def test_a_lower_limit_of_one_disturbs_no_other(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    other = opened(folder, clock)
    save(store, region, 1, 2, 3, 4)
    assert saved(other) == {1, 2, 3, 4}
    smaller = opened(folder, clock, slots=2)
    assert saved(other) == saved(store) == {1, 2}, "nobody lists what is gone"
    save(smaller, region, 5)
    assert saved(other) == saved(store) == {2, 5}
    save(store, region, 6, 7)
    assert saved(other) == saved(smaller) == {2, 5, 6, 7}
    assert all(read(other, region, number) for number in (2, 5, 6, 7))


def test_a_store_that_is_there_is_opened_without_a_write(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    """The file system may be full."""
    save(store, region, 1)
    store.note("model", "qwen")

    def version() -> int:
        """Changes when another connection writes."""
        (number,) = store._connection.execute("PRAGMA data_version").fetchone()
        return number

    before = version()
    other = opened(folder, clock)
    assert other.note("model", "qwen") == "qwen"
    assert read(other, region, 1)
    assert version() == before


def test_what_a_failed_write_has_cost_is_used_before_rows_that_can_be_read(
    store: Store, region: Region, clock: Clock
) -> None:
    save(store, region, 1, 2, 3, 4)
    lost = store.reserve(1)
    store.touch([key(2)])
    clock.now += 601.0
    store.touch([key(4)])
    assert store.reserve(1) == lost
    assert saved(store) == {2, 3, 4}


def test_a_full_disk_is_used_as_far_as_it_goes(
    folder: Path, store: Store, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, region, 1, 2)

    def full(*_: object) -> int:
        return 100

    slot, _ = store.reserve(2)
    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(OSError, match="No space left"):
            store.write(slot, region.row(0).data)
    assert len(save(store, region, 3, 4)) == 2
    assert saved(store) == {3, 4}


def test_a_process_that_stands_still_while_it_opens_the_store_blocks_nobody_for_ever(
    folder: Path, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xinference_xavier.disk._PATIENCE", 0.0)
    with locked(folder), pytest.raises(BlockingIOError):
        opened(folder, clock)
    opened(folder, clock)


def test_notes_are_everybodys(folder: Path, store: Store, clock: Clock) -> None:
    assert store.note("canary", {"layer": [1.5]}) == {"layer": [1.5]}
    assert opened(folder, clock).note("canary", {"layer": [2.5]}) == {"layer": [1.5]}


def test_what_is_noted_already_may_be_merged_with(folder: Path, store: Store, clock: Clock) -> None:
    def both(value: Any, noted: Any) -> Any:
        return {**noted, **value}

    assert store.note("canary", {"one": 1}, both) == {"one": 1}
    assert store.note("canary", {"two": 2}, both) == {"one": 1, "two": 2}
    assert opened(folder, clock).note("canary", {}) == {"one": 1, "two": 2}


def test_any_thread_can_ask_whether_a_row_is_still_there(
    folder: Path, store: Store, region: Region, clock: Clock
) -> None:
    other = opened(folder, clock)
    (slot, *_) = save(store, region, 1, 2, 3, 4)
    place = store.index[key(1)]
    assert store.has(key(1), place)
    assert not store.has(key(1), place._replace(checksum=0))
    other._connection.execute("BEGIN IMMEDIATE")  # it waits for nobody
    assert store.has(key(1), place)
    other._connection.execute("ROLLBACK")
    assert save(other, region, 5) == [slot]
    assert not store.has(key(1), place)


def test_questions_of_several_threads_leave_no_file_open(
    folder: Path, store: Store, region: Region
) -> None:
    def opened() -> list[str]:
        files = psutil.Process().open_files()
        return sorted(file.path for file in files if Path(file.path).parent == folder)

    save(store, region, 1)
    place, before = store.index[key(1)], opened()
    together = threading.Barrier(4)

    def ask(_: int) -> bool:
        together.wait()
        return all(store.has(key(1), place) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, range(4)))
    assert opened() == before


def test_only_the_owner_can_read_it(folder: Path, store: Store, region: Region) -> None:
    save(store, region, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_summary_tells_what_a_store_has(
    tmp_path: Path, folder: Path, store: Store, region: Region
) -> None:
    store.note("model", "qwen")
    save(store, region, 1, 2)
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.notes, summary.rows) == (folder, {"model": "qwen"}, 2)
    assert summary.bytes == 2 * ROW_BYTES


def test_a_store_that_is_just_being_made_has_no_rows_yet(tmp_path: Path, folder: Path) -> None:
    opened(folder, Clock())
    (folder / "rows").unlink()
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.rows, summary.bytes) == (folder, 0, 0)


def test_a_store_that_is_removed_while_one_looks_is_left_out(tmp_path: Path, folder: Path) -> None:
    opened(folder, Clock())
    (folder / "lock").unlink()
    assert summaries(tmp_path) == []


def test_what_nobody_has_used_for_a_week_is_removed(
    tmp_path: Path, folder: Path, store: Store, clock: Clock
) -> None:
    (used,) = (each.used for each in summaries(tmp_path))
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other").mkdir()
    assert remove_unused(tmp_path, used + WEEK) == []
    assert remove_unused(tmp_path, used + WEEK + 1) == [folder]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "other"]
