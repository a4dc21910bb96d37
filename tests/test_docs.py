"""The documentation agrees with the code, and the Chinese pages with the English ones, as far as
it can be compared. `make docs` checks links; other tests check options and monitoring."""

import re
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel

from xinference_xavier import errors
from xinference_xavier.serving.api import add_routes
from xinference_xavier.serving.bodies import Change, PrefixBody, PrefixTerms, Question, Weights
from xinference_xavier.serving.prefix_routes import add_prefix_routes

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
INDEX = TESTS / "README.md"
FILE = re.compile(r"(?:\w+/)*test_\w+\.py")


def test_every_test_that_the_index_names_exists() -> None:
    """It is in the file that is named before it."""
    source, named = "", 0
    for word in re.findall(r"`([^`\n]+)`", INDEX.read_text()):
        if FILE.fullmatch(word):
            source = (TESTS / word).read_text()
        elif re.fullmatch(r"test_\w+", word):
            assert re.search(rf"def {word}\(", source), word
            named += 1
    assert named > 25


def test_every_rest_route_is_listed_and_no_other() -> None:
    router = APIRouter()
    context = SimpleNamespace(router=router, auth_enabled=False, auth_service=None)
    add_routes(context, Mock())
    add_prefix_routes(context, Mock())
    served = {
        f"{method} {route.path}"
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    listed = re.findall(
        r"^\| `((?:GET|POST|PUT|PATCH|DELETE) [^`]+)`", (DOCS / "api.md").read_text(), re.MULTILINE
    )
    assert set(listed) == served


@pytest.mark.parametrize("kind", [Change, Weights, Question, PrefixBody, PrefixTerms])
def test_every_field_of_a_body_is_in_the_reference(kind: type[BaseModel]) -> None:
    page = (DOCS / "api.md").read_text()
    assert [name for name in kind.model_fields if not re.search(rf"[`\"]{name}[`\"]", page)] == []


@pytest.mark.parametrize(
    ("section", "reasons"),
    [
        ("## Why a fetch was rolled back", errors.ROLLBACKS),
        ("### Why a replica does not share", errors.NotSharing),
    ],
)
def test_every_reason_is_explained_and_no_other(section: str, reasons: Iterable[str]) -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.split(r"^##", page.partition(f"{section}\n")[2], flags=re.MULTILINE)[0]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", rows, re.MULTILINE)) == sorted(reasons)


# -- pages in two languages ---------------------------------------------------------------------

ENGLISH, CHINESE = "README.md", "README.zh.md"
IN_CHINESE = sorted(page.name for page in (DOCS / "zh").glob("*.md"))
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def blocks(readme: str) -> list[str]:
    return BLOCK.findall((ROOT / readme).read_text())


def prose(readme: str) -> str:
    return BLOCK.sub("", (ROOT / readme).read_text())


def heading_levels(readme: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(readme), re.MULTILINE)]


def figures(readme: str) -> list[list[str]]:
    """The numbers of each row of a table."""
    rows = re.findall(r"^\|.*\d.*\|$", prose(readme), re.MULTILINE)
    return [re.findall(r"\d(?:[\d.,]*\d)?", row) for row in rows]


def code(readme: str) -> set[str]:
    """The inline code, in any order."""
    return {" ".join(each.split()) for each in re.findall(r"`[^`]+`", prose(readme))}


@pytest.mark.parametrize(
    ("part", "least"), [(heading_levels, 5), (blocks, 5), (figures, 2), (code, 1)]
)
def test_both_readmes_have_the_same_sections_commands_figures_and_code(
    part: Callable[[str], Sized], least: int
) -> None:
    """The inline code, such as an option or a path, may come in another order."""
    assert part(ENGLISH) == part(CHINESE)
    assert len(part(ENGLISH)) >= least


def test_files_that_the_readmes_name_exist() -> None:
    for name in re.findall(r"`((?:docs|examples)/[\w./-]*)`", prose(ENGLISH)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(((?!http)[^)]+)\)", prose(ENGLISH) + prose(CHINESE)):
        assert (ROOT / name.partition("#")[0]).is_file(), name


def commands(page: str) -> list[str]:
    """The code blocks without their comments. A directive, such as an image, is no code."""
    return [re.sub(r"\s*#.*", "", block) for block in blocks(page) if "```{" not in block]


def numbers(page: str) -> set[str]:
    return set(re.findall(r"\d(?:[\d.,]*\d)?", re.sub(r"\]\([^)]+\)", "", prose(page))))


@pytest.mark.parametrize("part", [heading_levels, commands, code, numbers])
@pytest.mark.parametrize("page", IN_CHINESE)
def test_a_chinese_page_says_what_the_english_one_says(
    page: str, part: Callable[[str], Sized]
) -> None:
    assert part(f"docs/zh/{page}") == part(f"docs/{page}")


def test_the_readmes_times_are_those_of_the_report() -> None:
    """`docs/benchmarks.md` has them in milliseconds."""
    report = (DOCS / "benchmarks.md").read_text().partition("## A remote hit")[2]
    rows = [row for row in figures(ENGLISH) if row[0] in {"1,000", "8,000"}]
    assert len(rows) == 2
    for tokens, *times in rows:
        (measured,) = re.findall(rf"^\| {tokens} \| (.*) \|$", report.partition("\n## ")[0], re.M)
        milliseconds = [int(each) for each in re.findall(r"\d+", measured)]
        shown = {f"{each / 1000:.{places}f}" for each in milliseconds for places in (1, 2)}
        assert set(times) <= shown
