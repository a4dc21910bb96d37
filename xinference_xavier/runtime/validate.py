"""Checks of input and of messages. Each raises ValueError, whatever it is given; the text names the
value."""

import json
from typing import Annotated

from pydantic import Field, ValidationError

from xinference_xavier.errors import shown

MAX_IDENTIFIER = 256  # characters of a namespace, an incarnation or an address
MAX_PORT = 65535
MAX_COUNT = (1 << 63) - 1

Identifier = Annotated[str, Field(min_length=1, max_length=MAX_IDENTIFIER)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def first_reason(error: ValueError) -> str:
    """What is wrong, in one line; the first fault if pydantic found several."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"])) or "it"
    return f"{name}={shown(fault['input'])}: {fault['msg'].removeprefix('Value error, ')}"


def check_count(name: str, value: object, least: int, most: int = MAX_COUNT) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} is not a whole number from {least} to {most}")


def check_json_size(name: str, value: object, most: int) -> bytes:
    """`value` can be written as at most `most` bytes of JSON. Returns them."""
    try:
        written = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if len(written) > most:
        raise ValueError(f"{name} has {len(written)} bytes of JSON, more than {most}")
    return written
