"""Part `capacity`: how many prefixes the replicas of one host hold together.

There are three vLLM engines with small pools. Each computes as many prefixes as its pool has room
for, and no prefix twice. Then each prefix is asked for at the next engine, whose own prefix cache
is empty: what is reused comes from some pool. Once more at the one after that, whether the first
hits have displaced anything.

The same with engines that copy what they fetch, as between hosts: each copy takes the room of
something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.figures import table
from tests.harness.engines import ALWAYS_FETCH, CHUNK, Fleet, Kind, Prompts

ENGINES = 3
ROWS = 96
"""The size of each pool."""
CHUNKS = 19
"""The length of each prefix."""
ROUNDS = 2
QUICK = {"ENGINES": 2, "ROWS": 32, "CHUNKS": 16}
WAYS = {"in place": "auto", "copied": "gloo"}
_ROW_BYTES = 2 << 20  # of the benchmarks' model
_SPARE = 64  # an engine keeps one row in so many free


def measure() -> dict[str, Any]:
    return {
        "engines": ENGINES,
        "rows": ROWS,
        **{way: _held(transport) for way, transport in WAYS.items()},
    }


def _held(transport: str) -> dict[str, Any]:
    """The chunks that were reused in each round, in pools."""
    names = [f"engine-{number}" for number in range(ENGINES)]
    options = {**ALWAYS_FETCH, "pool_bytes": ROWS * _ROW_BYTES}
    prompts = Prompts()
    with Fleet(dict.fromkeys(names, Kind(transport, options=options))) as fleet:
        fleet.wait_mapped(names if transport == "auto" else ())
        fleet.flush()
        each = (ROWS - ROWS // _SPARE) // CHUNKS
        prefixes = {
            name: [prompts.fresh(CHUNKS * CHUNK + 1) for _ in range(each)] for name in names
        }
        for name, own in prefixes.items():
            for prefix in own:
                fleet[name].timed(prefix)
            fleet.wait_published(name, each * CHUNKS)
        reused = [_reused(fleet, names, prefixes, 1 + turn) for turn in range(ROUNDS)]
        stats = [fleet.stats(name)["fetches"]["by_transport"] for name in names]
    copied = sum(
        found["bytes"] for each in stats for how, found in each.items() if how != "in_place"
    )
    return {
        "asked": each * CHUNKS * ENGINES / ROWS,
        "reused": [chunks / ROWS for chunks in reused],
        "copied": copied / (sum(reused) * _ROW_BYTES),
    }


def _reused(
    fleet: Fleet, names: Sequence[str], prefixes: Mapping[str, Sequence[list[int]]], further: int
) -> int:
    """Ask for each prefix at an engine so much further than the one that computed it."""
    found = 0
    for number, name in enumerate(names):
        asked = fleet[names[(number + further) % len(names)]]
        for prefix in prefixes[name]:
            asked.call("forget")
            found += asked.timed(prefix).cached // CHUNK
    return found


def markdown(part: Mapping[str, Any]) -> str:
    """In pools of one engine."""
    return table(
        (
            "rows",
            "asked for",
            *(f"reused, round {turn + 1}" for turn in range(ROUNDS)),
            "copied ÷ reused",
        ),
        (
            (
                way,
                f"{part[way]['asked']:.2f}",
                *(f"{pools:.2f}" for pools in part[way]["reused"]),
                f"{part[way]['copied']:.2f}",
            )
            for way in WAYS
        ),
    )
