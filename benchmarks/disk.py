"""Part `disk`: rows on a local disk, compared with vLLM's own file tier, and with computing.

Rows are saved and read as a replica does, with files, checksums and threads. In turns, as many
bytes are written and read by the functions of vLLM's own file tier, in as many threads as read.
It makes a file for each row, too, but no checksum.

An engine computes a prompt, saves it, forgets it, and finds it on the disk. It serves loads that
share nothing, in turns saving all that it computes and nothing. Traces of real services are
replayed on simulated replicas whose pools are too small, with a disk and without one.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs import io as fs

from benchmarks import no_hits, pairs, traces
from benchmarks.figures import figure, ratio, shown, table
from benchmarks.replica_model import Engine
from benchmarks.report import ROOT
from benchmarks.routing import summary
from benchmarks.simulator import EarliestFinish, Simulator
from examples.processes import until
from tests.harness.engines import (
    ALWAYS_FETCH,
    CHUNK,
    SETTLE,
    Fleet,
    Kind,
    Prompts,
    whole_chunks,
)
from tests.harness.replicas import fresh_keys
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import Region
from xinference_xavier.replica.disk import READERS, Disk, DiskState
from xinference_xavier.replica.reports import Publisher

ROWS, ROW_BYTES = 128, 2 << 20
ROUNDS_KEPT = 2
"""Rounds that are there; later ones take the place of the oldest."""
TOKENS = (1000, 8000)
ROUNDS = 5
REPLICAS, LOAD = 4, 0.8
POOL_SHARE = 0.1
"""All simulated pools together, relative to the chunks that a trace asks for."""
DISK_TOKENS = 60_000
"""Per second, for all simulated replicas together: 8 GB/s, as of two fast drives."""
REQUESTS: int | None = None
"""Requests of each trace that are replayed; None stands for all."""
SECONDS = 120.0
"""Seconds for all pairs of loads."""
QUICK = {"ROWS": 16, "TOKENS": (1000,), "REQUESTS": 1000, "SECONDS": 0.0}
_PATIENCE = 300.0
_OWN = "own"


def measure() -> dict[str, Any]:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        rows = asyncio.run(_rows(Path(folder, "rows")))
        lengths, writing = _engine(Path(folder, "engine"))
    replays = [*map(_replay, traces.NAMES)]
    return {"rows": rows, "lengths": lengths, "writing": writing, "replays": replays}


async def _rows(parent: Path) -> dict[str, Any]:
    region = Region.create(ROWS, ROW_BYTES)
    region.array[:] = 7
    pool = Pool(ROWS)
    disk = Disk(parent, ROUNDS_KEPT * ROWS * ROW_BYTES, "model", region, pool)
    disk.move("namespace")
    running = asyncio.ensure_future(disk.run(Publisher(_OWN, pool)))
    disk.probed(b"canary", {})
    files = _Files(parent / "files", region)
    rates: dict[str, list[float]] = {
        f"{what}{how}": [] for what in ("write", "read") for how in ("", " files")
    }
    try:
        await _until(lambda: disk.state is DiskState.OPEN)
        for _ in range(ROUNDS + 1):
            keys = fresh_keys(ROWS)
            for row in pool.reserve(keys).rows:
                pool.commit(row, region.checksum(row.slot, row.key))
            rates["write files"].append(_rate(files.write))
            began = time.perf_counter()
            disk.keep(keys)
            await _until(lambda keys=keys: keys[-1] in disk.index)  # type: ignore[misc]
            rates["write"].append(_per_second(began))
            await _until(lambda: not pool.counts().pinned)
            pool.reset()
            rates["read files"].append(_rate(files.read))
            rows = pool.reserve(keys).rows
            began = time.perf_counter()
            result = await disk.read(rows, [])
            rates["read"].append(_per_second(began))
            if result.verified != ROWS:
                raise RuntimeError(f"{result.verified} of {ROWS} rows were read: {result.reason}")
            pool.abort(*rows)
    finally:
        running.cancel()
        disk.close()
    measured = {name: found[1:] for name, found in rates.items()}  # the first one warms up
    return {
        "row_bytes": ROW_BYTES,
        "rows": ROWS,
        "gb_s": {name: figure(found) for name, found in measured.items()},
        **{
            f"{what}/files": ratio(measured[what], measured[f"{what} files"])
            for what in ("write", "read")
        },
    }


class _Files:
    """The same bytes by vLLM's file tier, in as many threads, from new files each time."""

    def __init__(self, folder: Path, region: Region) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._view = region.array.reshape(-1).data
        self._paths: list[str] = []

    def write(self) -> None:
        for path in self._paths:
            Path(path).unlink()
        self._paths = [str(self._folder / f"{key.hex()}.bin") for key in fresh_keys(ROWS)]
        self._in_parts(fs.batch_store_block)

    def read(self) -> None:
        self._in_parts(fs.batch_load_block)

    def _in_parts(self, call: Callable[..., None]) -> None:
        offsets = [slot * ROW_BYTES for slot in range(ROWS)]
        with ThreadPoolExecutor(READERS) as threads:
            calls = [
                threads.submit(
                    call, self._paths[part::READERS], self._view, offsets[part::READERS], ROW_BYTES
                )
                for part in range(READERS)
            ]
        for each in calls:
            each.result()


def _rate(work: Callable[[], None]) -> float:
    os.sync()
    began = time.perf_counter()
    work()
    return _per_second(began)


def _per_second(began: float) -> float:
    return ROWS * ROW_BYTES / 1e9 / (time.perf_counter() - began)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_PATIENCE):
        while not condition():  # noqa: ASYNC110  # threads change it, and tell nobody
            await asyncio.sleep(0.001)


# -- an engine --------------------------------------------------------------------------------


