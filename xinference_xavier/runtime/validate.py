"""What is taken from peers. Every check raises ValueError that names the value, and nothing else
whatever it is given."""

from __future__ import annotations

import json
import math
from typing import Any

from xinference_xavier.errors import shown
from xinference_xavier.runtime.addresses import split_address

MAX_IDENTIFIER = 256
"""Characters of a namespace, an incarnation or an address."""
MAX_KEY_BYTES = 1024
MAX_PORT = 65535


def check_identifier(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_IDENTIFIER:
        raise ValueError(f"{name}={shown(value)} is not a text of 1 to {MAX_IDENTIFIER} characters")


def check_address(name: str, value: object) -> None:
    """An actor's address, ``host:port``."""
    check_identifier(name, value)
    assert isinstance(value, str)
    try:
        _, port = split_address(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    check_count(f"port of {name}", port, 0, MAX_PORT)


def check_count(name: str, value: object, least: int, most: int = (1 << 63) - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} is not a whole number from {least} to {most}")


def check_counts(name: str, values: object, most_values: int, most: int) -> None:
    """A tuple of at most `most_values` whole numbers from 0 to `most`."""
    if type(values) is not tuple or len(values) > most_values:
        raise ValueError(f"{name} is not a tuple of at most {most_values} numbers")
    for value in values:
        check_count(name, value, 0, most)


def check_keys(name: str, keys: object, most: int) -> None:
    """A tuple of at most `most` chunk keys."""
    if type(keys) is not tuple or len(keys) > most:
        raise ValueError(f"{name} is not a tuple of at most {most} keys")
    for key in keys:
        if type(key) is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"{name} has {shown(key)}, not 1 to {MAX_KEY_BYTES} bytes")


def check_seconds(name: str, value: object, most: float = math.inf) -> None:
    """A time above 0 and below `most`."""
    if not isinstance(value, (int, float)) or not 0 < value < most:
        raise ValueError(f"{name}={shown(value)} is not a time above 0 and below {most:g} s")


def check_json_size(name: str, value: object, most: int) -> None:
    """Something that takes at most `most` bytes as JSON."""
    try:
        size = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    if size > most:
        raise ValueError(f"{name} has {size} bytes of JSON, more than {most}")


def parse_object(name: str, text: object, most: int) -> dict[str, Any]:
    """The JSON object in at most `most` bytes of `text`."""
    if not isinstance(text, bytes) or len(text) > most:
        raise ValueError(f"{name} is not JSON of at most {most} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {type(value).__name__} and not an object of JSON")
    return value
