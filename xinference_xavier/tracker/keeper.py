"""Keeps a model's named prefixes at its replicas, and has lost ones computed again.

Each second the keeper tells each replica what is new of what it is to keep, and hears what is new
of what is in its pool. A missing prefix it has a replica compute, with a request like a client's
for one token: the replica fetches what peers hold. It does so with one prefix at a time, and with
those that were there before only while their replica is idle.

Threading: the tracker's event loop.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any, NamedTuple

from xinference_xavier.errors import PrefixRefusedError
from xinference_xavier.limits import LONGEST, TICK
from xinference_xavier.protocol.prefixes import (
    QUESTION,
    KeptPrefix,
    NewPrefix,
    Terms,
    request_id,
)
from xinference_xavier.protocol.tracker import Member, pack_question
from xinference_xavier.runtime.aio import in_thread, spawn, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.tracker import fanout
from xinference_xavier.tracker.names import Names
from xinference_xavier.tracker.names_file import Prefix
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.observers import Loads

logger = logging.getLogger(__name__)

MAX_SHOWN = 100
"""Names in a model's status, which is asked for every second."""
_BACKOFF = 2.0, 300.0
_TRIES = 2
"""Requests beyond one per replica before a new prefix waits until its replicas are idle."""
_FAILURES = 2
"""Consecutive failures before a prefix has failed: a replica may just start or end."""
_MAX_REASON = 500  # characters


class _Try:
    """A replica has computed a prefix, or tried to."""

    def __init__(self) -> None:
        self.backoff = Backoff(*_BACKOFF)
        self.not_before = 0.0


@dataclass(slots=True)
class _Work:
    """What it takes to have a prefix in the pools."""

    chunks: int = 0
    """Estimated before the prefix is computed."""
    fresh: bool = False
    """Somebody waits for it."""
    requests: int = 0
    failure: str = ""
    failures: int = 0
    """Consecutive ones."""
    tries: dict[str, _Try] = field(default_factory=dict)
    """Kept per replica until it has held the whole prefix for as long as the last backoff."""


@dataclass(slots=True)
class _Replica:
    """`told` is what it is to keep, and whether firmly; None where only the replica knows."""

    kept: dict[str, KeptPrefix]
    told: dict[str, bool | None]
    budget: int
    firm: int

    def copy_of(self, prefix: str) -> KeptPrefix | None:
        kept = self.kept.get(prefix)
        return kept if kept is not None and kept.chunks else None

    def promised(self) -> list[str]:
        """What it is to keep firmly, and has not computed."""
        return [id_ for id_, firm in self.told.items() if firm and self.copy_of(id_) is None]

    def has_all(self, prefix: str) -> bool:
        kept = self.copy_of(prefix)
        return kept is not None and kept.held == kept.chunks


class _Computing(NamedTuple):
    prefix: str
    replica: str
    task: asyncio.Future[None]


Compute = Callable[[str, Prefix, str], Awaitable[None]]
"""Lets a replica, by xinference's name, compute a prefix by a request of that id."""


