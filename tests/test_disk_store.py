"""A store gives back the rows that were written to it, whatever happens to its files: or none."""

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from xinference_xavier import disk_store as module
from xinference_xavier.disk_store import (
    WEEK,
    DamagedNoteError,
    DamagedRowError,
    Store,
    remove,
    remove_unused,
    summaries,
)
from xinference_xavier.errors import ConfigError
from xinference_xavier.pool.region import checksum

ROW_BYTES = 8192
FILE_BYTES = mmap.PAGESIZE + ROW_BYTES
ROWS = 4
GIB = 1 << 30
ROW = np.frombuffer(mmap.mmap(-1, ROW_BYTES), np.uint8)
"""Memory that begins with a page, as files opened past the page cache require."""


def key(number: int) -> bytes:
    """The chunk with this number. Successive ones are in different folders."""
    return number.to_bytes(4, "little") * 9


class NumberedStore(Store):
    """Its chunks have numbers, and the bytes of their rows tell them."""

    def __init__(self, parent: Path, rows: int = ROWS) -> None:
        self.parent = parent
        super().__init__(parent, "namespace", ROW_BYTES, rows * FILE_BYTES + ROW_BYTES, "qwen")
        self.look()

    def another(self, rows: int = ROWS) -> Self:
        """A store in the same folder."""
        return type(self)(self.parent, rows)

    def save(self, *numbers: int) -> None:
        for number in numbers:
            ROW[:] = number % 256
            self.write(key(number), ROW.data, checksum(ROW.data, key(number)))

    def reads(self, number: int) -> bool:
        """False if another process has removed it."""
        ROW[:] = 0
        try:
            verified = self.read(key(number), ROW.data)
        except FileNotFoundError:
            return False
        assert np.all(number % 256 == ROW)
        assert verified == checksum(ROW.data, key(number))
        return True

    def saved(self) -> set[int]:
        """The numbers of the chunks that this store knows of."""
        self.look()
        return {int.from_bytes(each[:4], "little") for each in self}

    def file(self, number: int) -> Path:
        name = key(number).hex()
        return self.folder / name[:2] / f"{name}.row"

    def used(self, number: int, ago: float) -> None:
        """Let its last use be so many seconds ago."""
        then = time.time() - ago
        os.utime(self.file(number), (then, then))


@pytest.fixture
def store(tmp_path: Path) -> NumberedStore:
    return NumberedStore(tmp_path)


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()}


# -- rows ------------------------------------------------------------------------------------------


def test_others_find_it_when_they_look(store: NumberedStore) -> None:
    other = store.another()
    store.save(1)
    assert key(1) not in other
    assert other.saved() == {1}
    assert other.reads(1)


def test_what_another_has_removed_is_a_miss(store: NumberedStore) -> None:
    other = store.another()
    store.save(1, 2)
    assert other.saved() == {1, 2}
    store.file(1).unlink()
    assert not other.reads(1)
    assert key(1) not in other
    store.file(2).unlink()
    assert other.saved() == set()


