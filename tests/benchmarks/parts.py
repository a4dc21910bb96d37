"""What every part's page needs to be: tables whose rows are whole, and a plot that can be drawn.
Its bars find what they look for."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from benchmarks import bars


def shown(module: Any, part: dict[str, Any]) -> str:
    """The part's text, after its plot was drawn."""
    figure = Figure()
    module.plot(part, figure.subplots())
    figure.draw_without_rendering()
    text: str = bars.markdown(bars.judge(module.__name__.rpartition(".")[2], part))
    text += module.markdown(part)
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            assert len({line.count("|") for line in lines}) == 1
    return text
