"""A prefix has one name in its tenant, and lives as long as it is used. Its file is whole at any
time, has one writer, and what is removed is not in it."""

import asyncio
import difflib
import json
import os
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.remote import PATIENCE
from tests.logged import messages
from xinference_xavier.errors import NamesError, PrefixNotFoundError, PrefixRefusedError
from xinference_xavier.protocol.prefixes import NewPrefix, Terms
from xinference_xavier.tracker import names as module
from xinference_xavier.tracker.names import Names
from xinference_xavier.tracker.names_file import NamesFile, Prefix

MODEL = "模型 m"
TEXT = json.dumps({"prompt": "the text of a contract"})


def new(name: str = "guide", tenant: str = "", ttl: float = 60.0, content: str = TEXT) -> NewPrefix:
    return NewPrefix(tenant, name, content, Terms(ttl))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return NamesFile(tmp_path / "names", MODEL).path


@pytest.fixture
async def names(tmp_path: Path, clock: Clock) -> AsyncIterator[Names]:
    names = Names(tmp_path, MODEL, clock)
    await names.tend()
    yield names
    names.close()


@pytest.fixture
def reopen(names: Names, tmp_path: Path, clock: Clock) -> Callable[[], Awaitable[Names]]:
    async def reopen() -> Names:
        """The names that the next tracker has."""
        names.close()
        successor = Names(tmp_path, MODEL, clock)
        async with asyncio.timeout(PATIENCE):
            while not successor.readable:  # the lock is released by a thread
                await successor.tend()
        successor.close()
        return successor

    return reopen


def traces(folder: Path, text: str = "of a contract") -> list[str]:
    """The files that have this text."""
    files = (each for each in folder.rglob("*") if each.is_file())
    return [each.name for each in files if text.encode() in each.read_bytes()]


# -- names -------------------------------------------------------------------------------------


async def test_a_name_belongs_to_a_tenant(names: Names) -> None:
    added = await names.add(new(tenant="a"))
    assert names.find("a", "guide") == added
    assert names.all() == [added]
    for tenant in ("", "b"):
        with pytest.raises(PrefixNotFoundError, match=r"has no prefix named 'guide'$"):
            names.find(tenant, "guide")


async def test_an_unknown_name_is_refused_with_similar_ones_of_its_tenant(names: Names) -> None:
    await names.add(new("travel guide"))
    await names.add(new("travel guides", tenant="b"))
    with pytest.raises(PrefixNotFoundError, match=r"'travel gide'; did you mean 'travel guide'\?$"):
        names.find("", "travel gide")


async def test_a_name_that_is_given_again_stands_for_the_new_text(names: Names) -> None:
    first = await names.add(new())
    second = await names.add(new(content='{"prompt": "other"}'))
    assert names.all() == [second]
    assert second.id != first.id, "by which replicas and API processes know a text"


async def test_each_use_begins_a_lifetime_anew(names: Names, clock: Clock, tmp_path: Path) -> None:
    await names.add(new(ttl=60.0))
    for _ in range(3):
        clock.now += 59.0
        assert names.use("", "guide").content == TEXT
        await names.tend()
    clock.now += 60.0
    with pytest.raises(PrefixNotFoundError):
        names.use("", "guide")
    assert names.all() == []
    await names.tend()
    assert traces(tmp_path) == []


async def test_terms_change_without_the_text(names: Names, clock: Clock) -> None:
    added = await names.add(new())
    clock.now += 59.0
    changed = await names.change("", "guide", Terms(9.0, "all", "hard"))
    assert (changed.id, changed.content, changed.terms) == (added.id, TEXT, (9.0, "all", "hard"))
    assert names.find("", "guide").expires == clock.now + 9.0


