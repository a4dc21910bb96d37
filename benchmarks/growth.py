"""Part `growth`: what a hit and the tracker cost with ten times as much of everything.

Two vLLM engines show what a hit over shared memory costs beyond a local one: with a prompt ten
times as long, with ten times as many keys in the index, and with ten times as many members, which
hold keys and do nothing else. Small and large take turns. The tracker's own costs are those of part
`tracker`, with ten times as many keys and replicas.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks import propagation, tracker
from benchmarks.engines import ALWAYS_FETCH, CHUNK, Fleet, Kind, Prompts, whole_chunks
from benchmarks.figures import figure, shown
from benchmarks.watchers import KEY_BYTES
from examples.waiting import until
from xinference_xavier.protocol.tracker import Member, Settings

TITLE = "Growth"
ROUNDS = 5
TIMES = 10
TOKENS = 400
KEYS = 40_000
MEMBERS = 2
TRACKER_KEYS = 100_000
REPLICAS = 6
QUICK = {"KEYS": 4000, "TRACKER_KEYS": 20_000, "REPLICAS": 2}
_DONOR, _CONSUMER = "donor", "consumer"
_BATCH = 1000
_PATIENCE = 120.0


class Setting(NamedTuple):
    """The length of the prompt, and what other members have in the index."""

    tokens: int
    keys: int
    members: int


def settings() -> dict[str, Setting]:
    base = Setting(TOKENS, KEYS, MEMBERS)
    return {
        "base": base,
        "tokens": base._replace(tokens=base.tokens * TIMES),
        "keys": base._replace(keys=base.keys * TIMES),
        "members": base._replace(members=base.members * TIMES),
    }


def measure() -> dict[str, Any]:
    with Fleet({_DONOR: Kind(), _CONSUMER: Kind(options=ALWAYS_FETCH)}) as fleet:
        costs = _hits(fleet)
    few, many = (tracker._holdings(keys) for keys in (TRACKER_KEYS, TRACKER_KEYS * TIMES))
    replicas = (REPLICAS, REPLICAS * TIMES)
    return {
        "hits": of_hits(settings(), costs),
        "tracker": [
            *of_keys(few, many),
            *of_replicas(
                asyncio.run(tracker._throughput(replicas)),
                asyncio.run(propagation.measure(replicas)),
            ),
        ],
    }


# -- a hit ------------------------------------------------------------------------------------


def _hits(fleet: Fleet) -> dict[str, list[float]]:
    """By setting, how many seconds longer a remote hit took than a local one."""
    prompts = Prompts()
    costs: dict[str, list[float]] = {name: [] for name in settings()}
    _cost(fleet, prompts.fresh(TOKENS))  # warm up, and make the links
    fleet.flush()
    for _ in range(ROUNDS):
        for name, setting in settings().items():
            with _others(fleet, setting.keys, setting.members):
                costs[name].append(_cost(fleet, prompts.fresh(setting.tokens)))
            fleet.flush()  # after the others have left: they would not answer
    return costs


def _cost(fleet: Fleet, prompt: list[int]) -> float:
    fleet[_DONOR].ask(prompt)
    chunks = whole_chunks(len(prompt))
    fleet.wait_published(_DONOR, chunks)
    remote, local = (fleet[_CONSUMER].ask(prompt) for _ in range(2))
    if remote.cached != chunks * CHUNK:
        raise RuntimeError(f"{remote.cached} of {chunks * CHUNK} tokens came from the peer")
    return remote.first - local.first


@contextmanager
def _others(fleet: Fleet, keys: int, members: int) -> Iterator[None]:
    """Add members that hold `keys` together; wait until the mirrors know them."""
    namespace = fleet.namespace()
    names = [f"other-{number}" for number in range(members)]
    for name in names:
        member = Member(name, "127.0.0.1:1")
        fleet.run(fleet.actor.join(namespace, member, KEY_BYTES, Settings()))
        for sequence in range(1, keys // members // _BATCH + 1):
            batch = os.urandom(KEY_BYTES * _BATCH)
            fleet.run(fleet.actor.publish(namespace, name, sequence, batch, b""))
    held = keys // members // _BATCH * _BATCH * members
    _wait_for_mirrors(fleet, held)
    try:
        yield
    finally:
        for name in names:
            fleet.run(fleet.actor.leave(namespace, name))


def _wait_for_mirrors(fleet: Fleet, keys: int) -> None:
    def known() -> list[int]:
        replicas = fleet.replicas()
        return [replicas[name]["stats"]["mirror"]["keys"] for name in (_DONOR, _CONSUMER)]

    if not until(lambda: known() == [keys, keys], _PATIENCE):
        raise RuntimeError(f"the mirrors know {known()} keys, not {keys}")


# -- the report -------------------------------------------------------------------------------


def of_hits(
    chosen: Mapping[str, Setting], costs: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    base = [seconds * 1e3 for seconds in costs["base"]]
    titles = {"tokens": "tokens of the prompt", "keys": "keys in the index", "members": "members"}
    return [
        row(
            title,
            (getattr(chosen["base"], name), getattr(chosen[name], name)),
            "remote − local hit, ms",
            base,
            [seconds * 1e3 for seconds in costs[name]],
        )
        for name, title in titles.items()
    ]


def of_keys(few: dict[str, Any], many: dict[str, Any]) -> list[dict[str, Any]]:
    sizes = (TRACKER_KEYS, TRACKER_KEYS * TIMES)
    names = {
        "publishes_per_s": "publishing a key, in process, µs",
        "lookups_per_s": "looking a key up in a mirror, µs",
    }
    return [
        row("keys in the index", sizes, words, *(_per_one(found[name]) for found in (few, many)))
        for name, words in names.items()
    ]


def of_replicas(
    throughput: Sequence[dict[str, Any]], propagation: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    sizes = (REPLICAS, REPLICAS * TIMES)
    small, large = (_per_one(found["keys_per_s"]) for found in throughput)
    few, many = (found["p50_ms"]["samples"] for found in propagation)
    return [
        row("replicas", sizes, "publishing a key, all at once, µs", small, large),
        row("replicas", sizes, "an update until it is everywhere, median, ms", few, many),
    ]


def row(
    grows: str,
    sizes: tuple[int, int],
    cost: str,
    small: Sequence[float],
    large: Sequence[float],
) -> dict[str, Any]:
    return {
        "grows": grows,
        "sizes": list(sizes),
        "cost": cost,
        "small": figure(small),
        "large": figure(large),
        "times": figure(large)["median"] / figure(small)["median"],
    }


def _per_one(rate: dict[str, Any]) -> list[float]:
    """Convert a rate per second into µs each."""
    return [1e6 / per_second for per_second in rate["samples"]]


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"What a remote hit costs beyond a local one, and what the tracker costs, with "
        f"{TIMES} times as much of one thing and the same of everything else. The base of a hit is "
        f"a prompt of {TOKENS} tokens, {KEYS:,} keys and {MEMBERS} members beside the two engines. "
        "Medians, with minimum and maximum in brackets; the last column is the ratio of the "
        "medians.",
        "",
        "| what grows | from | to | cost | small | large | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in (*part["hits"], *part["tracker"]):
        small, large = found["sizes"]
        cells = (
            *(found["grows"], f"{small:,}", f"{large:,}", found["cost"]),
            *(shown(found["small"]), shown(found["large"]), f"{found['times']:.2f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    rows = [*part["hits"], *part["tracker"]]
    labels = [f"{found['grows']}: {found['cost'].rpartition(',')[0]}" for found in rows]
    axes.barh(labels, [found["times"] for found in rows])
    axes.axvline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel(f"cost with {TIMES} times as much ÷ cost")
