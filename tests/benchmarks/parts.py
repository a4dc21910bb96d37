"""Every part's page has complete table rows and a plot that can be drawn. Its bars find their
values."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from matplotlib.figure import Figure

from benchmarks import bars


def shown(module: Any, part: dict[str, Any]) -> str:
    """The part's text, after drawing its plot."""
    figure = Figure()
    module.plot(part, figure.subplots())
    figure.draw_without_rendering()
    text: str = bars.markdown(bars.judge(module.__name__.rpartition(".")[2], part))
    text += module.markdown(part)
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            assert len({line.count("|") for line in lines}) == 1
    return text
