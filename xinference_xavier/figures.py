"""Figures that come from peers, read without trust: what is none counts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NUMBER = 1 << 63


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float:
    """From 0 on, and below `MAX_NUMBER`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if 0 <= value < MAX_NUMBER else 0
