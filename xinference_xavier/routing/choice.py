"""Which replica answers a prompt first: backlog + computing or fetching what it lacks; and which
replica computes a long prefill for it (`with_prefill_replicas`).

A replica's work for a prompt also delays those that come behind: by `share / (1 - share)` of it, if
requests arrive at random and the replica works this share of the time. If there is a queue, the
work delays each prompt that arrives before the queue is empty. So work weighs more than the
prompt's own waiting (`work_weight`). Without that, prompts leave the replica that holds their
prefix for a short wait elsewhere, copies fill the pools, and under load all wait longer. This work
is at the replicas' mean rates: weighed with what a replica seems to be faster, prompts would queue
at it for what is mostly an error of measurement.

A prompt of which no replica holds much may begin a session, whose next rounds follow it. The
backlog of the moment is too short a view then: such prompts go where the least work went lately.

Pure: no I/O, no clock. With a thousand replicas and a prompt of a hundred chunks, a choice is one
pass over the chunks with sets as integers, then a few operations on arrays.

A prefill stalls every response that its replica is streaming. If a prefill replica computes it, the
decode replica fetches the chunks meanwhile, and only this request waits, perhaps longer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xinference_xavier.routing.load import Floats, Loads, Numbered


def with_prefill_replicas(
    loads: Loads, found: Forecast, size: Chunks, threshold: int | None
) -> Forecast:
    """`found`, with prefills offloaded to the earliest prefill replica where that pays.

    It pays if it delays this request less than it spares the requests already decoding, or if more
    than `threshold` tokens are missing; never if the prefill queue alone takes longer than
    computing here.
    """
    finish = np.where(loads.prefills, found.total, np.inf)
    if not finish.size or finish.min() == np.inf:
        return found
    number = int(finish.argmin())
    queue = float(found.backlog[number])
    _, _, fetch_s, byte_s = loads.rates
    whole = found.prompt.tokens // size.tokens
    moving = queue + byte_s * (size.bytes * np.maximum(whole - found.runs, 0))
    is_open = np.isfinite(found.backlog)
    backlog = np.where(is_open, found.backlog, 0.0)
    answer = np.maximum(backlog, np.maximum(finish[number], moving) + fetch_s)
    if threshold is None:
        here = backlog + found.fetch + found.compute
        pays = answer - here < found.compute * loads.running
    else:
        pays = found.prompt.tokens - found.runs * size.tokens > threshold
    pays &= loads.decodes & is_open & (queue <= found.compute)
    if not pays.any():
        return found
    return replace(
        found,
        fetch=np.where(pays, answer - backlog, found.fetch),
        compute=np.where(pays, 0.0, found.compute),
        work=np.where(pays, found.work[number], found.work),
        prefill=Prefill(loads.names[number], queue, float(finish[number]) - queue),
        left=pays,
    )


TIE = 0.01
"""Forecasts are equal that differ by less than this share, or by `_TIE_S`."""
_TIE_S = 0.001  # seconds
MOST_BUSY = 0.95  # beyond it the estimate says little

Counts = NDArray[np.int64]


class Holdings(Numbered, Protocol):
    """Who holds what, such as `Mirror`. Sets have a bit for each replica's number."""

    def full_set(self, key: bytes) -> int:
        """The replicas that hold `key`."""

    def usable_set(self, key: bytes) -> int:
        """The holders from which the chunk can be fetched."""


class Chunks(NamedTuple):
    """The size of a chunk."""

    tokens: int
    bytes: int


class Prompt(NamedTuple):
    tokens: int
    keys: Sequence[bytes] = ()
    """Keys of the whole chunks, in order. Empty if unknown: only backlogs count then."""


class Terms(NamedTuple):
    """A replica's forecast for a prompt, in seconds."""

    backlog: float
    fetch: float
    compute: float


class Prefill(NamedTuple):
    """What a prefill replica does first, in seconds, and how long this prefill takes then."""

    replica: str
    queue: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """The terms of a prompt for each replica, by number. `runs` are the leading chunks that the
    replica holds, or is expected to hold. A peer can send the first `fetchable` chunks.

    `work` is the time for which the prompt keeps a replica busy, at the mean rates of all. `left`
    are the decode replicas that leave the prefill to `prefill`: they fetch all of it.
    """

    prompt: Prompt
    fetchable: int
    runs: Counts
    backlog: Floats
    fetch: Floats
    compute: Floats
    work: Floats
    left: NDArray[np.bool_]
    prefill: Prefill | None = None

    @property
    def total(self) -> Floats:
        return self.backlog + self.fetch + self.compute


