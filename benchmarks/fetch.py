"""Part `fetch`: a whole fetch without an engine, compared with the least that its bytes cost.

A fetch lasts from the moment the scheduler thread begins it until that thread sees the rows as
hits: grant by the donor's engine, transfer, checksums, commit. The replicas are real except for
vLLM, so no worker maps a neighbour's rows: they are copied. The floor is one thread's memcpy of the
same rows, or the same messages over a plain TCP connection, measured in turns.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.ends import MEMCPY, TCP, Pair
from benchmarks.figures import figure, ratio, shown, table
from tests.harness.replicas import ReplicaProcess, TrackerProcess, replicas, stored, wait_until
from xinference_xavier.peers import SHARED_MEMORY

ROWS = {1: (8, 32, 117), 4: (8, 29)}
"""Rows per fetch, by MiB per row."""
ROUNDS = 7
REFERENCES = {"gloo": TCP, SHARED_MEMORY: MEMCPY}
ALLOWED_MS = 5.0
"""What a fetch may cost beyond moving its bytes."""
_SHOWN = {"gloo": "Gloo", SHARED_MEMORY: "shared memory"}
_MIB = 1 << 20
_TIMEOUT = 60.0


def measure() -> dict[str, Any]:
    with Pair(0) as pair, TrackerProcess() as tracker:
        return {"sizes": list(_of_all_sizes(pair, tracker.address))}


def _of_all_sizes(pair: Pair, tracker: str) -> Iterator[dict[str, Any]]:
    for mib, counts in ROWS.items():
        row_bytes = mib * _MIB
        for name, reference in REFERENCES.items():
            ends = {f"{end}-{name}-{mib}": name for end in ("donor", "consumer")}
            # Room for the evicted rows and for the fetched ones.
            room = 2 * sum(counts)
            with replicas(
                tracker, ends, rows=room, row_bytes=row_bytes, fetch_timeout=_TIMEOUT
            ) as (donor, consumer):
                if name == SHARED_MEMORY:
                    wait_until(partial(_has_mapped, consumer), "its memory is mapped")
                for rows in counts:
                    pair.make(rows, row_bytes)
                    found = _of(pair, reference, donor, consumer, rows)
                    yield {"transport": name, "row_bytes": row_bytes, "rows": rows, **found}


def _has_mapped(consumer: ReplicaProcess) -> bool:
    return bool(consumer.linked_to())


def _of(
    pair: Pair, reference: str, donor: ReplicaProcess, consumer: ReplicaProcess, rows: int
) -> dict[str, Any]:
    keys = stored(consumer, donor, count=rows)
    fetches: list[float] = []
    floors: list[float] = []
    for turn in range(ROUNDS + 2):
        outcome = consumer.fetch(donor.name, keys, _TIMEOUT)
        if outcome.committed != rows:
            raise RuntimeError(f"{outcome.committed} of {rows} rows arrived: {outcome.reason}")
        pair.begin(reference, range(rows))
        span = pair.finish()
        if turn >= 2:  # the first two make the link and map the memory
            fetches.append(1e3 * outcome.seconds)
            floors.append(1e3 * (span.ended - span.began))
        consumer.evict(keys)
    if consumer.wrong_rows():
        raise RuntimeError("a fetch delivered wrong rows")
    return {
        "fetch_ms": figure(fetches),
        "floor_ms": figure(floors),
        "ratio": ratio(fetches, [floor + ALLOWED_MS for floor in floors]),
    }


def markdown(part: dict[str, Any]) -> str:
    columns = ("by", "rows", "a fetch, ms", "floor, ms", f"fetch ÷ (floor + {ALLOWED_MS:g} ms)")
    return table(
        columns,
        (
            (
                _SHOWN[size["transport"]],
                f"{size['rows']} × {size['row_bytes'] // _MIB} MiB",
                *(shown(size[name]) for name in ("fetch_ms", "floor_ms", "ratio")),
            )
            for size in part["sizes"]
        ),
    )
