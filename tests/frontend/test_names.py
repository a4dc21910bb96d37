"""A prefix has one name in its tenant, and lives as long as it is used. A name survives a restart,
and what is deleted leaves nothing behind."""

import asyncio
import difflib
import multiprocessing
import random
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.remote import PATIENCE
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend import names as module
from xinference_xavier.frontend.names import Names, Store
from xinference_xavier.frontend.prefix import NewPrefix, Prefix, Terms

CONTENT = {"prompt": "text"}


def new(name: str = "guide", tenant: str = "", ttl: float = 60.0) -> NewPrefix:
    return NewPrefix(name, tenant, CONTENT, Terms(ttl))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "xavier" / "prefixes.db"


@pytest.fixture
async def names(file: Path, clock: Clock) -> AsyncIterator[Names]:
    names = Names(Store(file), clock, clock)
    await names.load()
    yield names
    await names.close()


async def reopened(file: Path) -> list[Prefix]:
    """What is there after a restart."""
    store = Store(file)
    found = await store.open()
    await store.close()
    return found


@pytest.fixture
async def other(file: Path, clock: Clock, names: Names) -> AsyncIterator[Names]:
    """The names that another process knows."""
    other = Names(Store(file), clock, clock)
    await other.load()
    yield other
    await other.close()


async def test_a_name_belongs_to_a_model_and_a_tenant(names: Names) -> None:
    added = await names.add("model", new(tenant="a"))
    assert names.find("model", "a", "guide") == added
    assert names.of("model") == [added]
    for model, tenant in (("model", ""), ("model", "b"), ("other", "a")):
        with pytest.raises(PrefixNotFoundError, match=r"has no prefix named 'guide'$"):
            names.find(model, tenant, "guide")


async def test_an_unknown_name_is_refused_with_similar_ones_of_its_tenant(names: Names) -> None:
    await names.add("model", new("travel guide"))
    await names.add("model", new("travel guides", tenant="b"))
    with pytest.raises(PrefixNotFoundError, match=r"'travel gide'; did you mean 'travel guide'\?$"):
        names.find("model", "", "travel gide")


async def test_a_name_that_is_given_again_stands_for_the_new_text(names: Names) -> None:
    first = await names.add("model", new())
    second = await names.add("model", new())
    assert names.of("model") == [second]
    with pytest.raises(PrefixNotFoundError, match="has been removed"):
        await names.content(first)
    await names.remove(first)
    assert names.find("model", "", "guide") == second


async def test_each_use_begins_a_lifetime_anew(names: Names, clock: Clock, file: Path) -> None:
    await names.add("model", new(ttl=60.0))
    for _ in range(3):
        clock.now += 59.0
        assert await names.use(names.find("model", "", "guide")) == CONTENT
        await names.tend()
    assert [each.used for each in await reopened(file)] == [clock.now]
    clock.now += 60.0
    with pytest.raises(PrefixNotFoundError):
        names.find("model", "", "guide")
    assert names.of("model") == []
    await names.tend()
    clock.now += 300.0
    await names.tend()
    assert names.models() == []
    assert await reopened(file) == []


async def test_not_every_use_is_written_but_the_last_ones_are_at_the_end(
    clock: Clock, file: Path
) -> None:
    names = Names(Store(file), clock, clock)
    await names.load()
    added = await names.add("model", new())
    for _ in range(2):
        clock.now += 4.0
        await names.use(added)
        await names.tend()
    assert names.find("model", "", "guide").used == clock.now
    assert [each.used for each in await reopened(file)] == [clock.now - 4.0]
    await names.close()
    assert [each.used for each in await reopened(file)] == [clock.now]


async def test_what_one_process_changes_another_one_knows(names: Names, other: Names) -> None:
    added = await names.add("model", new())
    await other.refresh()
    assert other.find("model", "", "guide") == added
    await names.change(added, Terms(9.0))
    await other.refresh()
    assert other.find("model", "", "guide").terms == Terms(9.0)
    await other.remove(added)
    await names.refresh()
    assert names.models() == []


async def test_what_one_process_uses_another_one_does_not_remove(
    names: Names, other: Names, clock: Clock
) -> None:
    added = await names.add("model", new(ttl=60.0))
    for _ in range(60):
        clock.now += 30.0
        await names.use(added)
        await names.tend()
        await other.tend()
    assert await other.use(other.find("model", "", "guide")) == CONTENT


