"""Names survive a restart, and what is deleted leaves nothing behind."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from xinference_xavier.frontend import names as module
from xinference_xavier.frontend.names import SchemaError, Store, TooManyError
from xinference_xavier.frontend.prefix import Prefix, Terms

GUIDE = Prefix("0" * 16, "model", "tenant", "guide", Terms(60.0, "all", "hard"), 1.0, 2.0)
OTHER = Prefix("1" * 16, "model", "", "guide", Terms(60.0, 1, "soft"), 3.0, 3.0)
CONTENT = {"messages": [{"role": "user", "content": "ä\ud800"}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "xavier" / "prefixes.db"


@pytest.fixture
async def store(file: Path) -> AsyncIterator[Store]:
    store = Store(file)
    assert await store.open() == []
    yield store
    await store.close()


async def reopened(file: Path) -> list[Prefix]:
    store = Store(file)
    found = await store.open()
    await store.close()
    return found


async def test_what_was_added_is_there_after_a_restart(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    await store.add(OTHER, {"prompt": "text"})
    assert await reopened(file) == [GUIDE, OTHER]
    assert await store.content(GUIDE.id) == CONTENT


async def test_a_name_is_there_once(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    again = Prefix("2" * 16, "model", "tenant", "guide", Terms(), 5.0, 5.0)
    await store.add(again, {"prompt": "text"})
    assert await reopened(file) == [again]
    assert await store.content(GUIDE.id) is None


async def test_changes_are_there_after_a_restart(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    changed = Prefix("0" * 16, "model", "tenant", "guide", Terms(9.0, 1, "soft"), 1.0, 7.0)
    await store.change(GUIDE.id, changed.terms, 7.0)
    assert await reopened(file) == [changed]
    await store.note_uses({GUIDE.id: 6.0, "unknown": 6.0})
    assert await reopened(file) == [changed], "another process has noted a later use"


async def test_what_was_removed_is_gone(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    await store.add(OTHER, CONTENT)
    await store.remove([GUIDE.id, "unknown"])
    assert await reopened(file) == [OTHER]


def test_only_its_user_can_read_the_file(store: Store, file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600


async def test_a_file_of_a_later_version_is_left_alone(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(SchemaError, match="has schema 2, this version of xinference-xavier knows"):
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
        await stores[0].add(GUIDE, CONTENT)
        assert await asyncio.gather(*(store.changes() for store in stores)) == [[GUIDE]] * 4
        for store in stores:
            await store.close()


async def test_a_start_that_ended_in_the_middle_is_made_up_for(store: Store, file: Path) -> None:
    await store.add(GUIDE, CONTENT)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 0")
    assert await reopened(file) == [GUIDE]


async def test_only_what_has_changed_is_read_again(store: Store, file: Path) -> None:
    assert await store.changes() is None
    await store.add(GUIDE, CONTENT)
    assert await store.changes() == [GUIDE]
    assert await store.changes() is None


async def test_what_is_used_is_not_removed(store: Store) -> None:
    await store.add(GUIDE, CONTENT)
    await store.add(OTHER, CONTENT)
    await store.note_uses({GUIDE.id: 50.0})
    await store.remove_unused([GUIDE.id, OTHER.id], now=100.0)
    assert [each.id for each in await store.changes() or ()] == [GUIDE.id]


def traces(folder: Path, text: str) -> list[str]:
    """The files that have it."""
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
        await store.add(again, CONTENT)
    assert traces(file.parent, "of a contract") == []


async def test_texts_that_nobody_named_are_deleted(file: Path) -> None:
    """Earlier versions wrote them."""
    store = Store(file)
    await store.open()
    unnamed = Prefix("3" * 16, "model", "", "\0" + "f" * 64, Terms(), 5.0, 5.0)
    await store.add(unnamed, {"prompt": "what somebody asked"})
    await store.add(GUIDE, CONTENT)
    await store.close()
    assert await reopened(file) == [GUIDE]
    assert traces(file.parent, "what somebody asked") == []


async def test_a_text_has_so_many_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 100)
    with pytest.raises(TooManyError, match="'guide' has 1014 bytes, more than 100; shorten it"):
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
