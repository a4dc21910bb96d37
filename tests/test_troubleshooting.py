"""`docs/troubleshooting.md` lists every message of the package with its cause and remedy, and no
others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.error_messages import messages, normal
from xinference_xavier import errors
from xinference_xavier.replica import fetcher
from xinference_xavier.transfer import links

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
PASSED_ON = {"Error: …"}
"""Messages that only wrap another one."""
ENTRY = re.compile(r"- (?P<ticks>`+) ?(?P<message>.+?) ?(?P=ticks)(?P<own>\\?)")
REMEDY = "**Remedy:** "


class Entry(NamedTuple):
    message: str
    explanation: str
    """Its own text, or its section's text for all entries without one."""


def entries() -> Iterator[Entry]:
    for section in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE):
        lines = section.splitlines()
        shared = ""
        for number, line in enumerate(lines):
            found = ENTRY.fullmatch(line)
            if found is None:
                shared = f"{shared} {line}" if not line.startswith(("-", "  ")) else shared
                continue
            own = " ".join(_following(lines[number + 1 :])) if found["own"] else shared
            yield Entry(normal(found["message"]), own)


def _following(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("  "):
            return
        yield line.strip()


def test_every_message_is_listed_and_no_others() -> None:
    made = {text: place for text, place in messages().items() if text not in PASSED_ON}
    listed = {entry.message for entry in entries()}
    missing = [f"{place}: {text}" for text, place in made.items() if text not in listed]
    assert missing == [], "write them into docs/troubleshooting.md, with cause and remedy"
    assert sorted(listed - set(made)) == [], "no longer in the source"
    assert len(made) > 150


def test_every_message_has_a_cause_and_a_remedy() -> None:
    for entry in entries():
        cause, found, remedy = entry.explanation.partition(REMEDY)
        assert found, entry
        assert len(cause.split()) > 2, entry
        assert len(remedy.strip()) > 2, entry


def test_errors_that_pass_on_another_message_have_no_entry() -> None:
    assert set(messages()) >= PASSED_ON


def reasons() -> set[str]:
    """The possible reasons of rollbacks."""
    found = {*errors.REFUSALS, *errors.OUT_OF_REACH}
    for file in (Path(fetcher.__file__), Path(links.__file__)):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Assign(targets=[ast.Name("reason")], value=value):
                    found |= _texts(value)
                case ast.AnnAssign(target=ast.Name("reason"), value=value) if value is not None:
                    found |= _texts(value)
                case ast.Call(func=ast.Name("PullResult"), args=[_, value]):
                    found |= _texts(value)
                case ast.FunctionDef(name="_reason" | "_commit"):
                    returned = (each for each in ast.walk(node) if isinstance(each, ast.Return))
                    found.update(*(_texts(each.value) for each in returned if each.value))
    return found


def _texts(value: ast.expr) -> set[str]:
    texts = (each.value for each in ast.walk(value) if isinstance(each, ast.Constant))
    return {text for text in texts if isinstance(text, str) and text}


def test_every_reason_of_a_rollback_is_explained() -> None:
    section = PAGE.read_text().partition("## Why a fetch was rolled back")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) == reasons()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ConfigError("a", value, f"is {x}", "use b")', "a=… is …; use b"),
        ('raise ConfigError(option, value, "is", remedy)', "…=… is; …"),
        ('raise NotFoundError(f"model {uid} is gone")', "model … is gone"),
        ('raise HTTPException(404, f"no {name}")', "no …"),
        ('yield Finding("here", "wrong", "mend it")', "wrong"),
        ("raise LinkError(str(error))", None),
        ('class OwnError(Exception): ...\nraise OwnError("it is " "broken")', "it is broken"),
        (
            'def f(x):\n  what = "late" if x else "early"\n  raise ValueError(f"too {what!r}")',
            "too …",
        ),
        ('click.echo("done")', None),
        ('click.echo("failed", err=True)', "failed"),
    ],
)
def test_how_messages_are_found(tmp_path: Path, source: str, found: str | None) -> None:
    (tmp_path / "errors.py").write_text("class ConfigError: ...\nclass NotFoundError: ...")
    (tmp_path / "module.py").write_text(source)
    assert set(messages(tmp_path)) == ({found} if found else set())
