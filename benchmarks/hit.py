"""Part `hit`: what a prefix costs if it is computed, held locally, or held by a peer.

There are three vLLM engines: a donor, and a consumer for each transport. The donor computes a
prompt. Then the consumers take turns, several times. Each fetches the prompt from the donor, finds
it in vLLM's own prefix cache, finds it in its pool after that cache was reset, and forgets it. Each
time as many rows are moved by memcpy or over raw TCP, which is the least that a fetch could take.
Consumers are told to fetch in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import transport
from benchmarks.ends import MEMCPY, TCP, Pair
from benchmarks.engines import (
    ALWAYS_FETCH,
    CHUNK,
    DTYPE,
    POOL_BYTES,
    REST,
    STEP_TOKENS,
    Asked,
    Fleet,
    Kind,
    Prompts,
    whole_chunks,
)
from benchmarks.figures import figure, ratio, shown
from examples.make_model import CONTEXT

TITLE = "Hits"
LENGTHS = (1000, 8000)
ROUNDS = 5
"""Prompts of each length."""
REPEATS = 2
"""Hits for each prompt and transport."""
QUICK = {"LENGTHS": (1000,)}
REFERENCES = {"shared_memory": MEMCPY, "gloo": TCP}
ALLOWANCE = 0.005
"""Seconds that a fetch may take beyond moving its bytes."""
_SHOWN = {"shared_memory": "shared memory", "gloo": "Gloo"}
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
    """By transport, except those whose whole chunks did not all come from the expected place."""

    @property
    def discarded(self) -> int:
        return REPEATS * len(REFERENCES) - sum(map(len, self.samples.values()))


def measure() -> dict[str, Any]:
    return measure_of(LENGTHS, ROUNDS)


def measure_of(
    lengths: Sequence[int], rounds: int, *, asynchronous: bool = False
) -> dict[str, Any]:
    """`asynchronous` engines schedule ahead, see `Kind`."""
    kinds = {_DONOR: Kind(asynchronous=asynchronous)} | {
        name: Kind(name, options=ALWAYS_FETCH, asynchronous=asynchronous) for name in REFERENCES
    }
    pair = Pair(0)
    try:
        with Fleet(kinds) as fleet:
            row_bytes = fleet.replicas()[_DONOR]["stats"]["pool"]["row_bytes"]
            pair.make(whole_chunks(max(lengths)), row_bytes)
            cycle = Cycle(fleet, pair, row_bytes)
            cycle.run(lengths[0])  # warm up, and make the links
            found: dict[int, list[Round]] = {tokens: [] for tokens in lengths}
            for _ in range(rounds):
                for tokens in lengths:
                    found[tokens].append(cycle.run(tokens))
            cycle.check_transports()
    finally:
        pair.close()
    discarded = sum(one.discarded for those in found.values() for one in those)
    return {
        "row_bytes": row_bytes,
        "rounds": rounds,
        "discarded": discarded,
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
        cold = self._fleet[_DONOR].ask(prompt)
        if cold.cached:
            raise RuntimeError("a fresh prompt was known")
        self._fleet.wait_published(_DONOR, chunks)
        samples: dict[str, list[Sample]] = {name: [] for name in REFERENCES}
        for turn in range(REPEATS):
            for name in [*REFERENCES][:: 1 if turn % 2 else -1]:
                hits = self._hits(name, prompt)
                slots = list(range(chunks))
                rate = transport._rate([self._pair], REFERENCES[name], slots, self._row_bytes)
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
        remote, local = consumer.ask(prompt), consumer.ask(prompt)
        consumer.do("forget")
        pool = consumer.ask(prompt)
        consumer.do("forget")
        self._fleet.flush([name])
        return remote, local, pool

    def check_transports(self) -> None:
        """Raise RuntimeError if a consumer has fetched over another transport than its own."""
        for name in REFERENCES:
            fetches = self._fleet.replicas()[name]["stats"]["fetches"]
            if set(fetches["by_transport"]) & (set(REFERENCES) - {name}):
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
        "pool/local": ratio(pool, local),
        "cold/remote": ratio(cold, remote),
    }


def _ms(seconds: Iterable[float]) -> dict[str, Any]:
    return figure([value * 1e3 for value in seconds])


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"Time to first token at the engine, ms. Three vLLM engines of one model ({DTYPE}, "
        f"{CONTEXT} tokens at most, {STEP_TOKENS} computed at once), pools of "
        f"{POOL_BYTES >> 20} MiB, chunks of {CHUNK} tokens, which are rows of "
        f"{part['row_bytes'] / (1 << 20):g} MiB. A local hit comes from vLLM's own prefix cache, a "
        "pool hit from the local pool after that cache was reset, a remote hit from a peer. Before "
        f"each request the engine rests for {REST:g} s. Overhead is remote − local. The floor is "
        "the time that as many rows took right afterwards by one thread's memcpy or over one plain "
        "TCP connection. The last column is overhead ÷ (floor + 5 ms). Medians, with minimum and "
        f"maximum in brackets, of {part['rounds']} prompts of each length, each hit {REPEATS} "
        f"times by each transport; {part['discarded']} samples were left out because not all "
        "whole chunks came from the peer.",
        "",
        "| tokens | MiB | transport | cold | local hit | pool hit | remote hit | overhead | floor "
        "| remote ÷ local | cold ÷ remote | overhead ÷ (floor + 5 ms) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in part["lengths"]:
        for name, found in row["transports"].items():
            times = ("local", "pool", "remote", "overhead", "floor")
            cells = [str(row["tokens"]), f"{row['bytes'] / (1 << 20):.0f}", _SHOWN[name]]
            cells.append(shown(row["cold_ms"], 0))
            cells += [shown(found[f"{time}_ms"], 1) for time in times]
            cells += [shown(found[of]) for of in ("remote/local", "cold/remote", "ratio")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    tokens = [row["tokens"] for row in part["lengths"]]

    def curve(values: Sequence[dict[str, Any]], label: str) -> None:
        middle = [value["median"] for value in values]
        below = [value["median"] - value["least"] for value in values]
        above = [value["most"] - value["median"] for value in values]
        axes.errorbar(tokens, middle, yerr=[below, above], marker="o", capsize=3, label=label)

    def hits(name: str, time: str) -> list[dict[str, Any]]:
        return [row["transports"][name][f"{time}_ms"] for row in part["lengths"]]

    curve([row["cold_ms"] for row in part["lengths"]], "computed")
    curve(hits("gloo", "remote"), "from a peer, Gloo")
    curve(hits("shared_memory", "remote"), "from a peer, shared memory")
    curve(hits("shared_memory", "pool"), "from the pool")
    curve(hits("shared_memory", "local"), "from vLLM's own cache")
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms to the first token")
    axes.legend()
