"""`python -m benchmarks.gpu [PART …] [--graphs] [--brief]`: what sharing gains on one NVIDIA card.

Two engines with the shape of Qwen2.5-7B share the card; vLLM makes the same random weights for
both. The parts are `copies` (between the card and a pool), `mappings` (whether the card may read
a pool of another process), `hits` (time to first token) and `no_hits` (what sharing costs if
nothing hits). With `--graphs` the engines use CUDA graphs, otherwise they are eager. `--brief`
leaves out the longest prompts and some rounds. The program writes `build/gpu-report.json` and the
end of `docs/gpu.md`; both keep the results of parts that are not measured.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import figure, ratio, shown, table
from tests.harness.engines import CHUNK, Fleet, Kind, Prompts, whole_chunks
from xinference_xavier.pool.region import ROW_ALIGNMENT, populate
from xinference_xavier.pool.window import Window

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "build" / "gpu-report.json"
PAGE = ROOT / "docs" / "gpu.md"
HEADING = "## What was measured\n"
TRANSPORTS = {"shared_memory": "shared memory", "gloo": "Gloo"}
LAYERS = 28
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 65_536,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "dtype": "bfloat16",
}
CONTEXT = 50_000
STEP_TOKENS = 8192
POOL_BYTES = 8 << 30
KV_BYTES = 12 << 30
BLOCK = 16
PAGE_BYTES = 32 << 10
"""The keys and values of a block in one layer."""
COPIED_CHUNKS = 64
MAPPED_BYTES = 1 << 30
COPIES = 7
PINNED_BYTES = 16 << 30
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, AT_ONCE = 64, 1000, 128, 32
"""A round without hits."""


class Scope(NamedTuple):
    """How engines run, and how much is measured."""

    graphs: bool
    lengths: Sequence[int] = (2_000, 9_000, 32_000, 48_000)
    """Tokens of prompts."""
    rounds: int = 5


BRIEF_LENGTHS, BRIEF_ROUNDS = (2_000, 9_000, 32_000), 3


class Sample(NamedTuple):
    """Seconds to first token, and how much of the reusable prefix the remote hit reused."""

    cold: float
    remote: float
    local: float
    pool: float
    reused: float


# -- between card and pool --------------------------------------------------------------------


def copies() -> dict[str, Any]:
    """vLLM's copies to and from a pool's rows, and one plain copy of as much pinned memory."""
    import torch
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from xinference_xavier.engine.worker_side import DeviceRegion, device_worker
    from xinference_xavier.pool.region import Region

    per_chunk = CHUNK // BLOCK
    blocks = COPIED_CHUNKS * per_chunk
    row_bytes = per_chunk * LAYERS * PAGE_BYTES
    size = COPIED_CHUNKS * row_bytes
    tensors = [
        CanonicalKVCacheTensor(
            torch.zeros(blocks, PAGE_BYTES, dtype=torch.int8, device="cuda"), PAGE_BYTES
        )
        for _ in range(LAYERS)
    ]
    refs = [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]]
    caches = CanonicalKVCaches(tensors, refs)
    pages = GPULoadStoreSpec([*range(blocks)], group_sizes=[blocks], block_indices=[0])
    rows = CPULoadStoreSpec([*range(COPIED_CHUNKS)])

    def worker_over(region: Region) -> Any:
        return device_worker(caches, per_chunk, DeviceRegion(Window(region), 0, [row_bytes]))

    region = Region.create(COPIED_CHUNKS, row_bytes)
    populate(region.array)
    worker = worker_over(region)
    pinned = torch.empty(size, dtype=torch.int8, pin_memory=True)
    plain = torch.empty(size, dtype=torch.int8, device="cuda")
    ways = {
        "store": lambda: worker.submit_store(1, pages, rows),
        "plain store": lambda: pinned.copy_(plain, non_blocking=True),
        "load": lambda: worker.submit_load(1, rows, pages),
        "plain load": lambda: plain.copy_(pinned, non_blocking=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(COPIES + 1):  # the first one warms up
        for name, copy in ways.items():
            seconds = _seconds_of(copy)
            worker.get_finished()
            if turn:
                taken[name].append(seconds)
    worker.shutdown()

    began = time.perf_counter()
    large = Region.create(PINNED_BYTES // row_bytes, row_bytes)
    populate(large.array)
    populated = time.perf_counter()
    worker = worker_over(large)
    pinning = time.perf_counter()
    worker.shutdown()
    return {
        "bytes": size,
        **{
            f"{name}_gb_per_s": figure([size / seconds / 1e9 for seconds in those])
            for name, those in taken.items()
        },
        "store/plain": ratio(taken["plain store"], taken["store"]),
        "load/plain": ratio(taken["plain load"], taken["load"]),
        "pinned_bytes": large.size,
        "populate_s": populated - began,
        "pin_s": pinning - populated,
        "unpin_s": time.perf_counter() - pinning,
    }


def _copies_lines(part: dict[str, Any]) -> list[str]:
    cells = ("{}_gb_per_s", "plain {}_gb_per_s", "{}/plain")
    return [
        f"{part['bytes'] / (1 << 20):.0f} MiB of a KV cache in {COPIED_CHUNKS} rows of a pool, and "
        f"as much in one piece of plain pinned memory, {COPIES} times in turn.",
        "",
        table(
            ("", "GB/s", "plain copy, GB/s", "pool ÷ plain"),
            (
                [way, *(shown(part[cell.format(way)]) for cell in cells)]
                for way in ("store", "load")
            ),
        ),
        "",
        f"Touching {part['pinned_bytes'] / (1 << 30):.0f} GiB for the first time took "
        f"{part['populate_s']:.1f} s, pinning them {part['pin_s']:.1f} s, giving them back "
        f"{part['unpin_s']:.1f} s (once).",
    ]


def _seconds_of(copy: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    copy()
    torch.cuda.synchronize()
    return time.perf_counter() - began


# -- a pool of another process ----------------------------------------------------------------


def mappings() -> dict[str, Any]:
    """What the driver says if another process registers its own mapping of a pool, and how fast the
    card then copies from and to it. If it does, a hit on the same host needs no copy in between."""
    from xinference_xavier.pool.region import Region, serve_region

    region = Region.create(MAPPED_BYTES // ROW_ALIGNMENT, ROW_ALIGNMENT)
    populate(region.array)
    region.array.reshape(-1)[:] = 7
    name = f"xavier-mappings-{os.getpid()}"
    server = serve_region(region, name)
    try:
        context = multiprocessing.get_context("spawn")
        # A process for each: after an error the driver refuses all that follows.
        with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as others:
            asked = {way: others.submit(_register, name, way) for way in _WAYS}
            found = {way: each.result(timeout=60.0) for way, each in asked.items()}
    finally:
        server.close()
        region.close()
    return {"bytes": MAPPED_BYTES, "ways": found}


_WAYS = {"writable": (mmap.PROT_READ | mmap.PROT_WRITE, 0), "read-only": (mmap.PROT_READ, 8)}
"""Protection of the mapping and `cudaHostRegister`'s flags; 8 is `cudaHostRegisterReadOnly`."""