async def test_a_clock_that_is_ahead_for_a_moment_removes_nothing(
    file: Path, clock: Clock, names: Names
) -> None:
    await names.add("model", new(ttl=60.0))
    wall = Clock()
    wall.now = clock.now + 1e8
    ahead = Names(Store(file), wall, clock)
    await ahead.load()
    for _ in range(299):
        await ahead.tend()
        clock.now += 1.0
    assert ahead.of("model") == []
    wall.now = clock.now = 1000.0
    await ahead.tend()
    assert [each.name for each in ahead.of("model")] == ["guide"]
    await ahead.close()


def full(*args: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_full_disk_fails_no_request(
    names: Names, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    added = await names.add("model", new(ttl=60.0))
    with monkeypatch.context() as patch:
        patch.setattr(names._store, "_many", full)
        for _ in range(100):
            clock.now += 30.0
            assert await names.use(names.find("model", "", "guide")) == CONTENT
            await names.tend()
        clock.now += 61.0
        await names.tend()
        clock.now += 301.0
        await names.tend()
    assert caplog.text.count("the names' file cannot be written") == 1
    clock.now += 10.0
    await names.use(added)
    await names.tend()
    assert names.find("model", "", "guide").used == clock.now


async def test_a_locked_file_fails_no_request(names: Names, clock: Clock, file: Path) -> None:
    added = await names.add("model", new())
    with sqlite3.connect(file, isolation_level=None) as lock:
        lock.execute("BEGIN IMMEDIATE")
        writing = asyncio.ensure_future(names.remove(added))
        clock.now += 30.0
        assert await names.use(names.find("model", "", "guide")) == CONTENT
        assert not writing.done()
        lock.execute("ROLLBACK")
    await writing
    lock.close()


async def test_similar_names_cost_little(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing all of these long ones would take seconds."""
    source = random.Random(1)
    for number in range(1000):
        name = "".join(source.choices("ab", k=199 if number % 2 else 30))
        prefix = Prefix(f"{number:016x}", "model", "", name, Terms(), 1000.0, 1000.0)
        names._by_model.setdefault("model", {})["", name] = prefix
    compared: list[int] = []

    class Counted(difflib.SequenceMatcher[str]):
        def set_seq1(self, a: Any) -> None:
            compared.append(len(a))
            super().set_seq1(a)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    for name in ("a" * 199, "a" * 4_000_000):
        with pytest.raises(PrefixNotFoundError, match=r"has no prefix named 'a+"):
            names.find("model", "", name)
    assert compared == []
    with pytest.raises(PrefixNotFoundError, match="did you mean"):
        names.find("model", "", "ab" * 15)
    assert 0 < len(compared) <= 201
    assert max(compared) == 30


async def test_a_model_has_so_many_names(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREFIXES", 2)
    for name in ("a", "b", "b"):
        await names.add("model", new(name))
    with pytest.raises(ValueError, match="'model' has 2 named prefixes; remove some first"):
        await names.add("model", new("c"))
    await names.add("other", new("c"))


# -- the file ----------------------------------------------------------------------------------

GUIDE = Prefix("0" * 16, "model", "tenant", "guide", Terms(60.0, "all", "hard"), 1.0, 2.0)
OTHER = Prefix("1" * 16, "model", "", "guide", Terms(60.0, 1, "soft"), 3.0, 3.0)
CHAT = {"messages": [{"role": "user", "content": "ä\ud800"}]}


@pytest.fixture
async def store(file: Path) -> AsyncIterator[Store]:
    store = Store(file)
    assert await store.open() == []
    yield store
    await store.close()


async def test_what_was_added_is_there_after_a_restart(store: Store, file: Path) -> None:
    await store.add(GUIDE, CHAT)
    await store.add(OTHER, CONTENT)
    assert await reopened(file) == [GUIDE, OTHER]
    assert await store.content(GUIDE.id) == CHAT


async def test_changes_are_there_after_a_restart(store: Store, file: Path) -> None:
    await store.add(GUIDE, CHAT)
    changed = Prefix("0" * 16, "model", "tenant", "guide", Terms(9.0, 1, "soft"), 1.0, 7.0)
    await store.change(GUIDE.id, changed.terms, 7.0)
    assert await reopened(file) == [changed]
    await store.note_uses({GUIDE.id: 6.0, "unknown": 6.0})
    assert await reopened(file) == [changed], "another process has noted a later use"


def test_only_its_user_can_read_the_file(store: Store, file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_file_of_a_later_version_is_left_alone(store: Store, file: Path) -> None:
    await store.add(GUIDE, CHAT)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(ValueError, match="has schema 2, this version of xinference-xavier knows"):
        await reopened(file)


@pytest.fixture
def foreign(file: Path) -> Path:
    file.parent.mkdir()
    file.write_bytes(b"something else" * 1000)
    return file


async def test_a_file_of_somebody_else(foreign: Path) -> None:
    with pytest.raises(sqlite3.DatabaseError):
        await reopened(foreign)


async def test_several_processes_may_start_on_a_new_folder_at_once(tmp_path: Path) -> None:
    for number in range(10):
        stores = [Store(tmp_path / str(number) / "prefixes.db") for _ in range(4)]
        assert await asyncio.gather(*(store.open() for store in stores)) == [[]] * 4
        await stores[0].add(GUIDE, CHAT)
        assert await asyncio.gather(*(store.changes() for store in stores)) == [[GUIDE]] * 4
        for store in stores:
            await store.close()


async def test_a_start_that_ended_in_the_middle_is_made_up_for(store: Store, file: Path) -> None:
    await store.add(GUIDE, CHAT)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 0")
    assert await reopened(file) == [GUIDE]


async def test_only_what_has_changed_is_read_again(store: Store, file: Path) -> None:
    assert await store.changes() is None
    await store.add(GUIDE, CHAT)
    assert await store.changes() == [GUIDE]
    assert await store.changes() is None


async def test_what_is_used_is_not_removed(store: Store) -> None:
    await store.add(GUIDE, CHAT)
    await store.add(OTHER, CHAT)
    await store.note_uses({GUIDE.id: 50.0})
    await store.remove_unused([GUIDE.id, OTHER.id], now=100.0)
    assert [each.id for each in await store.changes() or ()] == [GUIDE.id]


def traces(folder: Path, text: str) -> list[str]:
    """The files that have this text."""
    return [each.name for each in folder.iterdir() if text.encode() in each.read_bytes()]


@pytest.mark.parametrize("how", ["removed", "replaced", "expired"])
async def test_deleted_texts_leave_no_traces(store: Store, file: Path, how: str) -> None:
    secret = "the text of a contract " * 1000
    await store.add(GUIDE, {"prompt": secret})
    assert traces(file.parent, "of a contract") != []
    if how == "removed":
        await store.remove([GUIDE.id])
    elif how == "expired":
        await store.remove_unused([GUIDE.id], now=100.0)
    else:
        again = Prefix("2" * 16, "model", "tenant", "guide", Terms(), 5.0, 5.0)
        await store.add(again, CHAT)
    assert traces(file.parent, "of a contract") == []


async def test_texts_that_nobody_named_are_deleted(store: Store, file: Path) -> None:
    """Earlier versions wrote them."""
    unnamed = Prefix("3" * 16, "model", "", "\0" + "f" * 64, Terms(), 5.0, 5.0)
    await store.add(unnamed, {"prompt": "what somebody asked"})
    await store.add(GUIDE, CHAT)
    assert await reopened(file) == [GUIDE]
    assert traces(file.parent, "what somebody asked") == []


async def test_a_text_has_so_many_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 100)
    with pytest.raises(ValueError, match="'guide' has 1014 bytes, more than 100; shorten it"):
        await store.add(GUIDE, {"prompt": "x" * 1000})


async def test_all_texts_have_so_many_bytes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE", 1 << 20)
    store = Store(file)
    await store.open()
    await store.add(GUIDE, {"prompt": "x" * 600_000})
    with pytest.raises(sqlite3.OperationalError, match="full"):
        await store.add(OTHER, {"prompt": "x" * 600_000})
    await store.remove([GUIDE.id])
    await store.add(OTHER, {"prompt": "x" * 600_000})
    await store.close()


@pytest.mark.parametrize("thread", ["_reading", "_writing"])
def test_a_file_that_never_answers_does_not_keep_the_process_from_ending(
    file: Path, thread: str
) -> None:
    def hang() -> None:
        getattr(Store(file), thread).submit(threading.Event().wait)

    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    process.join(PATIENCE)
    process.kill()
    assert process.exitcode == 0
