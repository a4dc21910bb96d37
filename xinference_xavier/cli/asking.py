"""Questions before a command takes something away."""

import click

yes = click.option("--yes", is_flag=True, help="Do not ask.")
"""The option that answers `ask` beforehand."""


def ask(question: str, yes: bool) -> None:
    """End the command, with exit code 1, unless the user says yes or `yes` is set. No answer is a
    no: a program adds `--yes`."""
    if not yes:
        click.confirm(question, abort=True)
