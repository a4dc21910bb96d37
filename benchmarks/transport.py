"""Part `transport`: how fast rows move, compared with a plain TCP connection and with memcpy.

GB/s are 10⁹ bytes of rows per second over all pairs, from the moment the first consumer begins
until the last one has its rows. Links are made and regions are populated beforehand, and rows are
checked only afterwards. Whatever is compared is measured in turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.ends import MEMCPY, TCP, Pair
from benchmarks.figures import figure, ratio, shown

TITLE = "Transports"
ROW_MIB = (1, 4, 16)
PAIRS = (1, 2)
ROUNDS = 5
BATCH_BYTES = 256 << 20
"""Bytes per pair and round."""
REFERENCES = {"gloo": TCP, "shared_memory": MEMCPY}
_SHOWN = {"gloo": "Gloo", "shared_memory": "shared memory", TCP: "raw TCP", MEMCPY: "memcpy"}
_MIB = 1 << 20


def measure() -> dict[str, Any]:
    with ExitStack() as stack:
        pairs = [Pair(2 * number) for number in range(max(PAIRS))]
        for pair in pairs:
            stack.callback(pair.close)
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
    names = [*REFERENCES, *REFERENCES.values()]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm up, and show that the right rows arrive
        _rate(pairs, name, slots, row_bytes)
        if not all(pair.is_right() for pair in pairs):
            raise RuntimeError(f"{name} delivered wrong rows")
    for turn in range(ROUNDS):
        random.Random(turn).shuffle(slots)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rates[name].append(_rate(pairs, name, slots, row_bytes))
    found: dict[str, Any] = {name: figure(rates[name]) for name in names}
    for name, reference in REFERENCES.items():
        found[f"{name}/{reference}"] = ratio(rates[name], rates[reference])
    return found


def _rate(pairs: Sequence[Pair], name: str, slots: Sequence[int], row_bytes: int) -> float:
    """GB/s."""
    for pair in pairs:
        pair.begin(name, slots)
    spans = [pair.finish() for pair in pairs]
    seconds = max(span.ended for span in spans) - min(span.began for span in spans)
    return len(pairs) * len(slots) * row_bytes / seconds / 1e9


def markdown(part: dict[str, Any]) -> str:
    lines = [
        "GB/s over all pairs. A pair is a donor and a consumer, each in a process of its own; "
        f"{part['batch_bytes'] // _MIB} MiB per pair and round. Raw TCP is one plain connection "
        "per pair with the same messages, memcpy one thread per pair that copies the same rows. "
        "Medians, with minimum and maximum in brackets; ratios are of rounds that were run in "
        "turn.",
        "",
        "| rows | pairs | Gloo | raw TCP | Gloo ÷ TCP | shared memory | memcpy | shared ÷ memcpy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in part["rows"]:
        cells = [f"{row['row_bytes'] // _MIB} MiB", str(row["pairs"])]
        for name, reference in REFERENCES.items():
            cells += map(shown, (row[name], row[reference], row[f"{name}/{reference}"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    labels = [f"{row['row_bytes'] // _MIB} MiB × {row['pairs']}" for row in part["rows"]]
    for name, reference in REFERENCES.items():
        ratios = [row[f"{name}/{reference}"] for row in part["rows"]]
        middle = [value["median"] for value in ratios]
        below = [value["median"] - value["least"] for value in ratios]
        above = [value["most"] - value["median"] for value in ratios]
        axes.errorbar(
            labels,
            middle,
            yerr=[below, above],
            marker="o",
            capsize=3,
            linestyle="",
            label=f"{_SHOWN[name]} ÷ {_SHOWN[reference]}",
        )
    axes.axhline(0.8, color="grey", linewidth=1, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("row size × pairs")
    axes.set_ylabel("of the reference's rate")
    axes.tick_params(axis="x", rotation=45)
    axes.legend()