async def test_a_model_has_so_many_names_and_bytes(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PREFIXES", 2)
    monkeypatch.setattr(module, "MAX_TEXTS", 100)
    for name in ("a", "b", "b"):
        await names.add(new(name))
    with pytest.raises(PrefixRefusedError, match="has 2 named prefixes; remove some first"):
        await names.add(new("c"))
    with pytest.raises(PrefixRefusedError, match=r"'b' has 70 bytes, and the other texts .* 36"):
        await names.add(new("b", content="x" * 70))
    assert names.find("", "b").content == TEXT


async def test_similar_names_cost_little(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing all of these long ones would take seconds."""
    source = random.Random(1)
    many = ("".join(source.choices("ab", k=199 if n % 2 else 30)) for n in range(1000))
    names._prefixes = {("", name): Prefix(name, "", name, Terms(), 1.0, TEXT) for name in many}
    compared: list[int] = []

    class Counted(difflib.SequenceMatcher[str]):
        def set_seq1(self, a: Any) -> None:
            compared.append(len(a))
            super().set_seq1(a)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    for name in ("a" * 199, "a" * 4_000_000):
        with pytest.raises(PrefixNotFoundError, match=r"has no prefix named 'a+"):
            names.find("", name)
    assert compared == []
    with pytest.raises(PrefixNotFoundError, match="did you mean"):
        names.find("", "ab" * 15)
    assert 0 < len(compared) <= 201
    assert max(compared) == 30


# -- the file ----------------------------------------------------------------------------------

Reopen = Callable[[], Awaitable[Names]]


async def test_the_next_tracker_has_the_same_names_and_begins_their_lifetimes_anew(
    names: Names, clock: Clock, reopen: Reopen
) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "ä\ud800"}]})
    added = [
        await names.add(new("b", content=chat)),
        await names.add(NewPrefix("tenant", "a", TEXT, Terms(60.0, "all", "hard"))),
    ]
    clock.now += 86400.0
    successor = await reopen()
    assert [*successor._prefixes.values()] == added
    assert successor._prefixes["", "b"].expires == clock.now + 60.0


async def test_only_its_user_can_read_the_file(names: Names, file: Path) -> None:
    await names.add(new())
    assert [each.stat().st_mode & 0o777 for each in (file, file.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_removed_texts_leave_no_traces(names: Names, tmp_path: Path, how: str) -> None:
    await names.add(new())
    assert traces(tmp_path) != []
    if how == "removed":
        await names.remove("", "guide")
    else:
        await names.add(new(content='{"prompt": "other"}'))
    assert traces(tmp_path) == []


def full(*args: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_full_disk_changes_nothing_and_is_tried_again_where_nobody_is_told(
    names: Names,
    clock: Clock,
    reopen: Reopen,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    added = await names.add(new())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for change in (
            names.add(new("more")),
            names.add(new(content="{}")),
            names.change("", "guide", Terms()),
            names.remove("", "guide"),
        ):
            with pytest.raises(NamesError, match=r"cannot be changed: .*No space left on device"):
                await change
        assert names.all() == [added]
        assert traces(tmp_path) == [names._file.path.name], "nothing half written"
        assert messages(caplog) == [], "clients were told"
        clock.now += 61.0
        for _ in range(3):
            await names.tend()
        (line,) = messages(caplog)
        assert "No space left on device" in line
    await names.tend()
    assert (await reopen())._prefixes == {}


async def test_what_a_tracker_did_not_end_to_write_changes_nothing(
    names: Names, file: Path, reopen: Reopen
) -> None:
    added = await names.add(new())
    half = file.with_suffix(".new")
    half.write_text('{"version": 1, "prefixes": [')
    assert [*(await reopen())._prefixes.values()] == [added]
    assert not half.exists(), "it may have texts that were removed since"


async def test_a_change_survives_a_power_failure(
    names: Names, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []

    def sync(opened: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{opened}"), file.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    await names.add(new())
    written = str(file.with_suffix(".new"))
    assert synced == [(written, False), (str(file.parent), True)]


async def test_a_closed_file_answers(names: Names) -> None:
    await names.add(new(ttl=60.0))
    names.close()
    async with asyncio.timeout(PATIENCE):
        await names.tend()
        with pytest.raises(NamesError, match="the tracker has ended"):
            await names.add(new("more"))
    assert not names.readable


async def test_a_model_may_have_a_long_name(tmp_path: Path, clock: Clock) -> None:
    """A Chinese character takes nine bytes of a file's name."""
    found = {}
    for model in ("模" * 100, "模" * 99 + "型", "型" * 27):
        names = Names(tmp_path, model, clock)
        await names.tend()
        await names.add(new())
        found[model] = names._file.path.name
        names.close()
    assert len(set(found.values())) == 3


async def test_a_change_whose_client_has_gone_is_made(names: Names) -> None:
    """xoscar cancels a call that its caller has given up, perhaps while the file is written."""
    await names._changing.acquire()
    adding = asyncio.ensure_future(names.add(new()))
    await asyncio.sleep(0)
    adding.cancel()
    names._changing.release()
    with pytest.raises(asyncio.CancelledError):
        await adding
    async with asyncio.timeout(PATIENCE):
        while not names.all():
            await names._in_thread(bool)


async def test_there_is_one_writer(names: Names, tmp_path: Path, clock: Clock) -> None:
    """Another xinference may have the same data folder."""
    await names.add(new())
    other = Names(tmp_path, MODEL, clock)
    await other.tend()
    with pytest.raises(NamesError, match=r"another xinference uses .*; give this one another"):
        await other.add(new("more"))
    names.close()
    async with asyncio.timeout(PATIENCE):
        while not other.readable:
            await other.tend()
    assert [each.name for each in other.all()] == ["guide"]
    other.close()


def spoil(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"is damaged \(.*\); mend it or move it away"),
        ('{"version": 1, "prefixes": [{}]}', r"is damaged \(KeyError"),
        ('{"version": 2}', "has version 2, and 1 is known here; mend it or move it away"),
    ],
)
async def test_a_file_that_cannot_be_read_is_left_alone_and_tried_again(
    file: Path, tmp_path: Path, clock: Clock, text: str, reason: str
) -> None:
    os.mkdir(file.parent)
    spoil(file, text)
    names = Names(tmp_path, MODEL, clock)
    with pytest.raises(NamesError, match="cannot be read: the tracker has just started"):
        names.all()
    await names.tend()
    for ask in (names.add(new()), names.change("", "guide", Terms()), names.remove("", "guide")):
        with pytest.raises(NamesError, match=f"cannot be read: .*{reason}"):
            await ask
    assert traces(tmp_path, text) == [file.name]
    os.unlink(file)
    await names.tend()
    assert names.all() == []
    names.close()


