"""Part `hit`: what a prefix costs if it is computed, held locally, or held by a peer.

There are three vLLM engines: a donor, and a consumer for each way. The donor computes a prompt.
Then the consumers take turns, several times. Each fetches the prompt from the donor, finds it in
vLLM's own prefix cache, finds it in its pool after that cache was reset, and forgets it. By shared
memory, rows are loaded from where they are: only the donor has them in its pool, so the pool's hit
is one of the donor. Each time as many rows are moved by memcpy or over raw TCP, which is the least
that a fetch could take. Consumers are configured to fetch in any case.

The same is measured with engines that schedule asynchronously, as on GPUs: each schedules a step
before it has the output of the previous one, which a worker computes in a process of its own.

Then a prompt that nobody holds goes to several engines at once, in turns with one engine alone.
Ideally the cluster computes it once, and no request waits longer than computing alone takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import transport
from benchmarks.ends import MEMCPY, TCP, Pair
from benchmarks.figures import figure, ratio, shown, table
from tests.harness.engines import ALWAYS_FETCH, CHUNK, Asked, Fleet, Kind, Prompts, whole_chunks
from xinference_xavier.peers import IN_PLACE, SHARED_MEMORY

MODES = {"synchronous": (1000, 8000), "asynchronous": (4000,)}
"""Tokens of the prompts, by how the engines schedule."""
ROUNDS = 5
"""Prompts of each length."""
REPEATS = 6
"""Hits for each prompt and transport."""
AT_ONCE = 3
"""Engines that get one unknown prompt at once."""
AT_ONCE_TOKENS = 4000
QUICK = {
    "MODES": {"synchronous": (1000,), "asynchronous": (1000,)},
    "AT_ONCE": 2,
    "AT_ONCE_TOKENS": 2000,
}
REFERENCES = {SHARED_MEMORY: MEMCPY, "gloo": TCP}
ALLOWANCE = 0.005
"""Seconds that a fetch may take beyond moving its bytes."""
_SHOWN = {SHARED_MEMORY: "shared memory", "gloo": "Gloo"}
_DONOR = "donor"


class Sample(NamedTuple):
    """Seconds to first token, and `floor`: seconds to move the same rows otherwise."""

    cold: float
    remote: float
    local: float
    pool: float
    floor: float


class Round(NamedTuple):
    """The samples of one prompt."""

    cold: float
    samples: dict[str, list[Sample]]
    """Samples by transport, without those whose whole chunks did not all come from the expected
    place."""

    @property
    def discarded(self) -> int:
        return REPEATS * len(REFERENCES) - sum(map(len, self.samples.values()))


class Rush(NamedTuple):
    """One prompt, sent to several engines at once: seconds to first token, and tokens computed."""

    first: tuple[float, ...]
    computed: int
    """Prompt tokens, over all engines."""

    @classmethod
    def from_answers(cls, asked: Sequence[Asked], tokens: int) -> Rush:
        computed = sum(tokens - one.cached for one in asked)
        return cls(tuple(one.first for one in asked), computed)


def measure() -> dict[str, Any]:
    modes = {
        mode: _hits(lengths, asynchronous=mode == "asynchronous") for mode, lengths in MODES.items()
    }
    return {**modes, "at_once": _at_once()}


# -- from one donor ---------------------------------------------------------------------------


def _hits(lengths: Sequence[int], *, asynchronous: bool) -> dict[str, Any]:
    kinds = {_DONOR: Kind(asynchronous=asynchronous)} | {
        name: Kind(name, options=ALWAYS_FETCH, asynchronous=asynchronous) for name in REFERENCES
    }
    with Pair(0) as pair, Fleet(kinds) as fleet:
        row_bytes = fleet.stats(_DONOR)["pool"]["row_bytes"]
        pair.make(whole_chunks(max(lengths)), row_bytes)
        cycle = Cycle(fleet, pair, row_bytes)
        fleet.wait_mapped((_DONOR, SHARED_MEMORY))
        cycle.run(lengths[0])  # warm up, and make the links
        found: dict[int, list[Round]] = {tokens: [] for tokens in lengths}
        for _ in range(ROUNDS):
            for tokens in lengths:
                found[tokens].append(cycle.run(tokens))
        cycle.check_transports()
    return {
        "row_bytes": row_bytes,
        "discarded": sum(one.discarded for those in found.values() for one in those),
        "lengths": [summary(tokens, row_bytes, those) for tokens, those in found.items()],
    }


class Cycle:
    """Takes a prompt from cold to forgotten."""

    def __init__(self, fleet: Fleet, pair: Pair, row_bytes: int) -> None:
        self._fleet = fleet
        self._pair = pair
        self._row_bytes = row_bytes
        self._prompts = Prompts()

    def run(self, tokens: int) -> Round:
        prompt = self._prompts.fresh(tokens)
        chunks = whole_chunks(tokens)
        cold = self._fleet[_DONOR].timed(prompt)
        if cold.cached:
            raise RuntimeError("a fresh prompt was known")
        self._fleet.wait_published(_DONOR, chunks)
        samples: dict[str, list[Sample]] = {name: [] for name in REFERENCES}
        for turn in range(REPEATS):
            for name in [*REFERENCES][:: 1 if turn % 2 else -1]:
                hits = self._hits(name, prompt)
                slots = list(range(chunks))
                rate = transport.rate([self._pair], REFERENCES[name], slots, self._row_bytes)
                floor = chunks * self._row_bytes / rate / 1e9
                if all(hit.cached == chunks * CHUNK for hit in hits):
                    remote, local, pool = (hit.first for hit in hits)
                    samples[name].append(Sample(cold.first, remote, local, pool, floor))
        self._fleet.flush()
        return Round(cold.first, samples)

    def _hits(self, name: str, prompt: list[int]) -> tuple[Asked, Asked, Asked]:
        """One hit each from the donor, vLLM's own prefix cache and the pool; then the consumer
        forgets the prompt."""
        consumer = self._fleet[name]
        remote, local = consumer.timed(prompt), consumer.timed(prompt)
        consumer.call("forget")
        # What is loaded in place is in the donor's pool only.
        holder = self._fleet[_DONOR] if name == SHARED_MEMORY else consumer
        holder.call("forget")
        pool = holder.timed(prompt)
        consumer.call("forget")
        self._fleet.flush([name])
        return remote, local, pool

    def check_transports(self) -> None:
        """Raise RuntimeError if a consumer has fetched in another way than its own."""
        for name in REFERENCES:
            fetches = self._fleet.stats(name)["fetches"]
            own = IN_PLACE if name == SHARED_MEMORY else name
            if set(fetches["by_transport"]) & ({*REFERENCES, IN_PLACE} - {own}):
                raise RuntimeError(f"{name} was to be measured, but this was used: {fetches}")


def summary(tokens: int, row_bytes: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """A row of the report; times are in ms."""
    rows = whole_chunks(tokens)
    return {
        "tokens": tokens,
        "rows": rows,
        "bytes": rows * row_bytes,
        "cold_ms": _ms(one.cold for one in rounds),
        "transports": {
            name: of_transport([sample for one in rounds for sample in one.samples[name]])
            for name in REFERENCES
        },
    }


def of_transport(samples: Sequence[Sample]) -> dict[str, Any]:
    cold, remote, local, pool, floor = (list(column) for column in zip(*samples, strict=True))
    overhead = [sample.remote - sample.local for sample in samples]
    return {
        "remote_ms": _ms(remote),
        "local_ms": _ms(local),
        "pool_ms": _ms(pool),
        "floor_ms": _ms(floor),
        "overhead_ms": _ms(overhead),
        "ratio": ratio(overhead, [seconds + ALLOWANCE for seconds in floor]),
        "remote/local": ratio(remote, local),
        "remote/pool": ratio(remote, pool),
        "pool/local": ratio(pool, local),
        "cold/remote": ratio(cold, remote),
    }


def _ms(seconds: Iterable[float]) -> dict[str, Any]:
    return figure([value * 1e3 for value in seconds])


# -- by several at once -----------------------------------------------------------------------


def _at_once() -> dict[str, Any]:
    names = [f"engine-{number}" for number in range(AT_ONCE)]
    prompts = Prompts()
    alone, together = [], []
    with Fleet(dict.fromkeys(names, Kind())) as fleet:
        for name in names:  # warm up, and make the links
            _rush(fleet, [name], prompts.fresh(AT_ONCE_TOKENS // 4))
            _rush(fleet, names, prompts.fresh(AT_ONCE_TOKENS // 4))
        for turn in range(ROUNDS):
            name = names[turn % len(names)]
            alone.append(_rush(fleet, [name], prompts.fresh(AT_ONCE_TOKENS)))
            together.append(_rush(fleet, names, prompts.fresh(AT_ONCE_TOKENS)))
    return of_rushes(AT_ONCE_TOKENS, alone, together)


def _rush(fleet: Fleet, names: Sequence[str], prompt: list[int]) -> Rush:
    asking = [fleet[name].begin("timed", prompt, 1) for name in names]
    asked = [each.result() for each in asking]
    fleet.flush()
    return Rush.from_answers(asked, len(prompt))


def of_rushes(tokens: int, alone: Sequence[Rush], together: Sequence[Rush]) -> dict[str, Any]:
    one = [rush.first[0] for rush in alone]
    slowest = [max(rush.first) for rush in together]
    return {
        "tokens": tokens,
        "replicas": len(together[0].first),
        "alone_ms": _ms(one),
        "first_ms": _ms(min(rush.first) for rush in together),
        "slowest_ms": _ms(slowest),
        "slowest/alone": ratio(slowest, one),
        "computed": figure([rush.computed / tokens for rush in together]),
    }


# -- shown ------------------------------------------------------------------------------------

_TIMES = {
    "local": "local hit",
    "pool": "pool hit",
    "remote": "remote hit",
    "overhead": "remote − local",
    "floor": "floor",
}
_RATIOS = {
    "remote/local": "remote ÷ local",
    "remote/pool": "remote ÷ pool",
    "cold/remote": "cold ÷ remote",
    "ratio": "overhead ÷ (floor + 5 ms)",
}


def markdown(part: Mapping[str, Any]) -> str:
    """Times in ms."""
    tables = [f"{mode}\n\n{_of_hits(part[mode])}" for mode in MODES]
    at_once = part["at_once"]
    rush = table(
        ("at once", "tokens", "alone", "first answer", "last answer", "last ÷ alone", "computed"),
        [
            [
                f"{at_once['replicas']}",
                f"{at_once['tokens']}",
                *(shown(at_once[f"{name}_ms"], 0) for name in ("alone", "first", "slowest")),
                *(shown(at_once[name]) for name in ("slowest/alone", "computed")),
            ]
        ],
    )
    return "\n\n".join([*tables, rush])


def _of_hits(found: Mapping[str, Any]) -> str:
    return table(
        ("tokens", "MiB", "transport", "cold", *_TIMES.values(), *_RATIOS.values()),
        (
            (
                f"{row['tokens']}",
                f"{row['bytes'] / (1 << 20):.0f}",
                _SHOWN[name],
                shown(row["cold_ms"], 0),
                *(shown(times[f"{each}_ms"], 1) for each in _TIMES),
                *(shown(times[each]) for each in _RATIOS),
            )
            for row in found["lengths"]
            for name, times in row["transports"].items()
        ),
    )
