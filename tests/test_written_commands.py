"""Commands in the documentation exist, with the options that they have there. Other tests, and
people, run them."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from xinference_xavier.cli.commands import main
from xinference_xavier.config import take_launch_options

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("README*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    *(ROOT / "examples").rglob("*.sh"),
]
BLOCK = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PREFIX = re.compile(r"^(?:\w+=\S+ |docker compose exec \w+ )+")
ENDS = re.compile(r"\s(?:#|\||&|&&|;|>)(?:\s|$).*")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Command(NamedTuple):
    page: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands(*begin: str) -> list[Command]:
    return [each for each in written() if each.words[: len(begin)] == list(begin)]


def written() -> Iterator[Command]:
    """Every line of plain and bash code blocks, and of scripts with their comments."""
    for page in PAGES:
        text = page.read_text()
        if page.suffix != ".sh":
            blocks = BLOCK.findall(text)
            text = "\n".join(block for language, block in blocks if language in ("", "bash"))
        for line in re.sub(r"\\\n#?\s*", "", text).splitlines():
            plain = re.sub(r"^[#\s]+", "", line)
            inner = re.sub(r"^\w+=\$\((.*)\)$", r"\1", plain)
            words = PREFIX.sub("", ENDS.sub("", f"{inner} "))
            try:
                split = shlex.split(words)
            except ValueError:  # prose
                continue
            if split:
                yield Command(str(page.relative_to(ROOT)), split)


@pytest.mark.parametrize("command", commands("xinference-xavier"), ids=str)
def test_our_program_knows_the_command_and_its_options(command: Command) -> None:
    _, name, *rest = command.words
    found = main.commands[name]
    with click.Context(found, info_name=name, **found.context_settings) as context:
        found.make_parser(context).parse_args(rest)  # raises for an unknown option


@pytest.mark.parametrize("command", commands("make"), ids=str)
def test_targets_exist(command: Command) -> None:
    targets = [word for word in command.words[1:] if "=" not in word]
    assert set(targets) <= TARGETS


@pytest.mark.parametrize("command", commands("python", "-m"), ids=str)
def test_modules_exist(command: Command) -> None:
    assert find_spec(command.words[2]) is not None


@pytest.mark.parametrize("command", commands("xinference", "launch"), ids=str)
def test_launch_options_are_ours(command: Command) -> None:
    words = command.words[2:]
    names = [word.removeprefix("--") for word in words[::2]]
    given: dict[str, object] = dict(zip(names, words[1::2], strict=True))
    assert take_launch_options(given) is not None


def test_scripts_that_are_called_exist() -> None:
    called = [each for each in written() if each.words[0].startswith("examples/")]
    assert called
    assert all((ROOT / each.words[0]).is_file() for each in called)


def test_commands_are_found() -> None:
    assert len(commands("xinference-xavier")) > 20
    assert len(commands("python", "-m")) > 5
    assert len(commands("xinference", "launch")) > 3
    assert {word for each in commands("make") for word in each.words[1:]} >= {"demo", "test"}
