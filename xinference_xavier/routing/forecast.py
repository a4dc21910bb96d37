"""What a request takes at a replica, from now to its last token, and what it costs the others.

A request waits until the replica has computed the prompts before it (`backlog`), or has a slot and
KV blocks for it. Its prompt is fetched from a peer or computed, whichever is faster (`fetch`,
`compute`). Then each token of its answer takes a step, with all requests that run there (`decode`).

The others pay, too. Those that run there have longer steps as long as they run, and stand still
while the prompt is computed (`delay`). Those that come later wait for the prompt (`work`). How long
the others will run, nobody knows: an answer that has begun is taken to be as long as a new one.

A prefill stalls every answer of its replica. If a prefill replica computes it, the decode replica
fetches the whole chunks meanwhile and computes the few tokens after them, and only this request
waits, perhaps longer (`offloaded`).

Pure: no I/O, no clock. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xinference_xavier.routing.known_replica import Rates, Replica, Step

STALL = 0.1
"""How much it counts that answers stand still while a prompt is computed. They would mostly stand
still for another prompt otherwise. In fifteen simulated runs, mostly of traces and sessions, 0 made
the last tokens of the slowest hundredth come 5 % later, and 1 their first tokens 44 %."""


class Chunks(NamedTuple):
    """The size of a chunk."""

    tokens: int
    bytes: int


class Prompt(NamedTuple):
    tokens: int
    keys: Sequence[bytes] = ()
    """Keys of the whole chunks, in order; empty if unknown."""
    answer: float = 0.0
    """Expected tokens of the answer."""


class Terms(NamedTuple):
    """What a request takes, in seconds."""

    backlog: float
    fetch: float
    compute: float
    decode: float

    @property
    def first_token(self) -> float:
        return self.backlog + self.fetch + self.compute


class Prefill(NamedTuple):
    """What a prefill replica does first, in seconds, and how long this prefill takes then."""

    replica: Replica
    queue: float
    seconds: float


class Typical(NamedTuple):
    """The means of the replicas that have measured theirs. While none has, work seems to take no
    time, and the replica with the fewest requests is chosen."""

    rates: Rates
    step: Step


@dataclass(frozen=True, slots=True)
class Forecast:
    """A request at a replica that holds, or is expected to hold, the leading `run` chunks of its
    prompt, and needs KV blocks for so many `tokens`.

    `work` is the time for which it keeps the replica busy, at typical rates, `delay` what it costs
    the requests that run there, all together. With `prefill`, the replica leaves its prefill to
    that one.
    """

    replica: Replica
    run: int
    tokens: int
    terms: Terms
    work: float
    delay: float
    prefill: Prefill | None = None

    def cost(self, weight: float) -> float:
        """What it takes, and costs the others, if work counts for so many times its length."""
        return sum(self.terms) + self.delay + (weight - 1.0) * self.work


def leading(sets: Iterable[int], among: int) -> dict[int, int]:
    """The number of leading `sets` that contain a bit, for each bit of the set `among`."""
    runs, count = dict[int, int](), 0
    for held in sets:
        runs.update((bit, count) for bit in _bits(among & ~held))
        among &= held
        if not among:
            break
        count += 1
    runs.update((bit, count) for bit in _bits(among))
    return runs


def _bits(found: int) -> Iterator[int]:
    while found:
        bit = found & -found
        yield bit
        found ^= bit


@dataclass(frozen=True, slots=True)
class Forecaster:
    """`fetchable` is the number of the prompt's leading chunks that one peer can send."""

    prompt: Prompt
    fetchable: int
    size: Chunks
    typical: Typical
    now: float

    def at(self, replica: Replica, run: int, cached: int) -> Forecast:
        """The engine's own prefix cache has the leading `cached` chunks."""
        prompt, typical = self.prompt, self.typical
        step = replica.step or typical.step
        slots = replica.report.slots
        requests = replica.requests
        tokens = prompt.tokens - cached * self.size.tokens + round(prompt.answer)
        fetch, compute = self._prefill(replica.rates or typical.rates, run)
        begins = max(replica.backlog(self.now), self._wait(replica, tokens, step))
        decode = prompt.answer * step.seconds(min(requests + 1, slots))
        answers = replica.answers + replica.others * prompt.answer
        return Forecast(
            replica,
            run,
            tokens,
            Terms(begins, fetch, compute, decode),
            work=sum(self._prefill(typical.rates, run)),
            delay=step.request_s * answers + STALL * compute * replica.report.decoding,
        )

    def _prefill(self, rates: Rates, run: int) -> tuple[float, float]:
        """The seconds for fetching and for computing."""
        alone = self.compute(rates, run)
        if (missing := self.fetchable - run) > 0:
            fetch = rates.fetch_s + rates.byte_s * self.size.bytes * missing
            rest = self.compute(rates, self.fetchable)
            if fetch + rest < alone:
                return fetch, rest
        return 0.0, alone

    def compute(self, rates: Rates, held: int) -> float:
        """The seconds for what follows the `held` chunks: at least the last token."""
        tokens = self.prompt.tokens
        first = min(held * self.size.tokens, tokens - 1)
        return (tokens - first) * (rates.token_s + rates.depth_s * (first + tokens) / 2)

    def _wait(self, replica: Replica, tokens: int, step: Step) -> float:
        """Seconds until there is a slot for the request, and KV blocks for its `tokens`. Requests
        end at random, after a mean answer; at a prefill replica, as soon as they are computed."""
        report, requests = replica.report, replica.requests
        if report.role == "prefill":
            return 0.0
        lasts = self.prompt.answer * step.seconds(min(requests, report.slots))
        wait = 0.0
        if requests >= report.slots:
            wait = (requests - report.slots + 1) * lasts / report.slots
        if tokens > replica.room:
            used = report.kv_tokens - max(0.0, replica.room)
            wait = max(wait, (tokens - replica.room) / used * lasts) if used > 0 else wait
        return wait


def offloaded(found: Sequence[Forecast], forecaster: Forecaster) -> list[Forecast]:
    """`found`, with prefills offloaded to the earliest prefill replica where that pays.

    It pays if it delays this request less than it spares the requests already decoding; never if
    the prefill queue alone takes longer than computing here.
    """
    prefills = [each for each in found if each.replica.report.role == "prefill"]
    if not prefills:
        return [*found]
    best = min(prefills, key=lambda each: each.terms.first_token)
    queue, prompt, size = best.terms.backlog, forecaster.prompt, forecaster.size
    prefill = Prefill(best.replica, queue, best.terms.first_token - queue)

    def leave(each: Forecast) -> Forecast:
        rates = each.replica.rates or forecaster.typical.rates
        chunks = prompt.tokens // size.tokens
        moving = queue + rates.byte_s * size.bytes * max(chunks - each.run, 0)
        backlog, _, compute, _ = each.terms
        begins = max(backlog, best.terms.first_token, moving) + rates.fetch_s
        rest = forecaster.compute(rates, chunks)
        spares = (compute - rest) * each.replica.report.decoding
        pays = begins + rest - each.terms.first_token < spares and queue <= compute - rest
        if each.replica.report.role != "decode" or not pays:
            return each
        terms = each.terms._replace(fetch=begins - backlog, compute=rest)
        delay = each.delay - STALL * spares
        return replace(each, terms=terms, work=best.work, delay=delay, prefill=prefill)

    return [leave(each) for each in found]