class Keeper:
    """Replicas are known by their incarnations here. Before `lease` seconds have passed, some may
    not have joined yet."""

    def __init__(
        self,
        names: Names,
        namespaces: Namespaces,
        loads: Loads,
        name_of: Callable[[str], str],
        compute: Compute,
        lease: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns monotonic seconds."""
        self.names = names
        self.namespaces = namespaces
        self._loads = loads
        self._name_of = name_of
        self._compute = compute
        self._clock = clock
        self._joined_by = clock() + lease
        self._log = RateLimitedLog(logger)
        self._looking = asyncio.Lock()
        # Held from reading a budget or terms to the change that rests on them.
        self._accepting = asyncio.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._work: dict[str, _Work] = {}
        self._computing: _Computing | None = None
        self._states: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:
                self._log.warn("look", "named prefixes wait: error=%r", error, exc_info=True)
            await asyncio.sleep(TICK)

    def close(self) -> None:
        if self._computing is not None:
            self._computing.task.cancel()
        self.names.close()

    # -- what clients ask for --------------------------------------------------------------------

    async def add(self, new: NewPrefix) -> dict[str, Any]:
        """Return when it is clear that the prefix can be kept. Raises PrefixRefusedError,
        NamesError, ExplainError."""
        chunks = await self._check_size(new)
        async with self._accepting:
            if new.terms.retention == "hard":
                await self._check_budget(chunks, new.terms, new.tenant, new.name)
            prefix = await self.names.add(new)
            self._work[prefix.id] = _Work(chunks, fresh=True)
        return self._report(prefix)

    async def change(self, tenant: str, name: str, terms: Mapping[str, Any]) -> dict[str, Any]:
        """Change the given `terms` of a prefix. Raises PrefixRefusedError, PrefixNotFoundError,
        NamesError."""
        async with self._accepting:
            prefix = self.names.find(tenant, name)
            before, after = prefix.terms, prefix.terms._replace(**terms)
            if after.retention == "hard" and after[1:] != before[1:]:
                await self._check_budget(self._report(prefix)["chunks"], after, tenant, name)
            return self._report(await self.names.change(tenant, name, after))

    def report(self, tenant: str, name: str) -> dict[str, Any]:
        """The report of a prefix, JSON-able. Raises PrefixNotFoundError, NamesError."""
        return self._report(self.names.find(tenant, name))

    def reports(self, tenant: str) -> list[dict[str, Any]]:
        """Reports of all prefixes of a tenant. Raises NamesError."""
        return [self._report(each) for each in self.names.all() if each.tenant == tenant]

    def status(self) -> dict[str, Any]:
        """Reports of the names that belong to no tenant, at most `MAX_SHOWN` that were used last,
        and how many of all were in each state a moment ago."""
        public = (each for each in self._all() if not each.tenant)
        shown = nlargest(MAX_SHOWN, public, key=lambda each: each.used)
        shown.sort(key=lambda each: each.created)
        return {
            "prefixes": [self._report(each) for each in shown],
            "prefix_states": dict(self._states),
        }

    async def _check_size(self, new: NewPrefix) -> int:
        """The prefix's chunks."""
        packed = await in_thread(_question, new.content)
        found = await fanout.explain(self.namespaces, packed)
        tokens, chunk = found["prompt_tokens"], found["chunk_tokens"]
        context = found["context_tokens"]
        if tokens < chunk:
            raise PrefixRefusedError(
                f"{new.name!r} has {tokens} tokens; give a prefix of at least {chunk}, since "
                "replicas keep whole chunks of so many"
            )
        if tokens >= context:
            raise PrefixRefusedError(
                f"{new.name!r} has {tokens} tokens, and the model's context {context}; shorten it"
            )
        return int(tokens // chunk)

    async def _check_budget(self, chunks: int, terms: Terms, tenant: str, name: str) -> None:
        """Refuse a prefix that no replica has room to keep firmly. The one of this name gives up
        its room."""
        await self.look()
        replaced = {each.id for each in self._all() if (each.tenant, each.name) == (tenant, name)}
        free = [
            each.budget
            - each.firm
            + sum(kept.chunks for id_, kept in each.kept.items() if kept.firm and id_ in replaced)
            - sum(self._estimate(id_) for id_ in each.promised() if id_ not in replaced)
            for each in self._replicas.values()
        ] or [0]
        most = min(free) if terms.copies == "all" else max(free)
        if chunks > most:
            raise PrefixRefusedError(
                f"retention=hard needs {chunks} chunks, but {max(0, most)} are free: a replica "
                "keeps at most xavier_pin_fraction of its pool; remove another prefix, use "
                "retention=soft, or launch with larger pools"
            )

    def _estimate(self, prefix: str) -> int:
        work = self._work.get(prefix)
        return 0 if work is None else work.chunks

    def _report(self, prefix: Prefix) -> dict[str, Any]:
        copies = {
            self._name_of(incarnation): kept
            for incarnation, replica in self._replicas.items()
            if (kept := replica.copy_of(prefix.id)) is not None
        }
        work, state = self._work.get(prefix.id, _Work()), self._state(prefix)
        began = time.time() - self._clock()
        return {
            "name": prefix.name,
            "state": state,
            "reason": work.failure if state == "failed" else "",
            "tokens": max((kept.tokens for kept in copies.values()), default=0),
            "chunks": max((kept.chunks for kept in copies.values()), default=work.chunks),
            "replicas": {name: kept._asdict() for name, kept in copies.items()},
            **prefix.terms._asdict(),
            "created": prefix.created,
            "used": began + prefix.used,
            "expires": began + prefix.expires,
        }

    def _state(self, prefix: Prefix) -> str:
        complete = sum(each.has_all(prefix.id) for each in self._replicas.values())
        if (computing := self._current()) is not None and computing.prefix == prefix.id:
            return "computing"
        if complete and complete >= (len(self._replicas) if prefix.terms.copies == "all" else 1):
            return "kept"
        work = self._work.get(prefix.id)
        return "failed" if work is not None and work.failures >= _FAILURES else "waiting"

    def _all(self) -> list[Prefix]:
        return self.names.all() if self.names.readable else []

    # -- keeping ---------------------------------------------------------------------------------

    async def look(self) -> None:
        """Tell replicas what is new for them, and have a missing prefix computed."""
        async with self._looking:
            await self.names.tend()
            if not self.names.readable:
                return
            prefixes = {each.id: each for each in self.names.all()}
            self._work = {id_: self._work.get(id_) or _Work() for id_ in prefixes}
            await self._tell(prefixes.values())
            computing = self._current()
            if computing is None:
                self._compute_next(prefixes.values())
            elif computing.replica not in self._members():
                computing.task.cancel()  # a lost replica never answers
            self._states = Counter(map(self._state, prefixes.values()))

    def _members(self) -> dict[str, Member]:
        """The members that do not drain."""
        return {
            each.incarnation: each
            for each in self.namespaces.all_members()
            if each.incarnation not in self._loads.draining
        }

    async def _tell(self, prefixes: Iterable[Prefix]) -> None:
        """Tell each replica what is new for it. One that is new here says first what it keeps."""
        members = self._members()
        self._replicas = {
            incarnation: replica
            for incarnation, replica in self._replicas.items()
            if incarnation in members
        }
        wanted = self._wanted(prefixes)
        orders: dict[str, dict[str, bool | None] | None] = {}
        for incarnation in members:
            replica = self._replicas.get(incarnation)
            if replica is None:
                orders[incarnation] = None
            elif wanted[incarnation] or replica.told:
                orders[incarnation] = _changes(replica.told, wanted[incarnation])
        await asyncio.gather(
            *(self._tell_one(members[incarnation], order) for incarnation, order in orders.items())
        )

    async def _tell_one(self, member: Member, changes: dict[str, bool | None] | None) -> None:
        incarnation = member.incarnation
        try:
            found = await fanout.keep(member, changes)
        except Exception:  # logged; whether it has heard is not known
            self._replicas.pop(incarnation, None)
            return
        if changes is None:
            told: dict[str, bool | None] = dict.fromkeys(found.prefixes)
            self._replicas[incarnation] = _Replica(
                found.prefixes, told, found.budget_chunks, found.firm_chunks
            )
            return
        replica = self._replicas[incarnation]
        for id_, firm in changes.items():
            if firm is None:
                del replica.told[id_]
                replica.kept.pop(id_, None)
            else:
                replica.told[id_] = firm
        replica.kept |= found.prefixes
        replica.budget, replica.firm = found.budget_chunks, found.firm_chunks

    def _wanted(self, prefixes: Iterable[Prefix]) -> dict[str, dict[str, bool]]:
        """The prefixes that each replica is to keep, and whether firmly."""
        wanted: dict[str, dict[str, bool]] = {incarnation: {} for incarnation in self._replicas}
        if wanted:
            for prefix in prefixes:
                firm, every = prefix.terms.retention == "hard", prefix.terms.copies == "all"
                for incarnation in wanted if every else [self._home(prefix.id)]:
                    wanted[incarnation][prefix.id] = firm
        return wanted

    def _home(self, prefix: str) -> str:
        """The one replica that keeps it: where most of it is."""
        held = {
            incarnation: replica.kept[prefix].held
            for incarnation, replica in self._replicas.items()
            if prefix in replica.kept
        }
        if held:
            return max(held, key=lambda incarnation: (held[incarnation], incarnation))
        return min(self._replicas, key=self._backlog)

    def _backlog(self, incarnation: str) -> tuple[bool, int, int]:
        load = self._loads.latest(incarnation)
        return (True, 0, 0) if load is None else (False, load.prefill_tokens, load.requests)

    def _is_idle(self, incarnation: str) -> bool:
        load = self._loads.latest(incarnation)
        return load is not None and load.requests == 0

    def _current(self) -> _Computing | None:
        computing = self._computing
        return None if computing is None or computing.task.done() else computing

    def _compute_next(self, prefixes: Iterable[Prefix]) -> None:
        """What somebody waits for, else what was used last."""
        now = self._clock()
        found: list[tuple[bool, float, Prefix, str]] = []
        for prefix in prefixes:
            work = self._work[prefix.id]
            told = [name for name, each in self._replicas.items() if prefix.id in each.told]
            missing = [name for name in told if not self._replicas[name].has_all(prefix.id)]
            # Chunks that are evicted at once must not be computed again at once.
            work.tries = {
                incarnation: each
                for incarnation, each in work.tries.items()
                if incarnation in missing or now < each.not_before
            }
            if told and (not missing or work.requests >= len(told) + _TRIES):
                work.fresh = False
            for incarnation in missing:
                tried = work.tries.get(incarnation)
                waits = tried is not None and now < tried.not_before
                rests = now >= self._joined_by and self._is_idle(incarnation)
                if not waits and (work.fresh or rests):
                    found.append((work.fresh, prefix.used, prefix, incarnation))
        if found:
            *_, prefix, incarnation = max(found, key=lambda each: each[:2])
            task = spawn(self._have_computed(prefix, incarnation, self._work[prefix.id]))
            self._computing = _Computing(prefix.id, incarnation, task)

    async def _have_computed(self, prefix: Prefix, incarnation: str, work: _Work) -> None:
        work.requests += 1
        try:
            number = request_id(prefix.id, time.time_ns())  # another tracker may have asked, too
            await within(LONGEST, self._compute(self._name_of(incarnation), prefix, number))
            work.failures = 0
        except Exception as error:
            work.failures += 1
            work.failure = str(error)[:_MAX_REASON] or type(error).__name__
            text = "cannot compute a prefix: name=%s error=%r"
            self._log.warn(prefix.id, text, prefix.name, error)
        finally:
            tried = work.tries.setdefault(incarnation, _Try())
            tried.not_before = self._clock() + tried.backoff.pause()


def _question(content: str) -> bytes:
    """What `explain` is asked."""
    known = json.loads(content)
    return pack_question({key: known[key] for key in known if key in QUESTION})


def _changes(told: Mapping[str, bool | None], wanted: Mapping[str, bool]) -> dict[str, bool | None]:
    """What a replica has to be told; None ends a prefix."""
    ended: dict[str, bool | None] = dict.fromkeys(told.keys() - wanted.keys())
    return ended | {id_: firm for id_, firm in wanted.items() if told.get(id_) is not firm}
