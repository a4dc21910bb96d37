"""Replicas are told what to keep, and compute again what they have lost. The tracker and what
replicas keep are real; requests are answered by the test."""

import asyncio
import itertools
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xoscar as xo

from tests.harness.remote import PATIENCE
from tests.logged import messages
from tests.tracker_pools import MODEL, NAMESPACE
from xinference_xavier.errors import NamesError, PrefixNotFoundError, PrefixRefusedError
from xinference_xavier.pool.pool import Pool, flush
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.prefixes import Kept, NewPrefix, Terms, prefix_of
from xinference_xavier.protocol.tracker import Member, Settings, unpack_question
from xinference_xavier.replica.kept_prefixes import ComputedPrefix, KeptPrefixes
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.keeper import Keeper
from xinference_xavier.tracker.names_file import Prefix

CHUNK, CONTEXT, SLOTS = 128, 4096, 20
LEASE = 10.0
SOFT = Terms()
HARD = Terms(copies="all", retention="hard")


class Replica:
    """Half of its pool may be kept firmly."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.name = name
        self.pool = Pool(SLOTS)
        self.told: list[Mapping[str, bool | None] | None] = []
        self.requests: list[str] = []
        self.silent = False
        self._cluster = cluster
        self._computed: deque[ComputedPrefix] = deque()
        self._kept = KeptPrefixes(self.pool, 0.5, self._computed, deque(), lambda _: False)

    def keep(self, changes: Mapping[str, bool | None] | None) -> Kept:
        if self.silent:
            raise ConnectionResetError
        self.told.append(changes)
        return self._kept.keep(changes)

    def explain(self, packed: bytes) -> dict[str, Any]:
        self._cluster.question = unpack_question(packed)
        sizes = {"chunk_tokens": CHUNK, "context_tokens": CONTEXT}
        return {"prompt_tokens": self._cluster.tokens, "chunks": [], **sizes}

    def compute(self, number: str) -> None:
        self.requests.append(number)
        prefix = prefix_of(number)
        assert prefix is not None
        keys = [f"{prefix} {n}".encode() for n in range(self._cluster.tokens // CHUNK)]
        self._computed.append(ComputedPrefix(prefix, self._cluster.tokens, keys))
        for row in self.pool.reserve(keys).rows:
            self.pool.commit(row)

    def lose(self) -> None:
        flush(self.pool, lambda row: True)

    @property
    def wanted(self) -> Mapping[str, bool]:
        return self._kept._wanted


class Door(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """The calls that the tracker makes."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.keep = replica.keep
        self.explain = replica.explain


class Tracker(BlockTracker):
    def __init__(self, cluster: "Cluster", home: Path) -> None:
        super().__init__(MODEL, lease=LEASE, home=home, clock=lambda: cluster.now)
        self._cluster = cluster
        assert self._keeper is not None
        self.keeper: Keeper = self._keeper

    async def _compute(self, replica: str, prefix: Prefix, request_id: str) -> None:
        if self._cluster.failure is not None:
            self._cluster.replicas[replica].requests.append(request_id)
            raise self._cluster.failure
        if replica == self._cluster.hanging:
            await asyncio.Event().wait()
        self._cluster.replicas[replica].compute(request_id)


class Cluster:
    """A model, the clock, and the answers to requests. A replica's name is its incarnation."""

    def __init__(self, address: str, home: Path) -> None:
        self.now = 1000.0
        self.tokens = 5 * CHUNK + 1
        self.replicas: dict[str, Replica] = {}
        self.failure: Exception | None = None
        self.hanging = ""
        self.question: Mapping[str, Any] = {}
        self._address = address
        self._home = home
        self.tracker = Tracker(self, home)

    async def start(self, *names: str) -> None:
        for name in names:
            replica = self.replicas[name] = Replica(self, name)
            await xo.create_actor(Door, replica, address=self._address, uid=replica_uid(name))
            await self.join(name)

    async def join(self, name: str) -> None:
        await self.tracker.join(NAMESPACE, Member(name, self._address), Settings(), name)
        await self.report_load(name)

    async def report_load(self, name: str, prefill_tokens: int = 0, requests: int = 0) -> None:
        load = Load(Serving(CHUNK, 1, drain=60.0), prefill_tokens, 0.0, requests)
        await self.tracker.report_load(NAMESPACE, name, load)

    async def lose(self, name: str) -> None:
        del self.replicas[name]
        await self.tracker.leave(NAMESPACE, name)

    async def replace_tracker(self) -> None:
        self.tracker.keeper.close()
        self.tracker = Tracker(self, self._home)
        async with asyncio.timeout(PATIENCE):
            while not self.tracker.keeper.names.readable:
                await self.tracker.keeper.look()

    async def add(self, name: str = "guide", terms: Terms = SOFT, **content: Any) -> Any:
        text = json.dumps(content or {"prompt": "text"})
        return await self.tracker.add_prefix(NewPrefix("", name, text, terms))

    async def report(self, name: str = "guide") -> dict[str, Any]:
        return await self.tracker.prefix("", name)

    async def look(self, times: int = 1) -> None:
        """The keeper looks each second, and what it asks for is answered within it."""
        for _ in range(times):
            await self.tracker.keeper.look()
            for _ in range(5):
                await asyncio.sleep(0)
            self.now += 1.0

    async def kept(self, name: str = "guide") -> dict[str, Any]:
        for _ in range(10):
            await self.look()
            if (found := await self.report(name))["state"] == "kept":
                return found
        raise AssertionError(found)

    def requests(self) -> dict[str, int]:
        """The requests by which replicas computed prefixes."""
        return {name: len(each.requests) for name, each in self.replicas.items()}


