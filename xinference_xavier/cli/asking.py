"""Questions before a command takes something away."""

import click

yes = click.option("--yes", is_flag=True, help="Do not ask.")
"""For `ask`, as a command's argument `yes`."""


def ask(question: str, yes: bool) -> None:
    """End the command, with exit code 1, unless the answer or `yes` is yes. Nobody's silence is
    one: a program that cannot answer adds `--yes`."""
    if not yes:
        click.confirm(question, abort=True)