# -- what API processes kept before ------------------------------------------------------------


def keep_formerly(former: Path) -> sqlite3.Connection:
    """Write what an API process has kept, which has not closed the file."""
    now = time.time()
    connection = sqlite3.connect(former)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(
        "CREATE TABLE prefixes (id, model_uid, tenant, name, ttl REAL, copies TEXT, retention,"
        " created REAL, used REAL, content)"
    )
    connection.executemany(
        "INSERT INTO prefixes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            ("0" * 16, MODEL, "a", "guide", 60.0, "all", "hard", 5.0, now, TEXT),
            ("1" * 16, MODEL, "", "expired", 60.0, "1", "soft", 6.0, now - 61.0, TEXT),
            ("2" * 16, "other", "", "guide", 60.0, "1", "soft", 7.0, now, TEXT),
        ],
    )
    connection.commit()
    return connection


async def test_names_of_api_processes_are_taken_over_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    former = tmp_path / "prefixes.db"
    connection = keep_formerly(former)
    found = {}
    for model in (MODEL, "other"):
        names = Names(tmp_path, model, clock)
        await names.tend()
        found[model] = names.all()
        names.close()
    connection.close()
    assert found == {
        MODEL: [Prefix("0" * 16, "a", "guide", Terms(60.0, "all", "hard"), 5.0, TEXT)],
        "other": [Prefix("2" * 16, "", "guide", Terms(60.0, 1, "soft"), 7.0, TEXT)],
    }
    assert not former.exists()
    (line,) = messages(caplog)
    assert line.startswith(f"named prefixes taken over: from={former} ")
    assert line.endswith("names=2 models=2")


@pytest.mark.parametrize("why", ["empty", "damaged", "disk full"])
async def test_a_model_goes_on_without_former_names_that_cannot_be_taken_over(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    former = tmp_path / "prefixes.db"
    if why == "disk full":
        keep_formerly(former).close()
    else:
        former.write_text("" if why == "empty" else "damaged " * 1000)
    names = Names(tmp_path, MODEL, clock)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        await names.tend()
    assert names.all() == []
    await names.add(new())
    (line,) = messages(caplog)
    assert line.startswith(f"former named prefixes cannot be taken over: path={former} error=")
    assert former.exists()
    names.close()


async def test_the_file_of_a_running_tracker_is_left_to_it(
    names: Names, file: Path, tmp_path: Path, clock: Clock, reopen: Reopen
) -> None:
    former = tmp_path / "prefixes.db"
    keep_formerly(former).close()
    other = Names(tmp_path, "other", clock)
    await other.tend()
    assert [each.id for each in other.all()] == ["2" * 16]
    other.close()
    assert traces(file.parent) == ["other.json"], "it would be overwritten"
    assert [*(await reopen())._prefixes] == [("a", "guide")]
    assert not former.exists()