def _register(name: str, way: str) -> dict[str, Any]:
    """What the driver says in the other process, or its error."""
    from xinference_xavier.pool.region import receive_region

    protection, flags = _WAYS[way]
    region = receive_region(name, 10.0)
    try:
        with mmap.mmap(region.fd, region.size, mmap.MAP_SHARED, protection) as memory:
            return _copies_with(memory, flags, writable=bool(protection & mmap.PROT_WRITE))
    except RuntimeError as error:  # torch's for the driver's
        return {"register": str(error).splitlines()[0], "is_pinned": False}
    finally:
        region.close()


def _copies_with(memory: mmap.mmap, flags: int, *, writable: bool) -> dict[str, Any]:
    import numpy
    import torch

    host = torch.from_numpy(numpy.frombuffer(memory, numpy.int8))
    card = torch.empty_like(host, device="cuda")  # and the driver is there
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
    status = int(driver.cudaHostRegister(host.data_ptr(), len(memory), flags))
    found: dict[str, Any] = {"register": status, "is_pinned": host.is_pinned()}
    if status != 0:
        return found
    try:
        found["load_gb_per_s"] = _speed(lambda: card.copy_(host, non_blocking=True))
        found["read_right"] = bool((card == 7).all())
        if writable:
            found["store_gb_per_s"] = _speed(lambda: host.copy_(card, non_blocking=True))
    finally:
        driver.cudaHostUnregister(host.data_ptr())
    return found


def _speed(copy: Callable[[], object]) -> dict[str, float]:
    taken = [_seconds_of(copy) for _ in range(COPIES + 1)]
    return figure([MAPPED_BYTES / seconds / 1e9 for seconds in taken[1:]])  # the first warms up


