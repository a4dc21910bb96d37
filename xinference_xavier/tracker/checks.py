"""What the tracker takes from its peers. Every check raises ValueError that names the value."""

from __future__ import annotations

import json

MAX_IDENTIFIER = 256
"""Characters of a namespace, an incarnation or an address."""
MAX_WEIGHTS_VERSION = 64
"""Characters; it becomes part of a namespace."""
MAX_KEY_BYTES = 1024
MAX_STATS_BYTES = 1 << 16
"""A replica's figures as JSON."""


def check_identifier(name: str, value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_IDENTIFIER:
        raise ValueError(f"{name}={value!r:.300} is not a text of 1 to {MAX_IDENTIFIER} characters")


def check_weights_version(version: object) -> None:
    if not isinstance(version, str) or not 0 < len(version) <= MAX_WEIGHTS_VERSION:
        raise ValueError(
            f"weights_version={version!r:.100} is not a text of 1 to {MAX_WEIGHTS_VERSION} "
            "characters"
        )


def check_count(name: str, value: object, least: int, most: int = (1 << 63) - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}={value!r:.100} is not a whole number from {least} to {most}")


def check_packed(name: str, value: object) -> None:
    if not isinstance(value, bytes):
        raise ValueError(f"{name} is {type(value).__name__}, not the bytes of packed keys")


def check_switch(value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"enabled={value!r:.100} is neither True nor False")


def check_stats(stats: object) -> None:
    if not isinstance(stats, dict):
        raise ValueError(f"stats is {type(stats).__name__}, not a dictionary")
    try:
        size = len(json.dumps(stats))
    except (TypeError, ValueError) as error:
        raise ValueError(f"stats cannot be written as JSON: {error}") from None
    if size > MAX_STATS_BYTES:
        raise ValueError(f"stats take {size} bytes of JSON, more than {MAX_STATS_BYTES}")
