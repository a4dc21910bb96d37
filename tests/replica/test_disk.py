"""A replica saves what is used again on the disk of its host, and finds it after a restart."""

import asyncio
import gc
import os
import re
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.harness.comparisons import compared, snapshot
from tests.harness.replicas import fresh_keys
from tests.replica.consumers import (
    CANARY,
    FILE_BYTES,
    NEVER,
    ROW_BYTES,
    ROWS,
    Life,
    file_of,
    life,
    store_of,
)
from xinference_xavier import disk_store as store_module
from xinference_xavier.disk_store import Store, summaries
from xinference_xavier.errors import ConfigError
from xinference_xavier.peers import DISK
from xinference_xavier.protocol.sketches import Difference, Sketch
from xinference_xavier.protocol.tracker import Settings
from xinference_xavier.protocol.transfer import PullResult
from xinference_xavier.replica import disk as module
from xinference_xavier.replica.disk import READERS, DiskState
from xinference_xavier.replica.fetcher import FetchState

OTHER: Sketch = {"layer": ("float32", [2.0, -1.0])}


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Life]:
    async with life(tmp_path) as replica:
        yield replica


def canaries(store: Path) -> set[bytes]:
    """The canaries that are noted in the store."""
    return {bytes.fromhex(note.stem.split()[1]) for note in store.glob("canary *")}


async def test_what_was_used_twice_is_there_after_a_restart(tmp_path: Path) -> None:
    keys = fresh_keys(5)
    async with life(tmp_path) as replica:
        await replica.save(keys)
        await replica.until(lambda: replica.pool.counts().pinned == 0)
    async with life(tmp_path) as again:
        fetch = await again.fetch(keys)
        assert (fetch.state, fetch.reason) == (FetchState.COMMITTED, None)
        assert again.holds(keys)
        assert again.arrived == keys, "peers can have it"
        counts = again.fetcher.counts
        assert counts.fetches.by_transport[DISK].bytes == 5 * ROW_BYTES
        assert counts.rows == 0, "nothing came from a peer"


async def test_what_was_used_once_is_not_saved(replica: Life) -> None:
    once, twice = fresh_keys(2)
    replica.compute([once])
    replica.disk.used([once])
    await replica.save([twice])
    assert once not in replica.disk.index


def newest_first(parent: Path) -> list[bytes]:
    """The chunks in the store, the one used last first."""
    rows = sorted(store_of(parent).glob("*/*.row"), key=lambda row: -row.stat().st_mtime_ns)
    return [bytes.fromhex(row.stem) for row in rows]


async def test_the_head_of_a_prompt_is_what_was_used_last(tmp_path: Path) -> None:
    """So that its tail goes first at the limit: nothing is read behind a gap. A prompt is saved in
    several portions."""
    keys = fresh_keys(3 * module._BATCH)
    async with life(tmp_path, slots=len(keys), saves_all=True) as replica:
        replica.compute(keys)
        replica.disk.used(keys)
        await replica.until(lambda: newest_first(tmp_path) == keys)
        replica.disk.used(keys[20:30])
        replica.disk.used(keys[10:20])
        await replica.until(lambda: newest_first(tmp_path)[:20] == keys[10:30])