def _mappings_lines(part: dict[str, Any]) -> list[str]:
    columns = ["mapping", "cudaHostRegister", "pinned"]
    columns += ["card reads, GB/s", "right", "card writes, GB/s"]
    return [
        f"Another process maps a pool of {part['bytes'] / (1 << 20):.0f} MiB and registers its "
        f"mapping with the driver; {COPIES} copies each.",
        "",
        table(columns, ([way, *_mapping_cells(found)] for way, found in part["ways"].items())),
    ]


def _mapping_cells(found: dict[str, Any]) -> Iterator[str]:
    for name in ("register", "is_pinned", "load_gb_per_s", "read_right", "store_gb_per_s"):
        value = found.get(name, "–")
        yield shown(value) if isinstance(value, dict) else str(value)


# -- with engines -----------------------------------------------------------------------------


def hits(scope: Scope) -> dict[str, Any]:
    """Unknown prompts, one after the other, over each transport."""
    return {
        "rounds": scope.rounds,
        "transports": {name: _hits_over(name, scope) for name in TRANSPORTS},
    }


def _hits_over(transport: str, scope: Scope) -> dict[str, Any]:
    prompts = Prompts()
    found: dict[int, list[Sample]] = {tokens: [] for tokens in scope.lengths}
    kinds = {name: _kind(transport, scope.graphs) for name in ("donor", "consumer")}
    with _fleet(kinds) as fleet:
        for tokens in scope.lengths:  # warm up, and make the links
            _ask_everybody(fleet, prompts.fresh(tokens))
        for _ in range(scope.rounds):
            for tokens in scope.lengths:
                found[tokens].append(_ask_everybody(fleet, prompts.fresh(tokens)))
        stats = {name: replica["stats"] for name, replica in fleet.replicas().items()}
    longest = max(scope.lengths)
    return {
        "lengths": [_row(tokens, samples) for tokens, samples in found.items()],
        "used": stats["consumer"]["fetches"]["by_transport"],
        "fetch_decisions": stats["consumer"]["fetch_decisions"],
        "believed_tokens_per_s": stats["donor"]["prefill_tokens_per_s"],
        "true_tokens_per_s": figure([longest / sample.cold for sample in found[longest]]),
    }


def _ask_everybody(fleet: Fleet, prompt: list[int]) -> Sample:
    chunks = whole_chunks(len(prompt))
    donor, consumer = fleet["donor"], fleet["consumer"]
    cold = donor.timed(prompt)
    fleet.wait_published("donor", chunks)
    remote, local = consumer.timed(prompt), consumer.timed(prompt)
    consumer.call("forget")
    pool = consumer.timed(prompt)
    fleet.flush()
    for engine in (donor, consumer):
        engine.call("forget")
    reused = remote.cached / (chunks * CHUNK)
    return Sample(cold.first, remote.first, local.first, pool.first, reused)


def _row(tokens: int, samples: Sequence[Sample]) -> dict[str, Any]:
    columns = dict(zip(Sample._fields, zip(*samples, strict=True), strict=True))
    milliseconds = {
        f"{name}_ms": figure([seconds * 1e3 for seconds in columns[name]])
        for name in ("cold", "remote", "local", "pool")
    }
    return {
        "tokens": tokens,
        **milliseconds,
        "cold/remote": ratio(columns["cold"], columns["remote"]),
        "remote/local": ratio(columns["remote"], columns["local"]),
        "reused": figure(columns["reused"]),
    }


def _hits_lines(part: dict[str, Any]) -> list[str]:
    columns = ["tokens", "transport", "cold", "local hit", "pool hit", "remote hit"]
    columns += ["cold ÷ remote", "remote ÷ local", "reused"]
    lines = [
        f"Time to first token at the engine, ms: medians, with minimum and maximum in brackets, of "
        f"{part['rounds']} prompts of each length. Reused is the part of the donor's chunks that a "
        "remote hit took from it; the engine decided this by its own measurements.",
        "",
        table(
            columns,
            (
                [
                    str(row["tokens"]),
                    TRANSPORTS[name],
                    *(shown(row[f"{way}_ms"], 0) for way in ("cold", "local", "pool", "remote")),
                    *(shown(row[of]) for of in ("cold/remote", "remote/local", "reused")),
                ]
                for name, found in part["transports"].items()
                for row in found["lengths"]
            ),
        ),
        "",
    ]
    for name, found in part["transports"].items():
        lines.append(
            f"- {TRANSPORTS[name]}: the donor estimated that it computes "
            f"{found['believed_tokens_per_s']:.0f} tokens per second; for the longest prompts it "
            f"computed {shown(found['true_tokens_per_s'], 0)}. The consumer's decisions: "
            f"{found['fetch_decisions']}; fetches: {found['used']}."
        )
    return lines


