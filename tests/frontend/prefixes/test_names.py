"""A prefix has one name in its tenant, and lives as long as it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.prefixes import names as module
from xinference_xavier.frontend.prefixes.names import Names, TooManyError
from xinference_xavier.frontend.prefixes.prefix import NewPrefix, Terms
from xinference_xavier.frontend.prefixes.store import Store

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
    store = Store(file)
    names = Names(store, clock)
    await names.load()
    yield names
    await store.close()


async def loaded(file: Path, clock: Clock) -> Names:
    """After a restart."""
    store = Store(file)
    names = Names(store, clock)
    await names.load()
    await store.close()
    return names


async def test_a_name_belongs_to_a_model_and_a_tenant(names: Names) -> None:
    added = await names.add("model", new(tenant="a"))
    assert names.find("model", "a", "guide") is added
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
    assert names.find("model", "", "guide") is second


async def test_each_use_begins_a_lifetime_anew(names: Names, clock: Clock, file: Path) -> None:
    await names.add("model", new(ttl=60.0))
    for _ in range(3):
        clock.now += 59.0
        assert await names.use(names.find("model", "", "guide")) == CONTENT
        assert await names.expire("model")
    assert (await loaded(file, clock)).find("model", "", "guide").used == clock.now
    clock.now += 60.0
    with pytest.raises(PrefixNotFoundError):
        names.find("model", "", "guide")
    assert not await names.expire("model")
    assert names.models() == (await loaded(file, clock)).models() == []


async def test_not_every_use_is_written(names: Names, clock: Clock, file: Path) -> None:
    added = await names.add("model", new())
    clock.now += 9.0
    await names.use(added)
    assert added.used == clock.now
    assert (await loaded(file, clock)).find("model", "", "guide").used == clock.now - 9.0


async def test_changes_survive_a_restart(names: Names, clock: Clock, file: Path) -> None:
    await names.change(await names.add("model", new()), Terms(9.0, "all", "hard"))
    assert (await loaded(file, clock)).find("model", "", "guide").terms == Terms(9.0, "all", "hard")


async def test_a_model_has_so_many_names(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREFIXES", 2)
    for name in ("a", "b", "b"):
        await names.add("model", new(name))
    with pytest.raises(TooManyError, match="'model' has 2 named prefixes; remove some first"):
        await names.add("model", new("c"))
    await names.add("other", new("c"))
