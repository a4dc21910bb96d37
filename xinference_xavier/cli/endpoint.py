"""Which xinference a command talks to, and as whom."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ApiError, ModelNotFoundError

NO_SUCH_MODEL, NO_ANSWER = 4, 3
"""Exit codes."""

_DEFAULT = "http://127.0.0.1:9997"


class Endpoint(NamedTuple):
    url: str
    api_key: str | None

    @contextmanager
    def client(self) -> Iterator[XavierClient]:
        """What fails inside ends the command, with its reason and its exit code."""
        try:
            with XavierClient(self.url, self.api_key) as client:
                yield client
        except ApiError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(NO_SUCH_MODEL if isinstance(error, ModelNotFoundError) else NO_ANSWER)


def endpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, and passes the command an `Endpoint` first."""

    @click.option(
        *("--endpoint", "-e"),
        envvar="XINFERENCE_ENDPOINT",
        default=_DEFAULT,
        show_default=True,
        show_envvar=True,
        help="Where xinference answers.",
    )
    @click.option(
        *("--api-key", "-k"),
        envvar="XINFERENCE_API_KEY",
        show_envvar=True,
        help="Where authentication is on; without it, what `xinference login` left is used.",
    )
    @functools.wraps(command)
    def with_endpoint(*args: Any, endpoint: str, api_key: str | None, **kwargs: Any) -> Any:
        return command(Endpoint(endpoint, api_key or stored_token(endpoint)), *args, **kwargs)

    return with_endpoint


def stored_token(endpoint: str) -> str | None:
    """What `xinference login` keeps for this endpoint."""
    home = Path(os.environ.get("XINFERENCE_HOME") or Path.home() / ".xinference")
    file = home / "auth" / hashlib.sha256(endpoint.encode()).hexdigest()
    try:
        return file.read_text().strip() or None
    except OSError:
        return None
