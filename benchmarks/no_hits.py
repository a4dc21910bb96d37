"""Part `no_hits`: what sharing costs when there is nothing to share.

One vLLM engine serves the same kind of load in turns, with its connector and with the connector
taken out: prompts that share nothing, several at once, with answers of several lengths, so that
some begin while others go on. With its connector the engine stores everything that it computes, as
it would in service, and evicts the oldest chunks.

It is one engine because two of the same kind differ by a hundredth or two for as long as they live.
Without its connector an engine is as fast as one that never had one. Loads are short because the
machine's speed changes by the minute. Pairs of loads are made until throughput is known to a
hundredth, or until time is up.

Then single steps that answer a token to each request are compared, in turns within one load. So
close together, the machine's speed differs less, and a minute is enough to know to a hundredth how
many steps a second the connector leaves.
"""

import time
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any

from benchmarks import pairs
from benchmarks.figures import figure, shown, table
from benchmarks.steps import Connector, Step
from tests.harness.engines import SETTLE, Engine, Fleet, Kind, Load, Prompts

PROMPT_TOKENS = 500
ANSWER_TOKENS = (20, 44, 28, 36)
"""Output tokens of the requests, in turn."""
REQUESTS = 8
"""Requests per load."""
AT_ONCE = 4
SECONDS = 40.0
"""Seconds for all pairs."""
WIDTH = 0.01
STEPS = 120
"""Output tokens of each request of a load whose steps are compared."""
STEP_LOADS = 20
QUICK = {"SECONDS": 0.0, "STEP_LOADS": 5}
_NAME = "engine"
_KIND = Kind(arguments={"worker_extension_cls": "benchmarks.step_times.StepTimes"})


def measure() -> dict[str, Any]:
    with Fleet({_NAME: _KIND}) as fleet:
        loads = _Loads(fleet[_NAME])
        for on in (True, False):  # whatever is made at the first request
            loads.serve(on)
        found = pairs.until_known(
            pairs.in_turns(loads.serve),
            until=time.monotonic() + SECONDS,
            watched={"requests_per_s": WIDTH},
        )
        steps = [loads.steps() for _ in range(STEP_LOADS)]
    return {"pairs": len(found), "compared": pairs.summary(found), "steps": of_steps(steps)}


class _Loads:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompts = Prompts()

    def serve(self, on: bool) -> pairs.Run:
        self._turn(Connector.IN if on else Connector.OUT)
        before = self._engine.cpu_seconds()
        load = serve(self._engine, self._prompts)
        time.sleep(SETTLE)  # until all is stored and published
        return of_load(load, self._engine.cpu_seconds() - before)

    def steps(self) -> list[Step]:
        """The steps that answer a token to each of a load's requests."""
        self._turn(Connector.IN_TURNS)
        self._engine.call("collective_rpc", "benchmark_steps")
        serve(self._engine, self._prompts, [STEPS] * AT_ONCE)
        (found,) = self._engine.call("collective_rpc", "benchmark_steps")
        steps = [Step(*step) for step in found]
        return [step for step in steps if step.requests == step.tokens == AT_ONCE]

    def _turn(self, state: Connector) -> None:
        time.sleep(SETTLE)
        self._engine.call("collective_rpc", "benchmark_connector", args=(state.value,))


def serve(
    engine: Engine,
    prompts: Prompts,
    answers: Sequence[int] = tuple(islice(cycle(ANSWER_TOKENS), REQUESTS)),
) -> Load:
    """A load of fresh prompts, one for each of the `answers`, in output tokens."""
    given = [prompts.fresh(PROMPT_TOKENS) for _ in answers]
    load: Load = engine.call("serve", given, answers, AT_ONCE)
    return load


def of_load(load: Load, cpu_seconds: float) -> dict[str, float]:
    """The figures of a load. Raises RuntimeError if a prompt was not computed anew."""
    if any(one.cached for one in load.asked):
        raise RuntimeError("a fresh prompt was known")
    first = [one.first for one in load.asked]
    gaps = [gap for one in load.asked for gap in one.gaps]
    return {
        "requests_per_s": len(load.asked) / load.seconds,
        "first_p50_s": _percentile(first, 50),
        "first_p99_s": _percentile(first, 99),
        "gap_p50_s": _percentile(gaps, 50),
        "gap_p99_s": _percentile(gaps, 99),
        "cpu_s": cpu_seconds / (len(load.asked) * PROMPT_TOKENS) * 1000,
    }


def _percentile(samples: list[float], percent: int) -> float:
    return quantiles(samples, n=100, method="inclusive")[percent - 1]


def of_steps(loads: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Milliseconds of a step, load by load: the medians of its steps with the connector, without,
    and their difference; and the ratio of the steps a second."""
    on, off = (
        [median(step.seconds * 1e3 for step in load if step.connector == with_it) for load in loads]
        for with_it in (True, False)
    )
    return {
        "counted": sum(map(len, loads)),
        "on_ms": figure(on),
        "off_ms": figure(off),
        "cost_ms": figure([one - other for one, other in zip(on, off, strict=True)]),
        "per_s": pairs.interval(off, on)._asdict(),
    }


_LINES = {
    "requests_per_s": ("requests per second", 1.0, 2),
    "first_p50_s": ("time to first token, median, ms", 1e3, 1),
    "first_p99_s": ("time to first token, p99, ms", 1e3, 1),
    "gap_p50_s": ("time between tokens, median, ms", 1e3, 2),
    "gap_p99_s": ("time between tokens, p99, ms", 1e3, 2),
    "cpu_s": ("CPU ms per 1,000 prompt tokens, all processes", 1e3, 1),
}


def markdown(part: dict[str, Any]) -> str:
    """Ratios are geometric means over the pairs, with 95 % confidence intervals."""
    loads = loads_table(part, "with Xavier", "without")
    steps = part["steps"]
    per_s = steps["per_s"]
    cells = [shown(steps[name], 3) for name in ("on_ms", "off_ms", "cost_ms")]
    cells.append(f"{per_s['ratio']:.3f} ({per_s['low']:.3f}–{per_s['high']:.3f})")
    columns = (f"{steps['counted']} steps", "with Xavier", "without", "costs", "steps a second")
    return f"{loads}\n\n{table(columns, [['ms', *cells]])}"


def loads_table(part: dict[str, Any], *sides: str) -> str:
    """Both sides of the pairs of loads, and their ratios."""
    return table(
        (f"{part['pairs']} pairs of loads", *sides, "ratio"),
        (
            (title, *pairs.cells(part["compared"][name], scale, digits))
            for name, (title, scale, digits) in _LINES.items()
        ),
    )
