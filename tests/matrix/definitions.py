"""`python -m tests.matrix.definitions`: which vLLM a launch with `enable_xavier` gets where
xinference's definition of the model names one.

Asks PyPI, downloads nothing, and writes the table of `docs/support.md`.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import xinference.model.llm
from packaging.requirements import InvalidRequirement, Requirement
from xinference.model.llm.llm_family import BUILTIN_LLM_FAMILIES

from tests.matrix.environments import ROOT
from xinference_xavier.serving import seam
from xinference_xavier.serving.launch import environment

PAGE = ROOT / "docs" / "support.md"
LINE = "|---|---|---|---|\n"
ROW = re.compile(r"^\| (\S+) \| `(.+?)` \| (.+) \| (.+) \|\n", re.MULTILINE)
UNKNOWN = "not on PyPI"


class Definition(NamedTuple):
    name: str
    vllm: str
    """What it asks for."""
    launch: dict[str, Any]


def definitions() -> Iterator[Definition]:
    """The definitions that name a vLLM, in the order of their names."""
    if not BUILTIN_LLM_FAMILIES:
        xinference.model.llm._install()
    for family in sorted(BUILTIN_LLM_FAMILIES, key=lambda family: family.model_name.lower()):
        settings = family.virtualenv
        words = [] if settings is None else settings.packages
        named = [each for each in map(_specifier, words) if each]
        if named:
            name = family.model_name
            launch = {"model_name": name, "model_engine": "vLLM", "enable_virtual_env": True}
            yield Definition(name, named[-1], launch)


def _specifier(package: str) -> str:
    try:
        requirement = Requirement(package.split(";", 1)[0])
    except InvalidRequirement:
        return ""
    return str(requirement.specifier) if requirement.name == "vllm" else ""


def row(definition: Definition) -> str:
    found = environment.environment(definition.launch)
    planned = seam.planned_packages(definition.launch, found.packages)
    resolution = environment.resolve(planned, {})
    cells = [resolution.versions.get(name, "–") for name in ("vllm", "transformers")]
    if resolution.conflict:
        cells[0] = UNKNOWN
    return f"| {definition.name} | `{definition.vllm}` | {' | '.join(cells)} |\n"


def main() -> None:
    environment._installed = lambda: None  # on any machine
    text = PAGE.read_text()
    start = text.rindex(LINE) + len(LINE)
    end = max([start, *(found.end() for found in ROW.finditer(text))])
    rows = [row(each) for each in definitions()]
    PAGE.write_text(text[:start] + "".join(rows) + text[end:])
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} definitions")


if __name__ == "__main__":
    main()