def no_hits(scope: Scope) -> dict[str, Any]:
    """Prompts that share nothing, in turn for an engine that shares and for one that does not."""
    prompts = Prompts()
    kinds = {name: _kind(way, scope.graphs) for name, way in (("sharing", "auto"), ("alone", None))}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    with _fleet(kinds) as fleet:
        for turn in range(scope.rounds + 1):  # the first one warms up
            for name in [*kinds][:: 1 if turn % 2 else -1]:
                asked = [prompts.fresh(PROMPT_TOKENS) for _ in range(PROMPTS)]
                load = fleet[name].call("serve", asked, [ANSWER_TOKENS] * PROMPTS, AT_ONCE)
                if turn:
                    rates[name].append(PROMPTS * ANSWER_TOKENS / load.seconds)
    return {
        "rounds": scope.rounds,
        **{f"{name}_tokens_per_s": figure(those) for name, those in rates.items()},
        "sharing/alone": ratio(rates["sharing"], rates["alone"]),
    }


def _no_hits_lines(part: dict[str, Any]) -> list[str]:
    return [
        f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens that share nothing, {AT_ONCE} at a time, "
        f"{ANSWER_TOKENS} output tokens each, {part['rounds']} times in turn: "
        f"{shown(part['sharing_tokens_per_s'], 0)} tokens per second with sharing, "
        f"{shown(part['alone_tokens_per_s'], 0)} without; {shown(part['sharing/alone'], 3)} ×.",
    ]


def _kind(transport: str | None, graphs: bool) -> Kind:
    arguments = {
        "load_format": "dummy",
        "enforce_eager": not graphs,
        "gpu_memory_utilization": 0.42,
        "kv_cache_memory_bytes": KV_BYTES,
        "num_gpu_blocks_override": None,
        "block_size": BLOCK,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": STEP_TOKENS,
    }
    return Kind(transport, arguments, {"pool_bytes": POOL_BYTES})


def _fleet(kinds: dict[str, Kind]) -> Fleet:
    folder = Path(tempfile.gettempdir(), "xavier-qwen2.5-7b-shape")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return Fleet(kinds, model=folder)


# -- the report -------------------------------------------------------------------------------


class Part(NamedTuple):
    title: str
    measure: Callable[[Scope], dict[str, Any]]
    lines: Callable[[dict[str, Any]], list[str]]
    has_engines: bool = True


PARTS = {
    "copies": Part(
        "Copies between card and pool", lambda _scope: copies(), _copies_lines, has_engines=False
    ),
    "mappings": Part(
        "A pool of another process",
        lambda _scope: mappings(),
        _mappings_lines,
        has_engines=False,
    ),
    "hits": Part("Hits", hits, _hits_lines),
    "no_hits": Part("Without hits", no_hits, _no_hits_lines),
}


def machine() -> dict[str, Any]:
    import torch
    import vllm

    return {
        "card": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def section(found: dict[str, Any]) -> str:
    part, of = PARTS[found["part"]], found["machine"]
    mode = f", {found['mode']}" if found["mode"] else ""
    return "\n".join(
        [
            f"### {part.title}{mode}",
            "",
            f"{found['measured']}, {found['took_s']:.0f} s; {of['card']}, vLLM {of['vllm']}, "
            f"torch {of['torch']}.",
            "",
            *part.lines(found),
            "",
        ]
    )


def main(names: Sequence[str], scope: Scope) -> None:
    if unknown := sorted(set(names) - set(PARTS)):
        sys.exit(f"unknown part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    for name in names or PARTS:
        mode = ("CUDA graphs" if scope.graphs else "eager") if PARTS[name].has_engines else ""
        print(f"[{name}] {mode} …", flush=True)
        began = time.monotonic()
        found = PARTS[name].measure(scope)
        key = f"{name} {mode}".strip()
        report[key] = {
            "part": name,
            "mode": mode,
            "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "took_s": time.monotonic() - began,
            "machine": machine(),
            **found,
        }
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps(report, indent=1) + "\n")
        write_page(report)
        print(section(report[key]), flush=True)
    print(f"{REPORT.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


def write_page(report: dict[str, Any]) -> None:
    head = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text("\n".join([head + HEADING, *map(section, report.values())]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs, not eager engines")
    parser.add_argument("--brief", action="store_true", help="fewer lengths and rounds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the engines too
    brief = (BRIEF_LENGTHS, BRIEF_ROUNDS) if options.brief else ()
    main(options.parts, Scope(options.graphs, *brief))
