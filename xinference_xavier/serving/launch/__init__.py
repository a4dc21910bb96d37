"""Additions to xinference's launch, cancel and terminate."""

from collections.abc import Awaitable, Callable
from typing import Any

Method = Callable[..., Awaitable[Any]]
"""A method of xinference's supervisor or worker."""
