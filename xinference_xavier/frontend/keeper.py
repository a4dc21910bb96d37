"""Keeps named prefixes at the replicas of their models, and computes again what is lost.

Every second the keeper tells each replica which prefixes to keep, and hears what is in its pool.
What is missing it asks the replica to compute, with a request like a client's for one token: the
replica fetches what peers hold. One prefix of a model at a time, and what was there before only
while its replica rests.

There may be several keepers for a while, in processes that share the names' file. All of them go by
the file, and by what replicas say that they hold: so they want the same.

Threading: one event loop, which gets its turn while thousands of names are looked through.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend.names import Names
from xinference_xavier.frontend.prefix import NewPrefix, Prefix, Terms, question_of
from xinference_xavier.protocol.prefixes import Kept, KeptPrefix, request_id
from xinference_xavier.protocol.tracker import pack_question
from xinference_xavier.runtime.aio import spawn, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.stats.schema import KnownLoad

logger = logging.getLogger(__name__)

TICK = 1.0
_ABSENT = 5.0
"""Seconds until a model that does not answer is asked again."""
_PATIENCE = 600.0
"""Seconds for a prefix to be computed."""
_BACKOFF = 2.0, 300.0
_TRIES = 2
"""Requests beyond one per replica before a new prefix waits until its replicas are idle."""
_FAILURES = 2
"""Consecutive failures before a prefix has failed: a replica may just start or end."""
_MAX_REASON = 500  # characters
_EXPLAIN_DEADLINE = 61.0
"""Seconds: the first question loads the tokenizer. The tracker waits a little less for it."""
_PIECE = 200
"""Prefixes that are looked through at a stretch."""
_T = TypeVar("_T")


@dataclass(slots=True)
class _Try:
    """The backoff of one replica that has computed a prefix."""

    backoff: Backoff = field(default_factory=lambda: Backoff(*_BACKOFF))
    not_before: float = 0.0


@dataclass(slots=True)
class _Making:
    """A prefix on its way to the replicas."""

    chunks: int = 0
    """Estimated before the prefix is computed."""
    fresh: bool = True
    """Somebody waits for it."""
    requests: int = 0
    computing: str = ""
    """The replica that computes it."""
    task: asyncio.Future[None] | None = None
    """That asks it to."""
    failure: str = ""
    failures: int = 0
    """Consecutive ones."""
    tries: dict[str, _Try] = field(default_factory=dict)
    """Kept per replica until it has held the whole prefix for as long as the last backoff."""


@dataclass(slots=True)
class _Model:
    kept: Mapping[str, Kept] = field(default_factory=dict)
    """What each replica keeps, by xinference's name for it."""
    homes: dict[str, str] = field(default_factory=dict)
    """The replica of each prefix of which there is one copy."""
    making: dict[str, _Making] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)
    """How many prefixes are in each."""


Call = Callable[..., Awaitable[Any]]
"""Calls a method of a model's tracker: the model's uid, the method, arguments, and perhaps the
deadline in seconds."""
Ask = Callable[[str, str, Mapping[str, Any], str, str], Awaitable[None]]
"""Lets a replica compute a prefix: the model's uid, replica, content, tenant, request id."""
Loads = Callable[[str], Mapping[str, KnownLoad]]
"""What a model's replicas have to do, by name."""