@pytest.fixture
async def cluster(pool: Any, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(pool.external_address, tmp_path)
    await cluster.start("m-0", "m-1", "m-2")
    await cluster.look()
    yield cluster
    cluster.tracker.keeper.close()


# -- whatever happens ---------------------------------------------------------------------------


class Walk:
    """Names come and go, and replicas fail in every way, at random. Then all is well again."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.source = random.Random(seed)
        self.numbers = itertools.count(3)
        self.hung = set[str]()
        self.events = [self.add, self.add, self.remove, self.restart, self.start, self.lose]
        self.events += [self.drain, self.silence, self.evict, self.hang]

    def names(self) -> list[Prefix]:
        return self.cluster.tracker.keeper.names.all()

    def replica(self) -> Replica:
        return self.source.choice([*self.cluster.replicas.values()])

    async def add(self) -> None:
        terms = Terms(3600.0, self.source.choice([1, "all"]), self.source.choice(["soft", "hard"]))
        with suppress(PrefixRefusedError):  # there is no room to keep it firmly
            await self.cluster.add(self.source.choice("abc"), terms)

    async def remove(self) -> None:
        with suppress(PrefixNotFoundError):
            await self.cluster.tracker.remove_prefix("", self.source.choice("abc"))

    async def restart(self) -> None:
        """The supervisor is started again, and replicas join one after the other."""
        before = self.names()
        await self.cluster.replace_tracker()
        assert self.names() == before
        for name in self.source.sample([*self.cluster.replicas], len(self.cluster.replicas)):
            await self.cluster.join(name)
            await self.cluster.look(self.source.randrange(2))

    async def start(self) -> None:
        await self.cluster.start(f"m-{next(self.numbers)}")

    async def lose(self) -> None:
        await self.cluster.lose(self.replica().name)
        if not self.cluster.replicas:
            await self.cluster.look(2)
            await self.start()

    async def drain(self) -> None:
        await self.cluster.tracker.drain(self.replica().name)

    async def silence(self) -> None:
        """It hears nothing more, or again."""
        replica = self.replica()
        replica.silent = not replica.silent

    async def evict(self) -> None:
        self.replica().lose()

    async def hang(self) -> None:
        """It never answers its next request."""
        self.cluster.hanging = self.replica().name
        self.hung.add(self.cluster.hanging)

    async def end(self) -> None:
        """What hangs is lost, the others work, and each pause after a failure is over."""
        for name in self.hung & self.cluster.replicas.keys():
            await self.cluster.lose(name)
        await self.start()
        for name, replica in self.cluster.replicas.items():
            replica.silent = False
            await self.cluster.tracker.undrain(name)
        for _ in range(3):
            self.cluster.now += 300.0
            await self.cluster.look(20)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_each_name_is_kept_in_the_end(cluster: Cluster, seed: int) -> None:
    """At all replicas or at one, which know of no other name, and are asked for nothing then."""
    walk = Walk(cluster, seed)
    for _ in range(60):
        await walk.source.choice(walk.events)()
        await cluster.look(walk.source.randrange(4))
    await walk.end()
    wanted = {name: dict[str, bool]() for name in cluster.replicas}
    for prefix in walk.names():
        found = await cluster.report(prefix.name)
        assert found["state"] == "kept"
        assert len(found["replicas"]) == (len(wanted) if prefix.terms.copies == "all" else 1)
        for name in found["replicas"]:
            wanted[name][prefix.id] = prefix.terms.retention == "hard"
    assert {name: each.wanted for name, each in cluster.replicas.items()} == wanted
    asked = cluster.requests()
    await cluster.look(20)
    assert cluster.requests() == asked
    for name in {each.name for each in walk.names()} if seed % 2 else ():
        await cluster.tracker.remove_prefix("", name)
    cluster.now += 0.0 if seed % 2 else 3601.0  # they expire
    await cluster.look()
    assert json.loads(await cluster.tracker.prefixes("")) == []
    for replica in cluster.replicas.values():
        assert not replica.wanted
        others = [b"%d" % number for number in range(SLOTS)]
        assert len(replica.pool.reserve(others).rows) == SLOTS, "nothing is kept"


# -- one at a time ------------------------------------------------------------------------------


async def test_one_copy_is_made_at_the_replica_that_has_least_to_do(cluster: Cluster) -> None:
    await cluster.report_load("m-0", 900, 1)
    await cluster.report_load("m-2", 500, 1)
    await cluster.report_load("m-1", 100, 1)
    added = await cluster.add()
    assert (added["state"], added["chunks"]) == ("waiting", 5)
    kept = await cluster.kept()
    assert [*kept["replicas"]] == ["m-1"]
    assert (kept["tokens"], kept["chunks"]) == (5 * CHUNK + 1, 5)
    await cluster.look(20)
    assert cluster.requests() == {"m-0": 0, "m-1": 1, "m-2": 0}


async def test_replicas_hear_of_changes_only(cluster: Cluster) -> None:
    await cluster.add()
    (home,) = (await cluster.kept())["replicas"]
    told = cluster.replicas[home].told
    before = len(told)
    await cluster.look(3)
    assert told[before:] == [{}, {}, {}]
    await cluster.tracker.change_prefix("", "guide", {"retention": "hard"})
    await cluster.look(3)
    assert [[*changes.values()] for changes in told[before:] if changes] == [[True]]
    assert (await cluster.report())["replicas"][home]["firm"]
    others = (each for name, each in cluster.replicas.items() if name != home)
    assert [each.told for each in others] == [[None], [None]], "they have nothing to keep"


async def test_a_replica_that_did_not_answer_says_again_what_it_keeps(cluster: Cluster) -> None:
    """It may have heard what it was told, or not."""
    await cluster.add(terms=Terms(copies="all"))
    await cluster.kept()
    replica = cluster.replicas["m-1"]
    replica.silent = True
    await cluster.add("other", terms=Terms(copies="all"))
    await cluster.look(2)
    assert [*(await cluster.report())["replicas"]] == ["m-0", "m-2"]
    replica.silent = False
    await cluster.kept("other")
    assert None in replica.told[1:]
    assert (await cluster.report())["state"] == "kept"
    assert len(replica.wanted) == 2


async def test_what_is_lost_is_computed_again_while_its_replica_is_idle(cluster: Cluster) -> None:
    await cluster.add()
    (name,) = (await cluster.kept())["replicas"]
    cluster.now += 600.0
    await cluster.report_load(name, requests=1)
    cluster.replicas[name].lose()
    await cluster.look(20)
    assert (await cluster.report())["state"] == "waiting"
    assert cluster.requests()[name] == 1
    await cluster.report_load(name)
    await cluster.kept()
    assert cluster.requests()[name] == 2


async def test_a_draining_replica_keeps_nothing_for_others(cluster: Cluster) -> None:
    await cluster.add()
    (name,) = (await cluster.kept())["replicas"]
    cluster.now += LEASE
    await cluster.tracker.drain(name)
    (other,) = (await cluster.kept())["replicas"]
    assert other != name


async def test_a_new_tracker_loses_nothing_and_computes_nothing(cluster: Cluster) -> None:
    """The supervisor was started again. Its replicas join one after the other, and the one that has
    the only copy comes last."""
    await cluster.add()
    await cluster.add("other", HARD)
    for name in ("guide", "other"):
        before = await cluster.kept(name)
    (home,) = (await cluster.report())["replicas"]
    requests = cluster.requests()
    removed = await cluster.add("removed")
    assert removed["state"] == "waiting"
    await cluster.kept("removed")
    await cluster.tracker.remove_prefix("", "removed")
    await cluster.replace_tracker()
    for name in sorted(cluster.replicas, key=lambda each: each == home):
        await cluster.join(name)
        await cluster.look()
    await cluster.look(2)
    assert [*(await cluster.report())["replicas"]] == [home]
    after = await cluster.report("other")
    same = ("created", "chunks", "replicas", "retention", "state")
    assert [after[each] for each in same] == [before[each] for each in same]
    assert sum(cluster.requests().values()) == sum(requests.values()) + 1
    wanted = {name: len(each.wanted) for name, each in cluster.replicas.items()}
    assert wanted == {name: 2 if name == home else 1 for name in cluster.replicas}


async def test_a_failure_is_told_and_tried_again_ever_more_rarely(cluster: Cluster) -> None:
    cluster.failure = ValueError("the template cannot be rendered")
    await cluster.add()
    await cluster.look(2)
    assert (await cluster.report())["state"] == "waiting", "the replica may just have started"
    await cluster.look(5)
    found = await cluster.report()
    assert (found["state"], found["reason"]) == ("failed", "the template cannot be rendered")
    await cluster.look(200)
    assert sum(cluster.requests().values()) <= 9
    cluster.failure = None
    cluster.now += 300.0
    assert (await cluster.kept())["reason"] == ""


async def test_chunks_that_are_evicted_at_once_are_not_computed_for_ever(cluster: Cluster) -> None:
    await cluster.add()
    (name,) = (await cluster.kept())["replicas"]
    for _ in range(100):
        cluster.replicas[name].lose()
        await cluster.look()
    assert cluster.requests()[name] < 10
    cluster.now += 300.0
    await cluster.kept()


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (CHUNK - 1, "'guide' has 127 tokens; give a prefix of at least 128"),
        (CONTEXT, "'guide' has 4096 tokens, and the model's context 4096; shorten it"),
    ],
)
async def test_a_text_of_the_wrong_length_is_refused(
    cluster: Cluster, tokens: int, reason: str
) -> None:
    cluster.tokens = tokens
    with pytest.raises(PrefixRefusedError, match=reason):
        await cluster.add()
    with pytest.raises(PrefixNotFoundError):
        await cluster.report()


async def test_one_call_that_fails_ends_no_computation(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.hanging = "m-0"
    for name in ("m-1", "m-2"):
        await cluster.report_load(name, prefill_tokens=9)
    await cluster.add()
    await cluster.look()
    cluster.replicas["m-0"].silent = True
    await cluster.look()
    cluster.replicas["m-0"].silent = False
    await cluster.look()
    assert (await cluster.report())["state"] == "computing"
    assert messages(caplog) == [], "replicas are called each second"


async def test_terms_that_change_are_those_of_the_text_that_has_the_name(cluster: Cluster) -> None:
    """Another text takes the name while replicas are asked for their budget."""
    await cluster.add(terms=Terms(60.0))
    cluster.question = {}
    async with cluster.tracker.keeper._looking:
        changing = asyncio.ensure_future(
            cluster.tracker.change_prefix("", "guide", {"retention": "hard"})
        )
        adding = asyncio.ensure_future(cluster.add(terms=Terms(900.0)))
        async with asyncio.timeout(PATIENCE):
            while not cluster.question:
                await asyncio.to_thread(bool)
    await asyncio.gather(changing, adding)
    assert (await cluster.report())["ttl"] == 900.0


async def test_firm_prefixes_have_a_budget(cluster: Cluster) -> None:
    for name in ("a", "b"):
        await cluster.add(name, HARD)
        await cluster.kept(name)
    with pytest.raises(PrefixRefusedError, match="retention=hard needs 5 chunks, but 0 are free"):
        await cluster.add("c", HARD)
    await cluster.add("c")
    await cluster.kept("c")
    with pytest.raises(PrefixRefusedError, match="but 0 are free"):
        await cluster.tracker.change_prefix("", "c", {"retention": "hard"})
    await cluster.add("a", HARD)  # takes the former one's place
    await cluster.kept("a")
    await cluster.tracker.change_prefix("", "a", {"retention": "soft"})
    changed = await cluster.tracker.change_prefix("", "c", {"retention": "hard"})
    assert (changed["retention"], changed["copies"]) == ("hard", 1), "there is room at once"


async def test_a_budget_is_used_by_what_is_not_computed_yet(cluster: Cluster) -> None:
    """Otherwise it is accepted, and can never be kept firmly."""
    adding = (cluster.add(name, HARD) for name in "abc")
    added = await asyncio.gather(*adding, return_exceptions=True)
    (refused,) = (each for each in added if isinstance(each, Exception))
    assert "retention=hard needs 5 chunks, but 0 are free" in str(refused)
    await cluster.kept("a")
    with pytest.raises(PrefixRefusedError, match="but 0 are free"):
        await cluster.add("c", HARD)
    await cluster.add("b", HARD)  # takes the former one's place


async def test_a_hard_one_needs_room_at_all_replicas_before_it_is_copied_to_them(
    cluster: Cluster,
) -> None:
    await cluster.add("a", Terms(retention="hard"))
    (home,) = (await cluster.kept("a"))["replicas"]
    (other, *_) = (name for name in cluster.replicas if name != home)
    cluster.tokens = 6 * CHUNK
    for name in cluster.replicas:
        await cluster.report_load(name, prefill_tokens=0 if name == other else 9)
    await cluster.add("b", Terms(retention="hard"))
    assert [*(await cluster.kept("b"))["replicas"]] == [other]
    with pytest.raises(PrefixRefusedError, match="needs 5 chunks, but 4 are free"):
        await cluster.tracker.change_prefix("", "a", {"copies": "all"})
    changed = await cluster.tracker.change_prefix("", "a", {"ttl": 60.0})
    assert changed["ttl"] == 60.0


async def test_tools_count_and_adapters_do_not(cluster: Cluster) -> None:
    question = {"messages": [{"role": "user", "content": "?"}], "tools": [{"name": "look"}]}
    await cluster.add(**question, lora_name="poet")
    assert cluster.question == question


async def test_a_status_has_the_names_that_were_used_last(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of tenants' names only how many there are."""
    monkeypatch.setattr("xinference_xavier.tracker.keeper.MAX_SHOWN", 2)
    for name in "abcd":
        await cluster.add(name)
        await cluster.kept(name)
    await cluster.tracker.add_prefix(NewPrefix("tenant", "secret", '{"prompt": "text"}'))
    await cluster.tracker.use_prefix("", "b", "")
    await cluster.look(3)
    named = (await cluster.tracker.status())["named"]
    assert [each["name"] for each in named["prefixes"]] == ["b", "d"]
    assert sum(named["prefix_states"].values()) == 5
    assert [each["name"] for each in json.loads(await cluster.tracker.prefixes("tenant"))] == [
        "secret"
    ]


async def test_while_names_cannot_be_read_replicas_keep_what_they_have(cluster: Cluster) -> None:
    await cluster.add(terms=HARD)
    await cluster.kept()
    other = Tracker(cluster, cluster._home)  # the other one has the file's lock
    await other.keeper.look()
    with pytest.raises(NamesError, match="another xinference"):
        await other.prefixes("")
    assert (await other.status())["named"] == {"prefixes": [], "prefix_states": {}}
    assert all(each.wanted for each in cluster.replicas.values())


# -- the request that computes a prefix --------------------------------------------------------


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """xinference's, with a model that remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[tuple[Any, ...]] = []

    async def get_model(self, replica: str, xavier_replica: bool) -> Any:
        assert (replica, xavier_replica) == ("m-0", True)
        return self.ref()

    async def generate(self, *asked: Any, request_id: str) -> None:
        self._asked.append((*asked, request_id))

    async def chat(self, *asked: Any, request_id: str) -> None:
        self._asked.append((*asked, request_id))

    async def asked(self) -> list[tuple[Any, ...]]:
        return self._asked


@pytest.mark.parametrize(
    ("content", "tenant", "asked"),
    [
        ({"prompt": "text"}, "", ("text", {"max_tokens": 1})),
        ({"messages": [1]}, "a", ([1], {"max_tokens": 1, "cache_salt": "a"})),
        ({"messages": [1], "tools": [2]}, "", ([1], {"max_tokens": 1, "tools": [2]})),
        ({"prompt": "?", "lora_name": "poet"}, "", ("?", {"max_tokens": 1, "lora_name": "poet"})),
    ],
)
async def test_a_replica_is_asked_for_one_token(
    pool: Any, content: Any, tenant: str, asked: Any
) -> None:
    address = pool.external_address
    supervisor = await xo.create_actor(Supervisor, address=address, uid="supervisor")
    tracker = await xo.create_actor(BlockTracker, MODEL, address=address, uid="tracker")
    prefix = Prefix("0" * 16, tenant, "guide", Terms(), 0.0, json.dumps(content))
    await pool._actors[b"tracker"]._compute("m-0", prefix, "number 1")
    assert await supervisor.asked() == [(*asked, "number 1")]
    await xo.destroy_actor(tracker)
