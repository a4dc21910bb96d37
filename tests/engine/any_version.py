"""Makes vLLM's dataclasses, whose fields differ between versions."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def made(kind: type[T], **values: Any) -> T:
    """Make a `kind` from those `values` that are fields in the installed version."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in values.items() if name in known})