def test_what_changes_at_the_moment_of_a_look_is_found_by_the_next(store: NumberedStore) -> None:
    """A clock has ticks, so that the folder's time may be the same."""
    store.save(1)
    other = store.another()
    twin = store.file(1).with_name((key(1)[:1] + key(2)[1:]).hex() + ".row")
    before = store.file(1).parent.stat()
    twin.touch()
    os.utime(twin.parent, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.look()
    assert len(other) == 2


def test_a_row_that_two_have_written_is_there_once(store: NumberedStore) -> None:
    other = store.another()
    store.save(1)
    other.save(1)
    assert store.reads(1)
    assert store.saved() == other.saved() == {1}
    assert len(files(store.folder)) == 2


def in_portions(store: Store) -> list[int]:
    """How many rows it knows after each look."""
    found = []
    while not store.is_known:
        store.look()
        found.append(len(store))
    return found


def test_a_large_store_is_listed_in_portions(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short, so that nobody waits for a million names."""
    many = store.another(rows=100)
    many.save(*range(20))
    monkeypatch.setattr(module, "_PORTION", 8)
    again = Store(store.parent, "namespace", ROW_BYTES, GIB)
    assert in_portions(again) == [8, 16, 20]
    many.save(20, 21)
    many.file(3).unlink()
    for _ in range(3):
        again.look()
    assert set(again) == set(many) - {key(3)}


def test_where_portions_do_not_suffice_all_folders_have_their_turn(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = store.another(rows=100)
    many.save(*range(20))
    monkeypatch.setattr(module, "_PORTION", 8)
    again = Store(store.parent, "namespace", ROW_BYTES, GIB)
    in_portions(again)
    many.save(*range(20, 40))
    monkeypatch.setattr(module, "_TICK_NS", 1 << 62)  # as if all had just changed
    for _ in range(6):
        again.look()
    assert len(again) == 40


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["flipped", "header", "version", "cut off", "empty", "swapped", "torn", "foreign"]
)
def test_a_damaged_row_is_no_row_and_goes(store: NumberedStore, damage: str) -> None:
    store.save(1, 2)
    whole = bytearray(store.file(1).read_bytes())
    match damage:
        case "flipped":
            whole[-100] ^= 1
        case "header":
            whole[16] ^= 1
        case "version":
            whole[7] ^= 1
        case "cut off":
            del whole[-100:]
        case "empty":
            whole.clear()
        case "swapped":
            whole[:] = store.file(2).read_bytes()
        case "torn":
            whole[-4096:] = bytes(4096)
        case "foreign":
            whole[:] = b"a text" * 4000
    store.file(1).write_bytes(whole)
    with pytest.raises(DamagedRowError):
        store.reads(1)
    assert not store.file(1).exists()
    assert key(1) not in store
    assert store.saved() == {2}
    assert store.reads(2)


def test_a_row_that_cannot_be_read_is_no_longer_offered(store: NumberedStore) -> None:
    store.save(1)
    store.file(1).unlink()
    store.file(1).symlink_to(store.folder / "store.json")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        store.reads(1)
    assert key(1) not in store


def test_what_does_not_look_like_ours_is_left_alone(store: NumberedStore) -> None:
    """Neither a look nor a lack of room removes it, nor who removes the store."""
    store.save(1)
    folder = store.file(1).parent
    name = store.file(1).name
    foreign = [
        store.folder / "notes.txt",
        folder / "notes.txt",
        folder / name.upper(),
        folder / f"ff{name}",  # in another's folder
        folder / f"{name}.gz",
        folder / "temporary",
        store.folder / "zz" / name,
    ]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("precious")
        os.utime(file, (0, 0))
    (link := folder / f"{name[:-8]}.row").symlink_to(foreign[0])
    store.save(2, 3, 4, 5)
    assert store.another().saved() == {2, 3, 4, 5}
    remove(store.folder)
    (left,) = store.parent.iterdir()
    assert files(left) == {str(each.relative_to(store.folder)) for each in [*foreign, link]}
    assert {file.read_text() for file in left.rglob("*") if file.is_file()} == {"precious"}


def test_what_a_dead_writer_has_left_goes_later(store: NumberedStore) -> None:
    store.save(1)
    left = store.file(1).with_suffix(".0123abcd.temporary")
    left.touch()
    store.another()
    assert left.exists(), "somebody may be writing to it"
    os.utime(left, (time.time() + 60,) * 2)
    store.another()
    assert left.exists(), "clocks differ a little"
    for ago in (601, -1000):
        os.utime(left, (time.time() - ago,) * 2)
        store.another()
        assert not left.exists()
        left.touch()


def test_what_is_left_by_a_writer_that_dies_later_goes_too(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else changes in its folder."""
    monkeypatch.setattr(module, "_TICK_NS", 0)
    store.save(1)
    left = store.file(1).with_suffix(".0123abcd.temporary")
    left.touch()
    store.look()
    os.utime(left, (0, 0))
    store.look()
    assert not left.exists()


def test_a_writer_that_fails_leaves_nothing(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1)
    before = files(store.folder)
    with monkeypatch.context() as patch:
        patch.setattr("os.writev", lambda *_: 100)
        with pytest.raises(OSError, match="No space left"):
            store.save(2)
    assert files(store.folder) == before
    assert key(2) not in store


def test_a_damaged_note_ends_the_store(store: NumberedStore) -> None:
    """Nothing tells any more which engine has computed its rows."""
    store.save(1)
    store.note("canary 1f", {"layer": [1.5]})
    note = store.folder / "canary 1f.json"
    note.write_bytes(note.read_bytes().replace(b"1.5", b"2.5"))
    with pytest.raises(DamagedNoteError):
        store.note("canary 1f", {"layer": [1.5]})
    assert store.is_gone()
    assert store.another().saved() == set()
    assert [*store.parent.iterdir()] == [store.folder]


def test_a_store_that_cannot_be_opened_leaves_no_file_open(store: NumberedStore) -> None:
    """While its error lives, too, whose traceback has the store."""
    (store.folder / "store.json").write_bytes(b"damaged")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedNoteError) as error:
        store.another()
    assert len(os.listdir("/proc/self/fd")) == before, error


# -- the limit -------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_the_limit_holds(store: NumberedStore) -> None:
    store.save(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        store.used(number, ago=10 - number)
    store.touch({key(1): time.time_ns()})
    store.save(5, 6)
    assert store.saved() == {1, 4, 5, 6}
    store.save(5)
    assert len(files(store.folder)) == ROWS + 1


def test_the_use_of_others_counts(store: NumberedStore) -> None:
    other = store.another()
    store.save(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        store.used(number, ago=10 - number)
    other.touch({key(1): time.time_ns()})
    store.save(5)
    assert store.saved() == {1, 3, 4, 5}


def test_a_row_that_is_replaced_while_it_is_read_is_a_miss(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file gets another row. Nobody should look for a broken disk."""
    other = store.another()
    store.save(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        store.used(number, ago=10 - number)
    other.look()
    opened, first = os.open, store.file(1).stat().st_ino

    def slow(*args: Any, **options: Any) -> int:
        file = opened(*args, **options)
        monkeypatch.undo()
        other.save(5)
        ROW[:] = 0
        return file

    monkeypatch.setattr("os.open", slow)
    assert not store.reads(1)
    assert store.file(5).stat().st_ino == first
    assert store.saved() == {2, 3, 4, 5}
    assert store.reads(5)


def test_two_that_share_a_store_keep_its_limit_together(store: NumberedStore) -> None:
    other = store.another()
    for number in range(0, 40, 2):
        store.save(number)
        other.look()
        other.save(number + 1)
        store.look()
    assert store.saved() == other.saved() == {36, 37, 38, 39}


@pytest.mark.parametrize(("rows", "call"), [(4, "utime"), (4, "rename"), (3, "unlink")])
def test_a_row_that_another_replica_replaces_first_leaves_its_place_to_the_next(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch, rows: int, call: str
) -> None:
    store.save(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        store.used(number, ago=10 - number)
    one, other, original = store.another(rows), store.another(), getattr(os, call)

    def slower(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        other.save(6)
        original(*args, **options)

    monkeypatch.setattr(os, call, slower)
    one.save(5)
    assert one.saved() == {3, 4, 5, 6}


def test_what_was_used_a_nanosecond_before_goes_first(store: NumberedStore) -> None:
    """A chunk is of no use without those in front of it."""
    store.save(1, 2, 3, 4)
    then = time.time_ns() - 10**9  # a file's own time may be a few milliseconds late
    store.touch({key(number): then - number for number in (1, 2, 3, 4)})
    store.save(5, 6)
    assert store.saved() == {1, 2, 5, 6}


def test_each_model_has_a_store_and_a_limit_of_its_own(store: NumberedStore) -> None:
    other = Store(store.parent, "other", ROW_BYTES, GIB)
    store.save(1, 2, 3, 4)
    other.write(key(9), ROW.data, 0)
    store.save(5)
    assert len(store) == ROWS
    assert key(9) in other
    assert key(9) not in store


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_jumps_costs_only_what_was_saved_meanwhile(
    store: NumberedStore, days: int
) -> None:
    """Rows from a time to come would otherwise outlive all others."""
    store.save(1, 2)
    for number in (1, 2):
        store.used(number, ago=days * 86400)
    store.save(3, 4, 5, 6)
    assert store.saved() == {3, 4, 5, 6}


def test_a_lower_limit_is_reached_as_rows_are_saved(store: NumberedStore) -> None:
    """Each takes the place of two, so that it takes no longer than usual."""
    store.save(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        store.used(number, ago=10 - number)
    smaller = store.another(rows=2)
    smaller.save(5)
    assert store.saved() == smaller.saved() == {3, 4, 5}
    smaller.save(6)
    assert store.saved() == smaller.saved() == {5, 6}


def test_of_a_large_store_some_folders_are_looked_at(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fair sample: what goes is among the least recently used."""
    monkeypatch.setattr(module, "_SAMPLE", 64)
    many = store.another(rows=256)
    many.save(*range(256))
    for number in range(256):
        many.used(number, ago=1000 - number % 64)
    sampled: list[int] = []
    sample = Store._sample

    def sampling(store: Store) -> Any:
        found = sample(store)
        sampled.append(len(found))
        return found

    monkeypatch.setattr(Store, "_sample", sampling)
    many.save(1000)
    (_, key_in_use) = many._oldest[-1]
    many.touch({key_in_use: time.time_ns()})
    many.save(1001, 1002, 1003)
    assert sampled == [64, 64], "of each, a sixteenth goes"
    assert len(many) == 256
    assert key_in_use in many
    assert {number % 64 for number in set(range(256)) - many.saved()} == {0, 2, 3}


def space(free: int, total: int) -> Callable[[int], Any]:
    return lambda _: SimpleNamespace(f_frsize=1, f_bavail=free, f_blocks=total)


@pytest.mark.parametrize(("total", "reserved"), [(10 * GIB, GIB), (100 * GIB, 2 * GIB)])
def test_a_file_system_keeps_room_for_others(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch, total: int, reserved: int
) -> None:
    """A GiB, or 2 %. The store does not grow, nor shrink, and goes on when there is room again."""
    store.save(1, 2, 3, 4)
    monkeypatch.setattr("os.statvfs", space(reserved + FILE_BYTES - 1, total))
    with pytest.raises(OSError, match=f"No space left|{reserved} are left to others"):
        store.save(5)
    assert store.another().saved() == {1, 2, 3, 4}
    assert store.reads(1)
    monkeypatch.setattr("os.statvfs", space(reserved + FILE_BYTES, total))
    store.save(5)
    assert 5 in store.saved()


def test_nothing_is_written_to_open_a_store_that_is_there(store: NumberedStore) -> None:
    """The file system may be full."""
    store.save(1)
    store.note("canary 1f", {"layer": [1.5]})
    before = {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")}
    other = store.another()
    other.note("canary 1f", {"layer": [1.5]})
    assert other.reads(1)
    assert {file: file.stat().st_mtime_ns for file in store.folder.rglob("*")} == before


# -- notes -----------------------------------------------------------------------------------------


def test_notes_are_everybodys(store: NumberedStore) -> None:
    assert store.note("canary 1f", {"layer": [1.5]}) == {"layer": [1.5]}
    assert store.another().note("canary 1f", {"layer": [2.5]}) == {"layer": [1.5]}


def test_of_two_that_note_at_once_one_is_first(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = os.link, store.another()

    def faster(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        other.note("canary 1f", {"layer": [2.5]})
        link(*args, **options)

    monkeypatch.setattr("os.link", faster)
    assert store.note("canary 1f", {"layer": [1.5]}) == {"layer": [2.5]}


# -- who may read and write it ---------------------------------------------------------------------


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        store = NumberedStore(tmp_path)
        store.save(1)
        store.note("canary 1f", {})
    finally:
        os.umask(former)
    folders = [store.folder, store.file(1).parent]
    assert {stat.S_IMODE(each.stat().st_mode) for each in folders} == {0o700}
    assert len(files(store.folder)) == 3
    for name in files(store.folder):
        assert stat.S_IMODE((store.folder / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: folder.chmod(0o777), r"may be written to by other users \(mode 777\)"),
        (lambda folder: folder.chmod(0o770), r"may be written to by other users \(mode 770\)"),
        (lambda folder: os.chown(folder, 4242, -1), "belongs to user 4242, but the replica runs"),
    ],
)
def test_a_store_in_which_others_may_have_put_rows_is_refused(
    store: NumberedStore,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    reason: str,
) -> None:
    if os.geteuid():  # only root gives files away
        monkeypatch.setattr("os.chown", lambda *_: monkeypatch.setattr("os.geteuid", lambda: -1))
        reason = reason.replace("4242", str(os.geteuid()))
    store.save(1)
    change(store.folder)
    with pytest.raises(ConfigError, match=reason):
        store.another()


def test_a_link_is_not_followed_to_a_store(store: NumberedStore, tmp_path: Path) -> None:
    store.folder.rename(tmp_path / "elsewhere")
    store.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        store.another()


# -- all stores ------------------------------------------------------------------------------------


def test_a_summary_tells_what_a_store_has(store: NumberedStore, tmp_path: Path) -> None:
    store.save(1, 2)
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.model, summary.rows) == (store.folder, "qwen", 2)
    assert summary.bytes == 2 * FILE_BYTES


def test_a_store_that_is_just_being_made_has_no_rows_yet(
    store: NumberedStore, tmp_path: Path
) -> None:
    (store.folder / "store.json").unlink()
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.rows) == (store.folder, 0)


def test_whoever_has_a_removed_store_open_notices(store: NumberedStore) -> None:
    store.save(1)
    remove(store.folder)
    assert store.is_gone()
    with pytest.raises(FileNotFoundError):
        store.save(2)
    other = store.another()
    assert store.is_gone()
    assert other.saved() == set()
    assert [*store.parent.iterdir()] == [store.folder]


def test_a_store_that_was_begun_anew_in_the_same_folder_is_another_one(
    store: NumberedStore,
) -> None:
    """An operator's `rm -r` leaves the folder if a replica saves something meanwhile."""
    (store.folder / "store.json").unlink()
    store.another()
    assert store.is_gone()


def test_rows_of_a_store_that_is_being_removed_are_in_no_other(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those of an engine that computed differently."""
    store.save(1)
    found, removing = [], module._remove_rows

    def slow(*args: Any) -> None:
        monkeypatch.undo()
        found.append(store.another().saved())
        removing(*args)

    monkeypatch.setattr(module, "_remove_rows", slow)
    remove(store.folder)
    assert found == [set()]


def test_what_nobody_has_used_for_a_week_is_removed(tmp_path: Path) -> None:
    store = NumberedStore(tmp_path)
    folder = store.folder
    store.save(1)
    (used,) = (each.used for each in summaries(tmp_path))
    (tmp_path / "notes.txt").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.db").touch()
    assert remove_unused(tmp_path, used + WEEK) == []
    assert remove_unused(tmp_path, used + WEEK + 1) == [], "it is open: a clock may have jumped"
    del store
    assert remove_unused(tmp_path, used + WEEK + 1) == [folder]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["notes.txt", "other"]


def test_an_unused_store_that_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are removed."""
    folders = [Store(tmp_path, name, ROW_BYTES, GIB).folder for name in ("one", "two")]
    removing = module.remove

    def refuse(folder: Path) -> None:
        if folder == folders[0]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        removing(folder)

    monkeypatch.setattr(module, "remove", refuse)
    assert remove_unused(tmp_path, time.time() + 2 * WEEK) == folders[1:]
    (record,) = caplog.records
    assert str(folders[0]) in record.message
    assert "Permission denied" in record.message


def former(parent: Path) -> Path:
    """What versions before the first release have left."""
    folder = parent / ("0123456789abcdef" * 2)
    folder.mkdir()
    for name in ("index.db", "index.db-wal", "index.db-shm", "rows", "lock"):
        (folder / name).touch()
    return folder


def test_stores_of_earlier_versions_can_be_removed(tmp_path: Path) -> None:
    folder = former(tmp_path)
    (summary,) = summaries(tmp_path)
    assert (summary.folder, summary.namespace) == (folder, "")
    assert remove_unused(tmp_path, time.time() + 2 * WEEK) == []
    (folder / "notes.txt").touch()
    remove(folder)
    assert files(tmp_path) == {f"{folder.name}/notes.txt"}


def test_what_is_left_of_a_removal_can_be_removed(tmp_path: Path) -> None:
    """Its process may have ended."""
    store = NumberedStore(tmp_path)
    store.save(1)
    left = store.folder.rename(store.folder.with_suffix(".0123abcd.removed"))
    assert [each.folder for each in summaries(tmp_path)] == [left]
    assert remove_unused(tmp_path, time.time() + WEEK - 60) == []
    del store
    assert remove_unused(tmp_path, time.time() + 2 * WEEK) == [left]
    assert [*tmp_path.iterdir()] == []
