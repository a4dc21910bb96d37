"""What is added to xinference's launch, cancel and terminate."""

from collections.abc import Awaitable, Callable
from typing import Any

Method = Callable[..., Awaitable[Any]]
"""Of xinference's supervisor or worker."""
