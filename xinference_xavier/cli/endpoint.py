"""The xinference endpoint that a command talks to, and its credentials."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ApiError, ConfigError, ModelNotFoundError, UnknownPrefixError

NOT_FOUND, NO_ANSWER = 4, 3
"""Exit codes."""


def with_client(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets an `XavierClient` as its first argument. A failed request
    ends the command with its reason and exit code."""

    @click.option(
        *("--endpoint", "-e"),
        envvar="XINFERENCE_ENDPOINT",
        default="http://127.0.0.1:9997",
        show_default=True,
        show_envvar=True,
        help="Address of xinference.",
    )
    @click.option(
        *("--api-key", "-k"),
        envvar="XINFERENCE_API_KEY",
        show_envvar=True,
        help="Your key; by default, the token of `xinference login`.",
    )
    @functools.wraps(command)
    def connected(*args: Any, endpoint: str, api_key: str | None, **kwargs: Any) -> Any:
        try:
            with XavierClient(endpoint, api_key or None) as client:
                return command(client, *args, **kwargs)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        except ApiError as error:
            click.echo(f"Error: {error}", err=True)
            missing = isinstance(error, (ModelNotFoundError, UnknownPrefixError))
            sys.exit(NOT_FOUND if missing else NO_ANSWER)

    return connected
