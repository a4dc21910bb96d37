"""Names survive a restart."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from xinference_xavier.frontend.prefixes.prefix import Prefix, Terms
from xinference_xavier.frontend.prefixes.store import SchemaError, Store

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
    await store.update([changed])
    assert await reopened(file) == [changed]


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