@dataclass(frozen=True)
class Choice:
    """`reason` says why the prompt's prefix did or did not matter: `local`, no replica holds more
    of it; `fetch`, the rest comes from a peer; `compute`, a peer holds more, but computing is
    faster; `backlog`, no replica holds any of it, or its keys are unknown; `prefill`, a prefill
    replica computes the rest of it."""

    replica: str
    number: int
    reason: str
    forecast: Forecast
    names: Sequence[str]

    @property
    def terms(self) -> Terms:
        return self._terms(self.number)[0]

    @property
    def prefill(self) -> Prefill | None:
        """Set if a prefill replica computes the prompt."""
        return self._terms(self.number)[1]

    def explained(self, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The terms of every replica that could have been chosen, by its name in `names`, as far
        as they are known; JSON-able."""
        found: dict[str, dict[str, Any]] = {}
        for number in np.isfinite(self.forecast.total).nonzero()[0].tolist():
            terms, prefill = self._terms(number)
            told = found[names[self.names[number]]] = terms._asdict()
            if prefill is not None:
                told["prefill"] = names[prefill.replica]
        return found

    def _terms(self, number: int) -> tuple[Terms, Prefill | None]:
        found = self.forecast
        terms = (float(each[number]) for each in (found.backlog, found.fetch, found.compute))
        return Terms(*terms), found.prefill if found.left[number] else None


def held_runs(
    holdings: Holdings, expected: Callable[[bytes], int], keys: Sequence[bytes], count: int
) -> tuple[Counts, int]:
    """How many leading `keys` each replica with a number below `count` holds or is expected to
    hold; and how many one replica could send."""
    here, donors = (1 << count) - 1, -1
    fetchable = 0
    distinct: list[int] = []
    lengths: list[int] = []
    for key in keys:
        if donors:
            donors &= holdings.usable_set(key)
            fetchable += donors != 0
        shrunk = here & (holdings.full_set(key) | expected(key))
        if not shrunk and not donors:
            break
        if shrunk == here and distinct:
            lengths[-1] += 1
        else:
            distinct.append(shrunk)
            lengths.append(1)
        here = shrunk
    width = count // 8 + 1
    packed = b"".join(each.to_bytes(width, "little") for each in distinct)
    rows = np.frombuffer(packed, np.uint8).reshape(len(distinct), width)
    bits = np.unpackbits(rows, axis=1, count=count, bitorder="little")
    # Each set is part of the one before it, so that their sum is the length of the run.
    return np.array(lengths, np.int64) @ bits, fetchable


def forecast(
    loads: Loads, prompt: Prompt, runs: Counts, fetchable: int, size: Chunks, now: float
) -> Forecast:
    """`runs` and `fetchable` as `held_runs` found them."""
    last = prompt.tokens - 1  # at least one token is computed
    missing = fetchable - runs

    def at(rates: Floats) -> tuple[Floats, Floats]:
        """The seconds for fetching and for computing."""
        token_s, depth_s, fetch_s, byte_s = rates

        def compute(first: Counts | int) -> Floats:
            mean_s = token_s + depth_s * ((first + prompt.tokens) * 0.5)
            seconds: Floats = (prompt.tokens - first) * mean_s
            return seconds

        alone = compute(np.minimum(runs * size.tokens, last))
        fetch = fetch_s + byte_s * (size.bytes * missing)
        rest = compute(min(fetchable * size.tokens, last))
        fetches = (missing > 0) & (fetch + rest < alone)
        return np.where(fetches, fetch, 0.0), np.where(fetches, rest, alone)

    work = np.add(*at(np.array(loads.typical)))
    left = np.zeros(len(runs), np.bool_)
    return Forecast(prompt, fetchable, runs, loads.backlog(now), *at(loads.rates), work, left)


def work_weight(busy: float, waiting: float) -> float:
    """How much work weighs, where replicas are `busy` for this share of the time. Twice what theory
    says of one prompt: its next round follows it to where it was sent. At least the number of
    prompts `waiting` at a replica: about as many arrive before its queue is empty."""
    return max(2.0 / (1.0 - min(busy, MOST_BUSY)), waiting)


def choose(
    loads: Loads,
    found: Forecast,
    source: random.Random,
    preferred: str = "",
    *,
    weight: float = 1.0,
    penalty: Floats | float = 0.0,
) -> Choice | None:
    """The replica with the earliest finish if its work has this `weight` and `penalty`, in seconds,
    is added, of those with room for the prompt if there are any.

    A prefill replica is chosen only if no other one accepts a request. Among equals, `preferred` is
    chosen, else one with the fewest requests, at random. None if no replica accepts a request now.
    """
    answering = np.where(loads.prefills, np.inf, found.backlog)
    if answering.min(initial=np.inf) < np.inf:
        found = replace(found, backlog=answering)
    total = found.total + (weight - 1.0) * found.work + penalty
    least = total.min(initial=np.inf)
    if least == np.inf:
        return None
    roomy = np.where(loads.room >= found.prompt.tokens, total, np.inf)
    if roomy.min() < np.inf:
        total, least = roomy, roomy.min()
    equals = np.flatnonzero(total <= max(least * (1 + TIE), least + _TIE_S))
    number = _one_of(equals, loads, source, preferred)
    return Choice(loads.names[number], number, _reason(found, number), found, loads.names)


def _one_of(equals: Counts, loads: Loads, source: random.Random, preferred: str) -> int:
    if preferred:
        for number in equals.tolist():
            if loads.names[number] == preferred:
                return int(number)
    running = loads.running[equals]
    return int(source.choice(equals[running == running.min()]))


def _reason(found: Forecast, number: int) -> str:
    if found.left[number]:
        return "prefill"
    longest = max(found.fetchable, int(found.runs.max()))
    if not longest:
        return "backlog"
    if found.fetch[number]:
        return "fetch"
    return "local" if found.runs[number] == longest else "compute"
