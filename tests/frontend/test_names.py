"""A prefix has one name in its tenant, and lives as long as it is used."""

from __future__ import annotations

import asyncio
import difflib
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend import names as store_module
from xinference_xavier.frontend.names import Names, Store, TooManyError
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
    return tmp_path / "prefixes.db"


@pytest.fixture
async def names(file: Path, clock: Clock) -> AsyncIterator[Names]:
    names = Names(Store(file), clock, clock)
    await names.load()
    yield names
    await names.close()


async def loaded(file: Path, clock: Clock) -> Names:
    """After a restart."""
    names = Names(Store(file), clock, clock)
    await names.load()
    await names.close()
    return names


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
    assert (await loaded(file, clock)).find("model", "", "guide").used == clock.now
    clock.now += 60.0
    with pytest.raises(PrefixNotFoundError):
        names.find("model", "", "guide")
    assert names.of("model") == []
    await names.tend()
    clock.now += 300.0
    await names.tend()
    assert names.models() == (await loaded(file, clock)).models() == []


async def test_not_every_use_is_written(names: Names, clock: Clock, file: Path) -> None:
    added = await names.add("model", new())
    for _ in range(2):
        clock.now += 4.0
        await names.use(added)
        await names.tend()
    assert names.find("model", "", "guide").used == clock.now
    assert (await loaded(file, clock)).find("model", "", "guide").used == clock.now - 4.0


async def test_the_last_uses_are_written_at_the_end(clock: Clock, file: Path) -> None:
    names = Names(Store(file), clock, clock)
    await names.load()
    added = await names.add("model", new())
    for _ in range(2):
        clock.now += 4.0
        await names.use(added)
        await names.tend()
    await names.close()
    assert (await loaded(file, clock)).find("model", "", "guide").used == clock.now


async def test_what_one_process_changes_another_one_knows(names: Names, other: Names) -> None:
    added = await names.add("model", new())
    await other.refresh()
    found = other.find("model", "", "guide")
    assert found == added
    await names.change(added, Terms(9.0))
    await other.refresh()
    current = other.current(found)
    assert current is not None
    assert current.terms == Terms(9.0)
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
    assert names.failures > 2
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


async def test_changes_survive_a_restart(names: Names, clock: Clock, file: Path) -> None:
    await names.change(await names.add("model", new()), Terms(9.0, "all", "hard"))
    assert (await loaded(file, clock)).find("model", "", "guide").terms == Terms(9.0, "all", "hard")


async def test_a_model_has_so_many_names(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_PREFIXES", 2)
    for name in ("a", "b", "b"):
        await names.add("model", new(name))
    with pytest.raises(TooManyError, match="'model' has 2 named prefixes; remove some first"):
        await names.add("model", new("c"))
    await names.add("other", new("c"))