class Keeper:
    def __init__(
        self,
        names: Names,
        call: Call,
        ask: Ask,
        loads: Loads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns monotonic seconds."""
        self._names = names
        self._call = call
        self._ask = ask
        self._loads = loads
        self._clock = clock
        self._log = RateLimitedLog(logger)
        self._models: dict[str, _Model] = {}
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look after the names, and keep the prefixes of all models that have some."""
        if self._running is None:
            self._running = asyncio.ensure_future(self._tend())

    async def _tend(self) -> None:
        while True:
            await self._names.tend()
            for model_uid in self._names.models():
                if model_uid not in self._tending:
                    self._tending[model_uid] = asyncio.ensure_future(self._run(model_uid))
            await asyncio.sleep(TICK)

    async def close(self) -> None:
        tasks = [*self._tending.values(), *filter(None, [self._running])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what clients ask for --------------------------------------------------------------------

    async def add(self, model_uid: str, new: NewPrefix) -> dict[str, Any]:
        """Return when it is clear that the prefix can be kept. Raises ValueError, and
        what the tracker raises."""
        chunks = await self._check_size(model_uid, new)
        replaced = self._names.named(model_uid, new.tenant, new.name)
        await self._check_budget(model_uid, chunks, new.terms, replaced)
        prefix = await self._names.add(model_uid, new)
        model = self._models.setdefault(model_uid, _Model())
        model.making[prefix.id] = _Making(chunks)
        self.begin()
        return self.report(prefix)

    async def change(self, prefix: Prefix, terms: Terms) -> dict[str, Any]:
        """Raises ValueError if the terms are not possible."""
        model = self._models.get(prefix.model_uid, _Model())
        at = _at(model, prefix.id)
        chunks = max((kept.chunks for kept in at.values()), default=0)
        if (terms.retention, terms.copies) != (prefix.terms.retention, prefix.terms.copies):
            await self._check_budget(prefix.model_uid, chunks, terms, prefix)
        return self.report(await self._names.change(prefix, terms))

    async def _check_size(self, model_uid: str, new: NewPrefix) -> int:
        """The prefix's chunks."""
        asked = await asyncio.to_thread(pack_question, question_of(new.content))
        found = await self._call(model_uid, "explain", asked, deadline=_EXPLAIN_DEADLINE)
        tokens, chunk = found["prompt_tokens"], found["chunk_tokens"]
        context = found["context_tokens"]
        if tokens < chunk:
            raise ValueError(
                f"{new.name!r} has {tokens} tokens; give a prefix of at least {chunk}, since "
                "replicas keep whole chunks of so many"
            )
        if tokens >= context:
            raise ValueError(
                f"{new.name!r} has {tokens} tokens, and the model's context {context}; shorten it"
            )
        return int(tokens // chunk)

    async def _check_budget(
        self, model_uid: str, chunks: int, terms: Terms, replaced: Prefix | None
    ) -> None:
        """Where `replaced` is kept firmly, there is room for as much."""
        if terms.retention != "hard":
            return
        at = {} if replaced is None else _at(self._models.get(model_uid, _Model()), replaced.id)
        freed = {name: kept.chunks for name, kept in at.items() if kept.firm}
        kept = await self._call(model_uid, "keep_prefixes", None)
        free = [
            each.budget_chunks - each.firm_chunks + freed.get(name, 0)
            for name, each in kept.items()
        ] or [0]
        most = min(free) if terms.copies == "all" else max(free)
        if chunks > most:
            raise ValueError(
                f"retention=hard needs {chunks} chunks, but {max(0, most)} are free: a replica "
                "keeps at most xavier_pin_fraction of its pool; remove another prefix, use "
                "retention=soft, or launch with larger pools"
            )

    def report(self, prefix: Prefix) -> dict[str, Any]:
        """JSON-able."""
        model = self._models.get(prefix.model_uid, _Model())
        making = model.making.get(prefix.id, _Making())
        at = _at(model, prefix.id)
        state = _state(model, prefix, making, at)
        return {
            "name": prefix.name,
            "state": state,
            "reason": making.failure if state == "failed" else "",
            "tokens": max((kept.tokens for kept in at.values()), default=0),
            "chunks": max((kept.chunks for kept in at.values()), default=making.chunks),
            "replicas": {name: kept._asdict() for name, kept in at.items()},
            "ttl": prefix.terms.ttl,
            "copies": prefix.terms.copies,
            "retention": prefix.terms.retention,
            "created": prefix.created,
            "used": prefix.used,
            "expires": prefix.expires,
        }

    def states(self, model_uid: str) -> Counter[str]:
        """How many prefixes were in each state when they were looked through last."""
        return self._models.get(model_uid, _Model()).states

    # -- keeping ---------------------------------------------------------------------------------

    async def _run(self, model_uid: str) -> None:
        """Keep the model's prefixes until it has none left."""
        model = self._models.setdefault(model_uid, _Model())
        try:
            while self._names.of(model_uid) or model.kept:
                try:
                    await self._keep(model_uid, model)
                    pause = TICK
                except NotFoundError:  # it does not run
                    model.kept, pause = {}, _ABSENT
                except Exception as error:
                    model.kept, pause = {}, _ABSENT
                    self._log.warn(model_uid, "prefixes wait: model=%s error=%r", model_uid, error)
                if not model.kept:
                    model.states = Counter(waiting=len(self._names.of(model_uid)))
                await asyncio.sleep(pause)
        finally:
            del self._tending[model_uid], self._models[model_uid]

    async def _keep(self, model_uid: str, model: _Model) -> None:
        prefixes = {prefix.id: prefix for prefix in self._names.of(model_uid)}
        for known in (model.homes, model.making):
            for gone in known.keys() - prefixes.keys():
                del known[gone]
        # At first only learn which replicas there are, and what they keep.
        wanted = await self._wanted(model_uid, model, prefixes) if model.kept else None
        model.kept = await self._call(model_uid, "keep_prefixes", wanted)
        for each in model.making.values():
            if each.task is not None and each.computing not in model.kept:
                each.task.cancel()  # a lost replica never answers
        if not prefixes:
            model.kept = {}
        await self._count(model, prefixes)
        if wanted is not None and not any(each.computing for each in model.making.values()):
            await self._compute_next(model_uid, model, prefixes, told=wanted.keys())

    async def _wanted(
        self, model_uid: str, model: _Model, prefixes: Mapping[str, Prefix]
    ) -> dict[str, dict[str, bool]]:
        """The prefixes that each replica keeps, and whether firmly."""
        wanted: dict[str, dict[str, bool]] = {replica: {} for replica in model.kept}
        loads = self._loads(model_uid)
        async for prefix in _in_pieces([*prefixes.values()]):
            firm = prefix.terms.retention == "hard"
            if prefix.terms.copies == "all":
                homes = [*wanted]
            else:
                homes = [self._home(model, prefix, loads)]
            for replica in homes:
                wanted[replica][prefix.id] = firm
        return wanted

    def _home(self, model: _Model, prefix: Prefix, loads: Mapping[str, KnownLoad]) -> str:
        """The one replica that keeps it: where it is. So other keepers choose the same."""
        at = _at(model, prefix.id)
        home = model.homes.get(prefix.id, "")
        if at:
            home = max(at, key=lambda name: (at[name].held, name))
        elif home not in model.kept:
            home = min(model.kept, key=lambda name: _backlog(loads, name))
        model.homes[prefix.id] = home
        return home

    async def _count(self, model: _Model, prefixes: Mapping[str, Prefix]) -> None:
        states: Counter[str] = Counter()
        async for prefix in _in_pieces([*prefixes.values()]):
            making = model.making.get(prefix.id, _Making())
            states[_state(model, prefix, making, _at(model, prefix.id))] += 1
        model.states = states

    async def _compute_next(
        self, model_uid: str, model: _Model, prefixes: Mapping[str, Prefix], told: Collection[str]
    ) -> None:
        """What somebody waits for, else what was used last, at a replica that was told to keep
        it. One that has just joined was not."""
        loads, now = self._loads(model_uid), self._clock()
        found: list[tuple[bool, float, Prefix, str]] = []
        async for prefix in _in_pieces([*prefixes.values()]):
            making = model.making.setdefault(prefix.id, _Making(fresh=False))
            missing = self._missing(model, prefix)
            # Chunks that are evicted at once must not be computed again at once.
            making.tries = {
                name: each
                for name, each in making.tries.items()
                if name in missing or now < each.not_before
            }
            making.fresh &= bool(missing) and making.requests < len(model.kept) + _TRIES
            for replica in (name for name in missing if name in told):
                tried = making.tries.setdefault(replica, _Try())
                if now >= tried.not_before and (making.fresh or _rests(loads, replica)):
                    found.append((making.fresh, prefix.used, prefix, replica))
        if found:
            *_, prefix, replica = max(found, key=lambda each: each[:2])
            making = model.making[prefix.id]
            making.computing = replica
            making.requests += 1
            making.task = spawn(self._compute(prefix, making))

    def _missing(self, model: _Model, prefix: Prefix) -> list[str]:
        """The replicas that should hold it and do not hold all of it."""
        homes = [model.homes.get(prefix.id, "")]
        if prefix.terms.copies == "all":
            homes = [*model.kept]
        at = _at(model, prefix.id)
        return [
            name
            for name in homes
            if name in model.kept and (name not in at or at[name].held < at[name].chunks)
        ]

    async def _compute(self, prefix: Prefix, making: _Making) -> None:
        try:
            content = await self._names.content(prefix)
            number = request_id(prefix.id, making.requests)
            asking = self._ask(prefix.model_uid, making.computing, content, prefix.tenant, number)
            await within(_PATIENCE, asking)
            making.failures = 0
        except Exception as error:
            making.failures += 1
            making.failure = str(error)[:_MAX_REASON] or type(error).__name__
            self._log.warn(
                prefix.id, "cannot compute a prefix: name=%s error=%r", prefix.name, error
            )
        finally:
            tried = making.tries.setdefault(making.computing, _Try())
            tried.not_before = self._clock() + tried.backoff.pause()
            making.computing, making.task = "", None


def _state(model: _Model, prefix: Prefix, making: _Making, at: Mapping[str, KeptPrefix]) -> str:
    complete = sum(kept.held == kept.chunks for kept in at.values())
    if making.computing:
        return "computing"
    if complete and complete >= (len(model.kept) if prefix.terms.copies == "all" else 1):
        return "kept"
    return "failed" if making.failures >= _FAILURES else "waiting"


async def _in_pieces(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Others get their turn now and then."""
    for number, item in enumerate(items):
        if number % _PIECE == _PIECE - 1:
            await asyncio.sleep(0)
        yield item


def _at(model: _Model, prefix: str) -> dict[str, KeptPrefix]:
    """The copies of a prefix, by replica."""
    return {
        name: kept.prefixes[prefix] for name, kept in model.kept.items() if prefix in kept.prefixes
    }


def _backlog(loads: Mapping[str, KnownLoad], replica: str) -> float:
    return loads[replica].backlog_s if replica in loads else math.inf


def _rests(loads: Mapping[str, KnownLoad], replica: str) -> bool:
    return replica in loads and loads[replica].requests == 0