def _engine(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    kind = Kind(
        arguments={"worker_extension_cls": "benchmarks.step_times.StepTimes"},
        options={"disk": str(folder), **ALWAYS_FETCH},
    )
    prompts = Prompts()
    found: dict[int, list[tuple[float, float, float]]] = {tokens: [] for tokens in TOKENS}
    with Fleet({_OWN: kind}) as fleet:
        _round(fleet, prompts.fresh(TOKENS[0]))  # warm up
        for _ in range(ROUNDS):
            for tokens in TOKENS:
                found[tokens].append(_round(fleet, prompts.fresh(tokens)))
        loads = pairs.until_known(
            pairs.in_turns(lambda saves: _load(fleet, prompts, saves)),
            until=time.monotonic() + SECONDS,
            watched={"requests_per_s": no_hits.WIDTH},
        )
    lengths = [_of_length(tokens, rounds) for tokens, rounds in found.items()]
    return lengths, {"pairs": len(loads), "compared": pairs.summary(loads)}


def _load(fleet: Fleet, prompts: Prompts, saves: bool) -> pairs.Run:
    """Fresh prompts, of which all chunks are saved meanwhile, or none."""
    engine, saved = fleet[_OWN], _saved(fleet)
    engine.call("collective_rpc", "benchmark_saving", args=(saves,))
    before = engine.cpu_seconds()
    load = no_hits.serve(engine, prompts)
    chunks = no_hits.REQUESTS * whole_chunks(no_hits.PROMPT_TOKENS)
    if saves and not until(lambda: _saved(fleet) >= saved + chunks, _PATIENCE):
        raise TimeoutError("not all was saved")
    time.sleep(SETTLE)  # until all is stored and published
    return no_hits.of_load(load, engine.cpu_seconds() - before)


def _round(fleet: Fleet, prompt: list[int]) -> tuple[float, float, float]:
    """Seconds to first token: computed, from vLLM's own cache, and from the disk."""
    engine, chunks = fleet[_OWN], whole_chunks(len(prompt))
    saved = _saved(fleet)
    cold, local = engine.timed(prompt), engine.timed(prompt)
    if not until(lambda: _saved(fleet) >= saved + chunks, _PATIENCE):
        raise TimeoutError("the prompt was not saved")
    engine.call("forget")
    fleet.flush()
    found = engine.timed(prompt)
    if found.cached != chunks * CHUNK:
        raise RuntimeError(f"{found.cached} of {chunks * CHUNK} tokens came from the disk")
    return cold.first, local.first, found.first


def _saved(fleet: Fleet) -> int:
    chunks: int = fleet.stats(_OWN)["disk"]["rows"]
    return chunks


def _of_length(tokens: int, rounds: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    cold, local, disk = (list(column) for column in zip(*rounds, strict=True))
    return {
        "tokens": tokens,
        **{
            f"{name}_ms": figure([1e3 * seconds for seconds in found])
            for name, found in (("cold", cold), ("local", local), ("disk", disk))
        },
        "cold/disk": ratio(cold, disk),
        "disk/local": ratio(disk, local),
    }


# -- on paper ---------------------------------------------------------------------------------


def _replay(name: str) -> dict[str, Any]:
    trace = traces.load(name)[:REQUESTS]
    chunks = len({key for request in trace for key in request.keys})
    engine = Engine(slots=int(chunks * POOL_SHARE / REPLICAS))
    requests = traces.spread(trace, LOAD * REPLICAS * engine.prefill, pieces=1)
    disk = engine._replace(disk=DISK_TOKENS)
    engines = {
        "without": engine,
        "reused": disk,
        "all": disk._replace(saves_all=True),
        "large pools": engine._replace(slots=chunks),
    }
    runs = {
        case: summary(Simulator(REPLICAS, EarliestFinish, engine=each).run(requests))
        for case, each in engines.items()
    }
    return {
        "trace": name,
        "requests": len(requests),
        "slots": engine.slots,
        "runs": runs,
        **{
            f"{case}/without": runs[case]["first_mean_s"] / runs["without"]["first_mean_s"]
            for case in runs
        },
        "gain": _gained_s(runs, "all") / _gained_s(runs, "large pools"),
    }


def _gained_s(runs: Mapping[str, Mapping[str, float]], case: str) -> float:
    return runs["without"]["first_mean_s"] - runs[case]["first_mean_s"]


def markdown(part: Mapping[str, Any]) -> str:
    rows = part["rows"]
    rates = table(
        ("", "GB/s", "vLLM's file tier", "÷ vLLM's"),
        (
            (
                what,
                shown(rows["gb_s"][what]),
                shown(rows["gb_s"][f"{what} files"]),
                shown(rows[f"{what}/files"]),
            )
            for what in ("write", "read")
        ),
    )
    lengths = table(
        ("tokens", "computed, ms", "own prefix cache, ms", "disk, ms", "computed ÷ disk"),
        (
            (
                f"{row['tokens']:,}",
                *(shown(row[f"{name}_ms"], 0) for name in ("cold", "local", "disk")),
                shown(row["cold/disk"], 1),
            )
            for row in part["lengths"]
        ),
    )
    replays = table(
        ("trace", "disk", "mean, s", "÷ without", "computed", "read", "saved"),
        (
            (
                replay["trace"],
                case,
                f"{run['first_mean_s']:.2f}",
                f"{replay[f'{case}/without']:.2f}",
                *(f"{run[name]:.0%}" for name in ("computed", "read", "saved")),
            )
            for replay in part["replays"]
            for case, run in replay["runs"].items()
        ),
    )
    loads = no_hits.loads_table(part["writing"], "saving all", "nothing")
    return f"{rates}\n\n{lengths}\n\n{loads}\n\n{replays}"
