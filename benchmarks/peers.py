"""Part `peers`: other ways to a prefix's KV cache, on the same kind of prompts as part `hit`.

One vLLM engine without a connector computes each prompt and then has it in its own prefix cache,
which is the ideal. One engine with vLLM's example connector stores the prompt in a folder and reads
it back, with its own prefix cache switched off; another engine with that folder would do the same.
One of our engines fetches the prompt from another. All compute a prompt in one step, because the
example connector stores only the first step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines import (
    ALWAYS_FETCH,
    CHUNK,
    DTYPE,
    EngineError,
    Fleet,
    Kind,
    Prompts,
    whole_chunks,
)
from benchmarks.figures import figure, ratio, shown

TITLE = "Peers"
LENGTHS = (2000,)
ROUNDS = 5
QUICK = {"LENGTHS": (1000,)}
EXAMPLE = "ExampleConnector"
_PLAIN, _EXAMPLE, _DONOR, _CONSUMER = "plain", "example", "donor", "consumer"
_STEP_TOKENS = 8192
_MEMORY = Path("/dev/shm")


class Sample(NamedTuple):
    """Seconds to first token; None where the example did not run or reused less than we do."""

    computed: float
    local: float
    ours_cold: float
    ours: float
    example_cold: float | None
    example: float | None


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="xavier-benchmark-") as folder:
        connector = {
            "kv_connector": EXAMPLE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        kinds = {
            _PLAIN: Kind(None),
            _EXAMPLE: Kind(None, {"kv_transfer_config": connector, "enable_prefix_caching": False}),
            _DONOR: Kind(),
            _CONSUMER: Kind(options=ALWAYS_FETCH),
        }
        with Fleet(kinds, may_fail=[_EXAMPLE], step_tokens=_STEP_TOKENS) as fleet:
            samples = _samples(fleet)
            failed = dict(fleet.failed)
    return {"failed": failed, "lengths": [summary(n, found) for n, found in samples.items()]}


def _samples(fleet: Fleet) -> dict[int, list[Sample]]:
    prompts = Prompts()
    for length in LENGTHS[:1] * 2:  # warm up, and make the links
        _sample(fleet, prompts.fresh(length))
    found: dict[int, list[Sample]] = {tokens: [] for tokens in LENGTHS}
    for _ in range(ROUNDS):
        for tokens in LENGTHS:
            found[tokens].append(_sample(fleet, prompts.fresh(tokens)))
    return found


def _sample(fleet: Fleet, prompt: list[int]) -> Sample:
    reused = whole_chunks(len(prompt)) * CHUNK
    plain = fleet[_PLAIN]
    computed, local = plain.ask(prompt).first, plain.ask(prompt).first
    ours_cold = fleet[_DONOR].ask(prompt).first
    fleet.wait_published(_DONOR, reused // CHUNK)
    ours = fleet[_CONSUMER].ask(prompt)
    fleet.flush()
    if ours.cached != reused:
        raise RuntimeError(f"{ours.cached} of {reused} tokens came from the peer")
    example_cold, example = _of_the_example(fleet, prompt, reused)
    return Sample(computed, local, ours_cold, ours.first, example_cold, example)


def _of_the_example(
    fleet: Fleet, prompt: list[int], reused: int
) -> tuple[float | None, float | None]:
    """Seconds. An example that fails is not asked again; `fleet.failed` has the reason."""
    if _EXAMPLE in fleet.failed:
        return None, None
    engine = fleet[_EXAMPLE]
    try:
        cold, again = engine.ask(prompt), engine.ask(prompt)
    except EngineError as error:
        fleet.failed[_EXAMPLE] = str(error)
        return None, None
    if again.cached < reused:
        fleet.failed[_EXAMPLE] = f"it reused {again.cached} of {reused} tokens"
        return None, None
    return cold.first, again.first


def summary(tokens: int, samples: Sequence[Sample]) -> dict[str, Any]:
    """Times in ms. A way that lacks samples is left out."""
    columns: Mapping[str, Sequence[float | None]] = {
        name: [getattr(sample, name) for sample in samples] for name in Sample._fields
    }
    whole = {
        name: [value for value in column if value is not None]
        for name, column in columns.items()
        if None not in column
    }
    return {
        "tokens": tokens,
        "ways": {
            name: {
                "ms": figure([seconds * 1e3 for seconds in column]),
                "/computed": ratio(column, whole["computed"]),
                "/local": ratio(column, whole["local"]),
            }
            for name, column in whole.items()
        },
    }


_WAYS = {
    "computed": "vLLM alone, computed",
    "local": "vLLM alone, its own prefix cache (the ideal)",
    "ours_cold": "with Xavier, computed and stored",
    "ours": "with Xavier, from a peer",
    "example_cold": "vLLM's example connector, computed and stored",
    "example": "vLLM's example connector, from a folder in shared memory",
}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"Time to first token at the engine ({DTYPE}; each engine computes {_STEP_TOKENS} tokens "
        "at once), the same prompt by all ways in turn. Medians, with minimum and maximum in "
        "brackets.",
        "",
        "| tokens | way | ms | ÷ computed by vLLM alone | ÷ the ideal |",
        "|---|---|---|---|---|",
    ]
    for row in part["lengths"]:
        for name, words in _WAYS.items():
            if name in row["ways"]:
                way = row["ways"][name]
                cells = (shown(way["ms"], 1), shown(way["/computed"]), shown(way["/local"]))
                lines.append(f"| {row['tokens']} | {words} | {' | '.join(cells)} |")
    for why in part["failed"].values():
        lines += ["", f"vLLM's example connector could not be measured here: {why}."]
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = [name for name in _WAYS if all(name in row["ways"] for row in part["lengths"])]
    width = 0.8 / len(part["lengths"])
    for number, row in enumerate(part["lengths"]):
        places = [place + number * width for place in range(len(names))]
        values = [row["ways"][name]["ms"] for name in names]
        middle = [value["median"] for value in values]
        below = [value["median"] - value["least"] for value in values]
        above = [value["most"] - value["median"] for value in values]
        label = f"{row['tokens']} tokens"
        axes.barh(places, middle, width, xerr=[below, above], capsize=3, label=label)
    axes.set_yticks(range(len(names)), [_WAYS[name] for name in names])
    axes.set_xscale("log")
    axes.set_xlabel("ms to the first token")
    axes.legend()
