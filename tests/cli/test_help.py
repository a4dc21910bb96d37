"""Help fits a terminal of 80 columns: each text is a sentence of at most 60 characters."""

from collections.abc import Iterator

import click
import pytest

from xinference_xavier.cli.commands import main
from xinference_xavier.options import ONLY_UNDER_XINFERENCE, PARSERS

LONGEST = 60
FRAGMENTS = ("Of ", "Since ", "For ", "By ", "With ", "Whose ")


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


COMMANDS = dict(commands(main))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_each_text_is_a_short_sentence(command: click.Command) -> None:
    options = [each for each in command.params if isinstance(each, click.Option)]
    told = {each.name: each.help for each in options if not each.hidden}
    told["the command"] = command.get_short_help_str(10 * LONGEST)
    for name, text in told.items():
        assert text, f"{name} has no help"
        assert text[0].isupper(), (name, text)
        assert text.endswith("."), (name, text)
        assert len(text) <= LONGEST, (name, text)
        assert not text.startswith(FRAGMENTS), (name, text)


def test_a_plain_server_is_offered_what_means_something_there() -> None:
    options = main.commands["transfer-config"].params
    shown = {each.name for each in options if not getattr(each, "hidden", False)}
    offered = shown - {"model", "address", "name"}
    assert offered == PARSERS.keys() - {*ONLY_UNDER_XINFERENCE}
