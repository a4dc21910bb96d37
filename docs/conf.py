"""How the pages become a site: `make docs`, which takes every warning for an error."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree, wherever another one is installed

from xinference_xavier import __version__  # noqa: E402  # found only from here on
from xinference_xavier.serving.metrics import FAMILIES, PREFIX  # noqa: E402


def metrics_table() -> str:
    """All metrics, for the page about monitoring."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        figure = family.figure
        rows.append(f"| `{PREFIX}{family.name}` | {figure.kind} | {labels} | {figure.text} |")
    return "\n".join(rows)


def explain_fields(*event: Any) -> None:
    """The description of a metric explains its field, too."""
    *_, thing, _, lines = event
    if is_dataclass(thing):
        own = [each for each in fields(thing) if each.name in get_annotations(thing)]
        figures = {each.name: each.metadata.get("figure") for each in own}
        lines += [f"* ``{name}``: {it.text}" for name, it in figures.items() if it] + [""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", explain_fields)


project = "xinference-xavier"
copyright = "the authors of xinference-xavier, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["deflist", "substitution"]
myst_substitutions = {"metrics": metrics_table()}
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False
# What belongs to Python is not on this site; all else that is named must be.
nitpick_ignore_regex = [("py:class", r"collections\.abc\..*|'?dict\[str")]

highlight_language = "text"
smartquotes = False  # commands are copied from here
html_theme = "pydata_sphinx_theme"
html_title = "xinference-xavier"
templates_path = ["_templates"]
exclude_patterns = ["upstream"]  # for maintainers, in the repository
html_static_path = ["_static"]
html_css_files = ["drawings.css"]
html_show_sourcelink = False
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "navbar_center": [],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
