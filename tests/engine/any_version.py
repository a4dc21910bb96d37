"""vLLM's dataclasses, which have more fields with every version."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def made(kind: type[T], **values: Any) -> T:
    """One of `kind`, of those `values` for which this version has a field."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in values.items() if name in known})
