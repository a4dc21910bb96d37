"""Part `stampede`: one long unknown prompt reaches several replicas at once.

There are three vLLM engines. In turns, a fresh prompt goes to one of them alone, to two, and to all
three at the same moment. Ideally the cluster computes it once, and no request waits longer than
computing alone takes. On one machine that gets slower the more engines compute at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.engines import Asked, Fleet, Kind, Prompts
from benchmarks.figures import figure, shown
from benchmarks.figures import ratio as ratio_of

TITLE = "Stampede"
TOKENS = 4000
SIZES = (3,)
ROUNDS = 5
QUICK = {"TOKENS": 2000, "SIZES": (2,)}
_ALONE = 1


class Rush(NamedTuple):
    """One prompt, sent to several engines at once: times to first token, and tokens computed."""

    first: tuple[float, ...]  # seconds
    computed: int  # prompt tokens, over all engines

    @classmethod
    def of(cls, asked: Sequence[Asked], tokens: int) -> Rush:
        computed = sum(tokens - one.cached for one in asked)
        return cls(tuple(one.first for one in asked), computed)


def measure() -> dict[str, Any]:
    names = [f"engine-{number}" for number in range(max(SIZES))]
    prompts = Prompts()
    with Fleet(dict.fromkeys(names, Kind())) as fleet:
        for name in names:  # warm up, and make the links
            _rush(fleet, [name], prompts.fresh(TOKENS // 4))
            _rush(fleet, names, prompts.fresh(TOKENS // 4))
        rushes: dict[int, list[Rush]] = {size: [] for size in (_ALONE, *SIZES)}
        for turn in range(ROUNDS):
            for size in rushes:
                chosen = [names[(turn + number) % len(names)] for number in range(size)]
                rushes[size].append(_rush(fleet, chosen, prompts.fresh(TOKENS)))
    return summary(TOKENS, rushes)


def _rush(fleet: Fleet, names: Sequence[str], prompt: list[int]) -> Rush:
    for name in names:
        fleet[name].begin("ask", prompt, 1)
    asked = [fleet[name].finish() for name in names]
    fleet.flush()
    return Rush.of(asked, len(prompt))


def summary(tokens: int, rushes: Mapping[int, Sequence[Rush]]) -> dict[str, Any]:
    alone = [rush.first[0] for rush in rushes[_ALONE]]
    sizes = []
    for size, found in rushes.items():
        if size == _ALONE:
            continue
        slowest = [max(rush.first) for rush in found]
        sizes.append(
            {
                "replicas": size,
                "computed": figure([rush.computed / tokens for rush in found]),
                "first_ms": figure([min(rush.first) * 1e3 for rush in found]),
                "slowest_ms": figure([seconds * 1e3 for seconds in slowest]),
                "slowest/alone": ratio_of(slowest, alone),
            }
        )
    return {"tokens": tokens, "alone_ms": figure([one * 1e3 for one in alone]), "sizes": sizes}


def markdown(part: dict[str, Any]) -> str:
    lines = [
        f"The same unknown prompt of {part['tokens']} tokens, given to several vLLM engines at "
        f"once, in turns with a single engine, which takes {shown(part['alone_ms'], 0)} ms. "
        "The engines share this machine's cores, so an engine "
        "that computes beside others takes longer than alone, whether or not anything is shared. "
        "Computed: prompt tokens computed in the cluster ÷ tokens of the prompt. Medians, with "
        "minimum and maximum in brackets.",
        "",
        "| replicas | computed | first answer, ms | last answer, ms | last ÷ alone |",
        "|---|---|---|---|---|",
    ]
    for row in part["sizes"]:
        cells = (
            str(row["replicas"]),
            shown(row["computed"]),
            shown(row["first_ms"], 0),
            shown(row["slowest_ms"], 0),
            shown(row["slowest/alone"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(part: dict[str, Any], axes: Any) -> None:
    names = ["alone", *(f"{row['replicas']} at once" for row in part["sizes"])]
    values = [part["alone_ms"], *(row["slowest_ms"] for row in part["sizes"])]
    middle = [value["median"] for value in values]
    below = [value["median"] - value["least"] for value in values]
    above = [value["most"] - value["median"] for value in values]
    axes.bar(names, middle, yerr=[below, above], capsize=3)
    axes.set_ylabel(f"ms to the last one's first token, {part['tokens']} tokens")