async def test_use_is_noted_though_nothing_can_be_saved(
    tmp_path: Path, replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be noted is noted later."""
    one, two = fresh_keys(2)
    await replica.save([one, two])
    await replica.until(lambda: newest_first(tmp_path) == [one, two])
    replica.disk._save_at = float("inf")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "touch", Mock(side_effect=NO_SPACE))
        replica.disk.used([two])
        await replica.until(lambda: replica.disk.report().failures > 0)
    replica.disk._save_at = float("inf")
    await replica.until(lambda: newest_first(tmp_path) == [two, one])


async def test_a_row_that_is_there_already_does_not_count_as_written(replica: Life) -> None:
    """Another replica of the host was faster."""
    keys = fresh_keys(2)
    await replica.save(keys)
    replica.disk.index = ()
    replica.disk._wanted.update(dict.fromkeys(keys, 1))
    await replica.until(lambda: not replica.disk._wanted)
    await replica.until(lambda: replica.pool.counts().pinned == 0)
    assert replica.disk.report().written_bytes == 2 * ROW_BYTES


async def test_the_own_store_is_in_use_however_long_the_replica_was_down(tmp_path: Path) -> None:
    """A store that nobody wants goes at a start."""
    keys = fresh_keys(2)
    async with life(tmp_path) as replica:
        await replica.save(keys)
    other = Store(tmp_path, "other", ROW_BYTES, FILE_BYTES).folder
    for folder in (store_of(tmp_path), other):
        os.utime(folder / "store.json", (0, 0))
    async with life(tmp_path) as again:
        assert set(keys) <= {*again.disk.index}
        assert not other.exists()


async def test_all_that_is_used_can_be_saved(tmp_path: Path) -> None:
    keys = fresh_keys(3)
    async with life(tmp_path, saves_all=True) as replica:
        replica.compute(keys)
        replica.disk.used(keys)
        await replica.until(lambda: set(keys) <= {*replica.disk.index})


async def test_what_is_on_probation_is_not_saved(tmp_path: Path) -> None:
    keys = fresh_keys(3)
    async with life(tmp_path, saves_all=True) as replica:
        replica.compute(keys[:2], probation=True)
        replica.compute(keys[2:])
        replica.disk.used(keys)
        await replica.until(lambda: len(replica.disk.index) > 0)
        assert {*replica.disk.index} == {keys[2]}
        replica.pool.end_probation(keys[:1])
        replica.disk.used(keys)
        await replica.until(lambda: len(replica.disk.index) > 1)
        assert {*replica.disk.index} == {keys[0], keys[2]}


async def test_a_named_prefix_is_saved_at_once(replica: Life) -> None:
    keys = fresh_keys(3)
    replica.compute(keys)
    replica.disk.keep(keys)
    await replica.until(lambda: set(keys) <= {*replica.disk.index})


async def test_what_waits_for_a_disk_that_is_not_open_is_bounded(tmp_path: Path) -> None:
    async with life(tmp_path, canary=None) as replica:
        for _ in range(10):
            keys = fresh_keys(5 * ROWS)
            replica.disk.used(keys)
            replica.disk.used(keys)
        assert len(replica.disk._wanted) == ROWS
        assert len(replica.disk._once) == 4 * ROWS


async def test_only_what_the_engine_has_computed_is_saved(replica: Life) -> None:
    """The peer that it came from may turn out to compute differently."""
    copied, own = fresh_keys(2)
    replica.compute([copied], origin="peer")
    replica.disk.used([copied])
    replica.disk.used([copied])
    await replica.save([own])
    assert copied not in replica.disk.index


async def test_replicas_of_a_host_read_what_the_others_save(tmp_path: Path) -> None:
    keys = fresh_keys(3)
    async with life(tmp_path) as one, life(tmp_path) as other:
        await one.save(keys)
        await other.until(lambda: set(keys) <= {*other.disk.index})
        await other.fetch(keys)
        assert other.holds(keys)


async def test_a_large_store_is_listed_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portion at a time. Each waits for nothing but the one before."""
    keys = fresh_keys(ROWS)
    async with life(tmp_path) as replica:
        await replica.save(keys)
    monkeypatch.setattr(store_module, "_PORTION", 2)
    monkeypatch.setattr(module, "TICK", NEVER)
    async with life(tmp_path, canary=None) as again:
        again.disk.probed(b"canary", CANARY)
        async with asyncio.timeout(NEVER / 2):
            while len(again.disk.index) < ROWS:  # noqa: ASYNC110  # a thread tells nobody
                await asyncio.sleep(0.001)
        await again.fetch(keys)
        assert again.holds(keys)


async def test_without_a_canary_nothing_is_read_or_saved(tmp_path: Path) -> None:
    keys = fresh_keys(2)
    async with life(tmp_path) as replica:
        await replica.save(keys)
    async with life(tmp_path, canary=None) as again:
        await again.until(lambda: again.disk.state is DiskState.COMPARING)
        assert not again.disk.index
        assert not again.tier.ready


async def test_rows_of_an_engine_that_computed_differently_are_not_used(tmp_path: Path) -> None:
    keys = fresh_keys(2)
    async with life(tmp_path) as replica:
        await replica.save(keys)
    async with life(tmp_path, canary=OTHER) as other:
        assert other.disk.state is DiskState.DIFFERS
        assert not other.disk.index
    async with life(tmp_path) as again:
        assert set(keys) <= {*again.disk.index}, "they are of use to the first one"


async def test_a_failed_audit_ends_the_use_of_the_disk(replica: Life) -> None:
    keys = fresh_keys(1)
    await replica.save(keys)
    replica.disk.distrust(Difference("layer", 1.5))
    assert replica.disk.state is DiskState.DIFFERS
    assert not replica.disk.index


async def test_what_is_being_read_when_an_audit_fails_is_not_used(
    replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, answers = await hanging(replica, monkeypatch)
    fetch, fetching = replica.begin(keys)
    await replica.until(lambda: replica.disk._readers.waiting == 0)
    replica.disk.distrust(Difference("layer", 1.5))
    replica.publisher.forget_foreign()
    answers.set()
    await fetching
    assert (fetch.state, fetch.reason) == (FetchState.ROLLED_BACK, "not held")
    assert not replica.arrived
    assert replica.pool.counts() == (ROWS, 0, 0, 0, 0)


async def test_what_has_just_been_read_when_an_audit_fails_is_not_used(
    replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fresh_keys(2)
    await replica.have_on_disk(keys)
    read = replica.disk.read

    async def distrusted(*args: Any) -> PullResult:
        result = await read(*args)
        replica.disk.distrust(Difference("layer", 1.5))
        replica.publisher.forget_foreign()
        return result

    monkeypatch.setattr(replica.disk, "read", distrusted)
    fetch = await replica.fetch(keys)
    assert (fetch.state, fetch.reason) == (FetchState.ROLLED_BACK, "reset")
    assert not replica.arrived


@pytest.fixture
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PAUSE", 0.0)


@pytest.mark.usefixtures("retries_at_once")
@pytest.mark.parametrize("is_open", [True, False])
async def test_once_the_store_with_a_wrong_row_is_removed_another_is_begun(
    tmp_path: Path, replica: Life, is_open: bool
) -> None:
    """As the log says, also if it has just failed."""
    before, after = fresh_keys(2)
    await replica.save([before])
    if not is_open:
        replica.disk._close()
    replica.disk.distrust(Difference("layer", 1.5))
    await replica.until(lambda: replica.disk._store is not None)
    assert replica.disk.state is DiskState.DIFFERS
    store_module.remove(store_of(tmp_path))
    await replica.until(lambda: replica.disk.state is DiskState.OPEN)
    assert not replica.disk.index
    await replica.save([after])


async def test_a_canary_that_comes_later_is_compared_too(tmp_path: Path) -> None:
    """Engines may differ only far into a prompt."""
    keys = fresh_keys(2)
    async with life(tmp_path) as replica:
        replica.disk.probed(b"long", CANARY)
        await replica.save(keys)
        assert b"long" in canaries(store_of(tmp_path))
    async with life(tmp_path) as other:
        await other.fetch(keys)
        assert other.holds(keys)
        other.disk.probed(b"long", OTHER)
        await other.until(lambda: other.disk.state is DiskState.DIFFERS)
        assert not other.disk.index
        await other.until(lambda: not other.holds(keys))  # what was read before is forgotten
    async with life(tmp_path) as again:
        again.disk.probed(b"long", CANARY)
        await again.save(fresh_keys(1))
        assert set(keys) <= {*again.disk.index}


async def test_a_store_with_a_wrong_row_is_not_used_after_a_parting_either(replica: Life) -> None:
    replica.disk.distrust(Difference("layer", 1.5))
    await replica.namespace.part("namespace", "namespace~1")
    assert replica.disk.state is DiskState.DIFFERS


async def test_a_reset_ends_the_use_until_the_weights_are_known(tmp_path: Path) -> None:
    keys = fresh_keys(2)
    async with life(tmp_path) as replica:
        await replica.save(keys)
        replica.tier.reset()
        await replica.until(lambda: replica.namespace.resets_done)
        assert not replica.disk.index
        assert await replica.namespace.rejoin("2", replica.namespace.announced)
        replica.disk.probed(b"another canary", OTHER)
        await replica.until(lambda: replica.disk.state is DiskState.OPEN)
        assert not replica.disk.index, "the new weights have a store of their own"
    noted = [canaries(each.folder) for each in summaries(tmp_path)]
    assert noted in ([{b"canary"}, {b"another canary"}], [{b"another canary"}, {b"canary"}]), (
        "each is begun by its own weights"
    )


@pytest.mark.parametrize("call", ["_open", "_compare"])
async def test_a_store_that_was_begun_with_before_a_reset_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What the new weights compute is not for it."""
    (key,) = fresh_keys(1)
    async with life(tmp_path, canary=None) as replica:
        await replica.until(lambda: replica.disk.state is DiskState.COMPARING)
        begun, go_on, original = threading.Event(), threading.Event(), getattr(replica.disk, call)

        def slow(*args: Any) -> Any:
            begun.set()
            go_on.wait()
            return original(*args)

        monkeypatch.setattr(replica.disk, call, slow)
        if call == "_open":
            replica.disk.move("former")
        else:
            replica.disk.probed(b"canary", OTHER)
        await replica.until(begun.is_set)
        replica.tier.reset()
        await replica.until(lambda: replica.namespace.resets_done)
        assert await replica.namespace.rejoin("2", replica.namespace.announced)
        replica.disk.probed(b"canary", CANARY)
        go_on.set()
        await replica.save([key])
    rows = {each.namespace: each.rows for each in summaries(tmp_path)}
    assert {namespace for namespace, count in rows.items() if count} == {"namespace@2"}


def damage(parent: Path, key: bytes) -> None:
    """Flip a bit of the chunk's row."""
    whole = bytearray(file_of(parent, key).read_bytes())
    whole[-100] ^= 1
    file_of(parent, key).write_bytes(whole)


async def test_whole_rows_before_a_damaged_one_wait_for_nobody(
    tmp_path: Path, replica: Life
) -> None:
    """Such as the writing of others."""
    keys = fresh_keys(3)
    await replica.have_on_disk(keys)
    damage(tmp_path, keys[1])
    begun, go_on = threading.Event(), threading.Event()
    replica.disk._thread.submit(lambda: (begun.set(), go_on.wait()))
    await replica.until(begun.is_set)
    fetch, fetching = replica.begin(keys)
    await replica.until(fetching.done)
    assert (len(fetch.committed), fetch.reason) == (1, "checksum")
    assert replica.pool.counts() == (ROWS, 1, 0, 1, 0), "nothing in quarantine"
    go_on.set()


async def test_a_row_that_another_replica_has_removed_is_not_held(
    tmp_path: Path, replica: Life
) -> None:
    """Nobody should look for a broken disk."""
    keys = fresh_keys(2)
    await replica.have_on_disk(keys)
    file_of(tmp_path, keys[1]).unlink()
    fetch = await replica.fetch(keys)
    assert (len(fetch.committed), fetch.reason) == (1, "not held")
    assert replica.disk.report().failures == 0


async def hanging(
    replica: Life, monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> tuple[list[bytes], threading.Event]:
    """Chunks that only the disk has, and an event until which it does not answer."""
    keys = fresh_keys(count)
    await replica.have_on_disk(keys)
    answers, read = threading.Event(), Store.read

    def hang(store: Store, key: bytes, row: memoryview) -> int:
        answers.wait()
        return read(store, key, row)

    monkeypatch.setattr(Store, "read", hang)
    return keys, answers


async def test_nothing_more_is_asked_of_a_disk_while_many_rows_wait_for_it(
    replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be used otherwise. But one fetch may be of any length."""
    keys, answers = await hanging(replica, monkeypatch, 12)
    first, fetching = replica.begin(keys[:10])
    await replica.until(lambda: replica.disk._readers.waiting == 10 - READERS)
    second = await replica.fetch(keys[10:])
    assert (second.state, second.reason) == (FetchState.ROLLED_BACK, "busy")
    answers.set()
    await fetching
    assert first.state is FetchState.COMMITTED


NO_SPACE = OSError(28, "No space left on device")
IO_ERROR = OSError(5, "Input/output error")


async def test_a_disk_that_fails_to_read_is_said_and_counted(
    replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fresh_keys(1)
    await replica.have_on_disk(keys)
    monkeypatch.setattr(Store, "read", Mock(side_effect=IO_ERROR))
    assert (await replica.fetch(keys)).reason == "disk"
    assert replica.disk.report().failures == 1
    assert "Input/output error" in replica.disk.report().problem


async def test_a_full_disk_is_still_read(replica: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, lost = fresh_keys(2)
    await replica.save([saved])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", Mock(side_effect=NO_SPACE))
        replica.compute([lost])
        replica.disk.keep([lost])
        await replica.until(lambda: replica.disk.report().failures == 1)
    assert lost not in replica.disk.index
    replica.pool.reset()
    await replica.fetch([saved])
    assert replica.holds([saved])


async def test_a_disk_without_room_for_a_note_is_still_read(
    tmp_path: Path, replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be noted for others is compared later."""
    saved, wanted = fresh_keys(2)
    await replica.save([saved])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "note", Mock(side_effect=NO_SPACE))
        replica.disk.probed(b"long", CANARY)
        await replica.until(lambda: "No space left" in replica.disk.report().problem)
    replica.pool.reset()
    await replica.fetch([saved])
    assert replica.holds([saved])
    replica.compute([wanted])
    replica.disk.keep([wanted])
    replica.disk._save_at = 0.0
    await replica.until(lambda: wanted in replica.disk.index)
    assert b"long" in canaries(store_of(tmp_path))


async def test_a_disk_that_cannot_be_written_to_loses_a_row_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, lost = fresh_keys(8), fresh_keys(8)
    async with life(tmp_path, rows=8) as replica:
        await replica.save(saved)
        monkeypatch.setattr("os.writev", Mock(side_effect=IO_ERROR))
        replica.compute(lost)
        replica.disk.keep(lost)
        await replica.until(lambda: replica.disk.report().failures == 1)
        assert len(set(saved) & {*replica.disk.index}) == 7


@pytest.mark.usefixtures("retries_at_once")
async def test_a_disk_that_has_room_again_has_no_problem(
    replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = fresh_keys(2)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", Mock(side_effect=NO_SPACE))
        replica.compute([before])
        replica.disk.keep([before])
        await replica.until(lambda: "No space left" in replica.disk.report().problem)
    await replica.save([after])
    await replica.until(lambda: not replica.disk.report().problem)
    assert replica.disk.report().failures == 1


def removed_and_open(parent: Path) -> list[Path]:
    targets = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [each for each in targets if parent in each.parents and "(deleted)" in each.name]


@pytest.mark.usefixtures("retries_at_once")
async def test_a_store_that_was_removed_is_begun_anew_and_its_space_is_free(
    tmp_path: Path, replica: Life
) -> None:
    """At once: Python may look for garbage much later."""
    before, after = fresh_keys(2)
    await replica.save([before])
    gc.disable()
    try:
        store_module.remove(store_of(tmp_path))
        await replica.until(lambda: before not in replica.disk.index)
        await replica.until(lambda: replica.disk.state is DiskState.OPEN)
        assert removed_and_open(tmp_path) == []
    finally:
        gc.enable()
    await replica.save([after])


@pytest.mark.usefixtures("retries_at_once")
async def test_a_store_with_a_damaged_note_is_begun_anew(tmp_path: Path) -> None:
    """Nothing tells any more who computed its rows."""
    before, after = fresh_keys(2)
    async with life(tmp_path) as replica:
        await replica.save([before])
    (note,) = store_of(tmp_path).glob("canary *")
    note.write_bytes(note.read_bytes()[:-5])
    async with life(tmp_path) as again:
        assert again.disk.report().failures == 1
        assert before not in again.disk.index
        await again.save([after])


async def test_a_store_that_cannot_be_removed_does_not_end_the_replica(
    tmp_path: Path, replica: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system may have become read-only."""
    await replica.save(fresh_keys(1))
    (note,) = store_of(tmp_path).glob("canary *")
    note.write_bytes(b"")
    read_only = OSError(30, "Read-only file system")
    monkeypatch.setattr(store_module, "remove", Mock(side_effect=read_only))
    replica.disk.probed(b"canary", {"deep": CANARY["layer"]})
    await replica.until(lambda: "Read-only" in replica.disk.report().problem)


async def test_a_limit_without_room_for_a_chunk_is_said(tmp_path: Path) -> None:
    async with life(tmp_path, canary=None, rows=0.5) as replica:
        await replica.until(lambda: replica.disk.report().failures > 0)
        assert "6144 bytes hold no chunk of 8192" in replica.disk.report().problem


async def test_a_disk_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with life(tmp_path / "file" / "folder", canary=None) as replica:
        await replica.until(lambda: replica.disk.report().failures > 0)
        assert replica.disk.report().state == "closed"
        assert "NotADirectoryError" in replica.disk.report().problem


def test_a_folder_in_which_others_may_put_rows_is_refused_at_launch(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    complaint = f"xavier_disk='{tmp_path}' may be written to by other users (mode 1777); name a"
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        Life(tmp_path)


async def test_without_a_fingerprint_of_the_weights_the_disk_stays_closed(tmp_path: Path) -> None:
    """Else rows of other weights would be read, once the name stands for those."""
    keys = fresh_keys(2)
    async with life(tmp_path, canary=None, by_name=["qwen", "draft"]) as replica:
        replica.compute(keys)
        replica.disk.probed(b"canary", CANARY)
        replica.disk.keep(keys)
        replica.tier.reset()
        await replica.namespace.rejoin("2", replica.namespace.announced)
        await replica.disk._work()
        report = replica.disk.report()
        assert (report.state, report.failures) == ("weights unknown", 0)
        assert "no files with the weights of qwen, draft" in report.problem
        assert "launch the model from a folder" in report.problem
    assert summaries(tmp_path) == []


# -- the sets of sources ---------------------------------------------------------------------------


class Peers:
    """A tier with the peers "one" and "two", which hold the chunks of the same name, and a disk."""

    def __init__(self, tmp_path: Path, one: bytes, two: bytes, saved: bytes) -> None:
        self.life = Life(tmp_path)
        keys = {each: bytes([each]) * 36 for each in {*one, *two, *saved}}
        self.keys = keys
        holdings = {"one": map(keys.__getitem__, one), "two": map(keys.__getitem__, two)}
        self.life.index.apply(snapshot(*map(compared, holdings), **holdings))
        self.life.disk.index = tuple(keys[each] for each in saved)
        self.tier = self.life.tier
        self.life.peers.ready = True

    def run(self, keys: bytes, without: Sequence[str] = ()) -> tuple[int, list[str]]:
        wanted = [self.keys.get(each, bytes(36)) for each in keys]
        count, sources = self.tier.run(wanted, ~self.tier.peers.set_of(without))
        return count, sorted(self.tier.peers.names(sources)) if count else []

    def holders(self, key: bytes) -> list[str]:
        return sorted(self.tier.peers.names(self.tier.holders(self.keys[key[0]])))


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(tmp_path, one=b"abc", two=b"ab", saved=b"abcd")


def test_the_disk_is_one_more_source(peers: Peers) -> None:
    assert peers.holders(b"a") == ["disk", "one", "two"]
    assert peers.holders(b"d") == ["disk"]


def test_the_longest_run_of_any_source_counts(peers: Peers) -> None:
    assert peers.run(b"abcd") == (4, ["disk"])
    assert peers.run(b"abcx") == (3, ["disk", "one"])
    assert peers.run(b"abcd", without=["disk"]) == (3, ["one"])
    assert peers.run(b"ab", without=["one"]) == (2, ["disk", "two"])
    assert peers.run(b"x") == (0, [])


def test_switched_off_nothing_comes_from_anywhere(peers: Peers) -> None:
    peers.life.index.members.follow(Settings(1, enabled=False))
    assert peers.run(b"abcd") == (0, [])


def test_between_a_reset_and_the_move_nothing_is_there(peers: Peers) -> None:
    peers.life.namespace.announce_reset()
    assert not peers.tier.ready
    assert peers.holders(b"a") == []
