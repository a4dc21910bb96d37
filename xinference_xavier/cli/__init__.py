"""The command line, `xinference-xavier`."""

import sys


def main() -> None:
    """Run a command. If a package is missing, as after an installation without dependencies, exit
    with a sentence that names it."""
    try:
        from xinference_xavier.cli.commands import main as command

        command()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__name__.partition(".")[0]):
            raise
        sys.exit(f"Error: {error.name} is not installed; run `pip install xinference-xavier`")
