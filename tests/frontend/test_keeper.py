"""Replicas are told what to keep, and compute again what they have lost."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend import keeper as module
from xinference_xavier.frontend.keeper import Keeper
from xinference_xavier.frontend.names import Names, Store
from xinference_xavier.frontend.prefix import NewPrefix, Terms
from xinference_xavier.protocol.prefixes import Kept, KeptPrefix, prefix_of
from xinference_xavier.protocol.tracker import unpack_question
from xinference_xavier.stats.schema import KnownLoad

MODEL = "model"
CHUNK, CONTEXT, BUDGET = 128, 4096, 10
SETTLING = 5.0
"""Seconds for which a replica keeps what nobody wants any more."""
PATIENCE = 30.0
"""Seconds after which a test that waits has failed."""
TICK = 0.001  # not 0: a loop that never waits keeps the reader of the file from its turn


class Replica:
    def __init__(self) -> None:
        self.wanted: Mapping[str, bool] = {}
        self.wanted_at: dict[str, float] = {}
        self.held: dict[str, int] = {}
        """Chunks of prefixes that were computed here."""
        self.requests: list[str] = []
        self.load = KnownLoad()

    def lose(self) -> None:
        self.held = dict.fromkeys(self.held, 1)


class Cluster:
    """A model, its tracker and the clock."""

    def __init__(self, *replicas: str) -> None:
        self.now = 1000.0
        self.tokens = 5 * CHUNK + 1
        self.replicas = {name: Replica() for name in replicas}
        self.runs = True
        self.failure: Exception | None = None
        self.asked = asyncio.Event()
        self.question: Mapping[str, Any] = {}

    async def call(self, model_uid: str, method: str, argument: Any, deadline: float = 10.0) -> Any:
        if model_uid != MODEL or not self.runs:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        if method == "explain":
            assert deadline > 60.0, "the first question loads the tokenizer"
            self.question = unpack_question(argument)
            sizes = {"chunk_tokens": CHUNK, "context_tokens": CONTEXT}
            return {"prompt_tokens": self.tokens, **sizes}
        assert method == "keep_prefixes"
        return {
            name: self.keep(replica, None if argument is None else argument.get(name, {}))
            for name, replica in self.replicas.items()
        }

    def keep(self, replica: Replica, wanted: Mapping[str, bool] | None) -> Kept:
        if wanted is not None:
            replica.wanted = wanted
            replica.wanted_at.update(dict.fromkeys(wanted, self.now))
            replica.held = {
                name: held
                for name, held in replica.held.items()
                if self.now - replica.wanted_at[name] <= SETTLING
            }
        chunks = self.tokens // CHUNK
        firm = sum(chunks for name in replica.held if replica.wanted.get(name))
        prefixes = {
            name: KeptPrefix(self.tokens, chunks, held, replica.wanted.get(name, False))
            for name, held in replica.held.items()
        }
        return Kept(prefixes, 2 * BUDGET, BUDGET, firm)

    async def ask(
        self, model_uid: str, name: str, content: Mapping[str, Any], tenant: str, number: str
    ) -> None:
        replica = self.replicas[name]
        replica.requests.append(number)
        self.asked.set()
        if self.failure is not None:
            raise self.failure
        prefix = prefix_of(number)
        assert prefix in replica.wanted_at, "it was told before to keep it"
        replica.held[prefix] = self.tokens // CHUNK

    def loads(self, model_uid: str) -> Mapping[str, KnownLoad]:
        return {name: replica.load for name, replica in self.replicas.items()}

    def clock(self) -> float:
        return self.now


class Kit:
    """A keeper and its cluster."""

    def __init__(self, cluster: Cluster, names: Names) -> None:
        self.cluster = cluster
        self.names = names
        self.keeper = Keeper(names, cluster.call, cluster.ask, cluster.loads, cluster.clock)

    async def add(self, name: str = "guide", terms: Terms | None = None) -> dict[str, Any]:
        new = NewPrefix(name, "", {"prompt": "text"}, terms or Terms())
        return await self.keeper.add(MODEL, new)

    async def change(self, name: str, terms: Terms) -> dict[str, Any]:
        return await self.keeper.change(self.names.find(MODEL, "", name), terms)

    def report(self, name: str = "guide") -> dict[str, Any]:
        return self.keeper.report(self.names.find(MODEL, "", name))

    def requests(self) -> int:
        """The requests by which replicas compute prefixes."""
        return sum(len(each.requests) for each in self.cluster.replicas.values())

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await self.round()

    async def kept(self, name: str = "guide") -> dict[str, Any]:
        await self.until(lambda: self.report(name)["state"] == "kept")
        return self.report(name)

    async def rounds(self, count: int = 20) -> None:
        for _ in range(count):
            await self.round()

    async def round(self) -> None:
        """The keeper looks once, or twice."""
        await asyncio.sleep(2 * TICK)
        await self.names.refresh()  # waits for the thread that reads the file


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK", TICK)
    monkeypatch.setattr(module, "_ABSENT", TICK)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("m-0", "m-1", "m-2")


@pytest.fixture
async def kit(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Kit]:
    store = Store(tmp_path / "prefixes.db")
    names = Names(store, cluster.clock, cluster.clock)
    await names.load()
    kit = Kit(cluster, names)
    yield kit
    await kit.keeper.close()
    await names.close()


async def test_one_copy_is_made_at_the_replica_that_has_least_to_do(kit: Kit) -> None:
    kit.cluster.replicas["m-0"].load = KnownLoad(backlog_s=9.0, requests=1)
    kit.cluster.replicas["m-1"].load = KnownLoad(backlog_s=1.0, requests=1)
    kit.cluster.replicas["m-2"].load = KnownLoad(backlog_s=5.0, requests=1)
    added = await kit.add()
    assert (added["state"], added["chunks"]) == ("waiting", 5)
    kept = await kit.kept()
    assert [*kept["replicas"]] == ["m-1"]
    assert (kept["tokens"], kept["chunks"]) == (5 * CHUNK + 1, 5)
    await kit.rounds()
    requests = {name: len(each.requests) for name, each in kit.cluster.replicas.items()}
    assert requests == {"m-0": 0, "m-1": 1, "m-2": 0}


async def test_every_replica_may_have_a_copy(kit: Kit) -> None:
    await kit.add(terms=Terms(copies="all"))
    assert [*(await kit.kept())["replicas"]] == ["m-0", "m-1", "m-2"]
    kit.cluster.replicas["m-3"] = Replica()
    await kit.until(lambda: "m-3" in kit.report()["replicas"])


async def test_what_is_lost_is_computed_again_while_its_replica_rests(kit: Kit) -> None:
    await kit.add()
    (name,) = (await kit.kept())["replicas"]
    replica = kit.cluster.replicas[name]
    kit.cluster.now += 60.0
    replica.load.requests = 1

    def is_lost() -> bool:
        replica.lose()  # again, if it was being looked after when its replica still rested
        return bool(kit.report()["state"] == "waiting")

    await kit.until(is_lost)
    asked = len(replica.requests)
    await kit.rounds()
    assert len(replica.requests) == asked
    kit.cluster.now += 600.0  # past the pause after another try
    replica.load.requests = 0
    await kit.kept()
    assert len(replica.requests) == asked + 1


async def test_another_replica_takes_the_place_of_one_that_is_gone(kit: Kit) -> None:
    await kit.add()
    (name,) = (await kit.kept())["replicas"]
    del kit.cluster.replicas[name]
    await kit.until(lambda: name not in kit.report()["replicas"])
    (other,) = (await kit.kept())["replicas"]
    assert other != name


async def test_a_restarted_replica_is_told_again(kit: Kit) -> None:
    await kit.add()
    (name,) = (await kit.kept())["replicas"]
    kit.cluster.replicas[name] = again = Replica()
    kit.cluster.now += 60.0
    await kit.until(lambda: again.requests)
    await kit.kept()


async def test_a_model_that_does_not_run_is_waited_for(kit: Kit) -> None:
    await kit.add()
    await kit.kept()
    kit.cluster.runs = False
    await kit.until(lambda: kit.report()["state"] == "waiting")
    await kit.rounds()
    for name in kit.cluster.replicas:
        kit.cluster.replicas[name] = Replica()
    kit.cluster.runs = True
    kit.cluster.now += 60.0
    await kit.kept()


async def test_a_new_keeper_finds_what_replicas_have_kept(kit: Kit) -> None:
    await kit.add()
    kept = await kit.kept()
    await kit.keeper.close()
    kit.keeper = Keeper(kit.names, kit.cluster.call, kit.cluster.ask, kit.cluster.loads)
    kit.keeper.begin()
    assert await kit.kept() == kept
    assert kit.requests() == 1


async def test_a_failure_is_told_and_tried_again_ever_more_rarely(kit: Kit) -> None:
    kit.cluster.failure = ValueError("the template cannot be rendered")
    await kit.add()
    await kit.until(kit.requests)
    await kit.until(lambda: kit.report()["state"] == "waiting")  # the replica may just have started
    kit.cluster.now += 60.0
    await kit.until(lambda: kit.report()["state"] == "failed")
    assert kit.report()["reason"] == "the template cannot be rendered"
    for _ in range(200):
        await kit.rounds(1)
        kit.cluster.now += 1.0
    assert kit.requests() <= 9
    kit.cluster.failure = None
    kit.cluster.now += 300.0
    assert (await kit.kept())["reason"] == ""


async def test_chunks_that_are_evicted_at_once_are_not_computed_for_ever(kit: Kit) -> None:
    await kit.add()
    (name,) = (await kit.kept())["replicas"]
    replica = kit.cluster.replicas[name]
    for _ in range(100):
        replica.lose()
        await kit.rounds(1)
        kit.cluster.now += 1.0
    assert len(replica.requests) < 10
    kit.cluster.now += 300.0
    await kit.kept()


async def test_a_removed_prefix_is_dropped_everywhere(kit: Kit) -> None:
    await kit.add(terms=Terms(copies="all"))
    await kit.kept()
    await kit.names.remove(kit.names.find(MODEL, "", "guide"))
    await kit.until(lambda: not any(each.wanted for each in kit.cluster.replicas.values()))
    await kit.until(lambda: not kit.keeper._tending)


async def test_a_prefix_that_nobody_uses_is_dropped(kit: Kit) -> None:
    await kit.add(terms=Terms(ttl=60.0))
    await kit.kept()
    kit.cluster.now += 61.0
    await kit.until(lambda: not any(each.wanted for each in kit.cluster.replicas.values()))
    assert kit.names.of(MODEL) == []


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (CHUNK - 1, "'guide' has 127 tokens; give a prefix of at least 128"),
        (CONTEXT, "'guide' has 4096 tokens, and the model's context 4096; shorten it"),
    ],
)
async def test_a_text_of_the_wrong_length_is_refused(kit: Kit, tokens: int, reason: str) -> None:
    kit.cluster.tokens = tokens
    with pytest.raises(ValueError, match=reason):
        await kit.add()
    assert kit.names.of(MODEL) == []


async def test_a_replica_that_is_lost_while_it_computes_blocks_no_other(kit: Kit) -> None:
    """It never answers."""
    asked = kit.cluster.ask

    async def ask(model_uid: str, name: str, *rest: Any) -> None:
        if name == "m-0":
            kit.cluster.asked.set()
            await asyncio.Event().wait()
        await asked(model_uid, name, *rest)

    kit.keeper._ask = ask
    kit.cluster.replicas["m-1"].load = kit.cluster.replicas["m-2"].load = KnownLoad(9.0)
    await kit.add()
    await kit.until(lambda: kit.report()["state"] == "computing")
    del kit.cluster.replicas["m-0"]
    assert (await kit.kept())["replicas"].keys() <= {"m-1", "m-2"}


async def test_firm_prefixes_have_a_budget(kit: Kit) -> None:
    hard = Terms(copies="all", retention="hard")
    for name in ("a", "b"):
        await kit.add(name, hard)
        await kit.kept(name)
    with pytest.raises(ValueError, match="retention=hard needs 5 chunks, but 0 are free"):
        await kit.add("c", hard)
    await kit.add("c")
    await kit.kept("c")
    with pytest.raises(ValueError, match="but 0 are free"):
        await kit.change("c", hard)
    await kit.add("a", hard)  # takes the former one's place
    changed = await kit.change("a", Terms())
    assert changed["retention"] == "soft"
    await kit.until(lambda: kit.cluster.replicas["m-0"].wanted != {})


async def test_a_hard_one_needs_room_at_all_replicas_before_it_is_copied_to_them(kit: Kit) -> None:
    await kit.add("a", Terms(retention="hard"))
    (home,) = (await kit.kept("a"))["replicas"]
    for number in range(2):
        await kit.add(f"b{number}", Terms(copies="all", retention="soft"))
        await kit.kept(f"b{number}")
    other = next(name for name in kit.cluster.replicas if name != home)
    await kit.names.change(kit.names.find(MODEL, "", "b0"), Terms(copies="all", retention="hard"))
    await kit.until(lambda: kit.report("b0")["replicas"][other]["firm"])
    kit.cluster.tokens = 6 * CHUNK
    with pytest.raises(ValueError, match="retention=hard needs"):
        await kit.change("a", Terms(copies="all", retention="hard"))
    changed = await kit.change("a", Terms(60.0, retention="hard"))
    assert changed["ttl"] == 60.0


async def test_tools_count(kit: Kit) -> None:
    content = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "look"}]}
    await kit.keeper.add(MODEL, NewPrefix("agent", "", content, Terms()))
    assert kit.cluster.question == content


async def test_two_keepers_of_one_file_want_the_same(kit: Kit, tmp_path: Path) -> None:
    """One API process takes the place of another, which has not ended yet."""
    await kit.add("first")
    await kit.kept("first")
    names = Names(Store(tmp_path / "prefixes.db"), kit.cluster.clock, kit.cluster.clock)
    await names.load()
    other = Kit(kit.cluster, names)
    other.keeper._loads = lambda model_uid: {"m-2": KnownLoad(-1.0)}  # it knows others' loads
    other.keeper.begin()
    await other.kept("first")
    await other.add("second", Terms(retention="hard"))
    await other.kept("second")
    await kit.until(lambda: "second" in [each.name for each in kit.names.of(MODEL)])
    await kit.kept("second")
    requests = kit.requests()
    for _ in range(50):
        await kit.round()
        await other.round()
        assert [kit.report(name)["state"] for name in ("first", "second")] == ["kept", "kept"]
        assert other.report("second")["state"] == "kept"
        kit.cluster.now += 1.0
    assert kit.requests() == requests
    (home,) = kit.report("second")["replicas"]
    assert [*other.report("second")["replicas"]] == [home]
    await other.keeper.close()
    await names.close()


async def test_a_file_that_cannot_be_read_for_a_while_ends_no_keeper(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    kit.keeper.begin()

    def fails() -> int:
        failed.set()
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(kit.names._store, "_version", fails)
        await asyncio.wait_for(failed.wait(), PATIENCE)
    await kit.add()
    await kit.kept()


async def test_others_get_their_turn_while_many_names_are_looked_through(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 2)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for number in range(20):
        await kit.add(f"{number}")
    prefixes = {each.id: each for each in kit.names.of(MODEL)}
    counting = asyncio.ensure_future(count())
    await kit.keeper._count(module._Model(), prefixes)
    assert turns >= 9
    counting.cancel()
