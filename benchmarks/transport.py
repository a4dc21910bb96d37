"""Part `transport`: how fast rows move, compared with a plain TCP connection.

GB/s are 10⁹ bytes of rows per second over all pairs, from the moment the first consumer begins
until the last one has its rows. Links are made and regions are populated beforehand, and rows are
checked only afterwards. Whatever is compared is measured in turns.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.ends import TCP, Pair
from benchmarks.figures import figure, ratio, shown, table

ROW_MIB = (1, 4, 16)
PAIRS = (1, 2)
ROUNDS = 5
BATCH_BYTES = 256 << 20
"""Bytes per pair and round."""
REFERENCES = {"gloo": TCP, "nixl": TCP}
"""NIXL goes by TCP where there is no RDMA port."""
_MIB = 1 << 20


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        pairs = [stack.enter_context(Pair(2 * number)) for number in range(max(PAIRS))]
        return {"batch_bytes": BATCH_BYTES, "rows": list(_of_all_sizes(pairs))}


def _of_all_sizes(pairs: Sequence[Pair]) -> Iterator[dict[str, Any]]:
    for mib in ROW_MIB:
        row_bytes = mib * _MIB
        for pair in pairs:
            pair.make(BATCH_BYTES // row_bytes, row_bytes)
        for count in PAIRS:
            yield {"row_bytes": row_bytes, "pairs": count, **_of(pairs[:count], row_bytes)}


def _of(pairs: Sequence[Pair], row_bytes: int) -> dict[str, Any]:
    slots = list(range(BATCH_BYTES // row_bytes))
    names = [*REFERENCES, TCP]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm up, and show that the right rows arrive
        rate(pairs, name, slots, row_bytes)
        if not all(pair.is_right() for pair in pairs):
            raise RuntimeError(f"{name} delivered wrong rows")
    for turn in range(ROUNDS):
        random.Random(turn).shuffle(slots)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rates[name].append(rate(pairs, name, slots, row_bytes))
    found: dict[str, Any] = {name: figure(rates[name]) for name in names}
    for name, reference in REFERENCES.items():
        found[f"{name}/{reference}"] = ratio(rates[name], rates[reference])
    return found


def rate(pairs: Sequence[Pair], name: str, slots: Sequence[int], row_bytes: int) -> float:
    """GB/s."""
    for pair in pairs:
        pair.begin(name, slots)
    spans = [pair.finish() for pair in pairs]
    seconds = max(span.ended for span in spans) - min(span.began for span in spans)
    return len(pairs) * len(slots) * row_bytes / seconds / 1e9


def markdown(part: dict[str, Any]) -> str:
    """GB/s over all pairs: medians, with least and most."""
    columns = ["rows", "pairs", "raw TCP", "Gloo", "÷ TCP", "NIXL", "÷ TCP"]
    rows = []
    for row in part["rows"]:
        cells = [f"{row['row_bytes'] // _MIB} MiB", str(row["pairs"]), shown(row[TCP])]
        for name, reference in REFERENCES.items():
            cells += map(shown, (row[name], row[f"{name}/{reference}"]))
        rows.append(cells)
    return table(tuple(columns), rows)
