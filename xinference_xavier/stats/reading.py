"""Dataclasses from untrusted JSON, and their sums. Pure."""

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MAX_NUMBER = 1 << 63

_T = TypeVar("_T")


def read(kind: type[_T], raw: object) -> _T:
    """Make a dataclass from a dictionary of its fields.

    A missing value gets the field's default, a malformed one becomes zero or empty. Unknown keys
    are ignored; a field named `raw` gets the whole dictionary. Raises KeyError if a field without
    default is missing.
    """
    sent = raw if isinstance(raw, Mapping) else {}
    values = {**sent, "raw": sent}
    return kind(
        **{
            name: _value(hint, values[name])
            for name, (hint, required) in _fields(kind).items()  # type: ignore[arg-type]
            if required or name in values
        }
    )


def add(total: Any, part: Any) -> None:
    """Add the numbers of `part` to `total`, whose fields `part` has too."""
    for name in vars(total):
        value, more = getattr(total, name), getattr(part, name)
        if is_dataclass(value):
            add(value, more)
        elif isinstance(value, dict):
            for key, number in more.items():
                value[key] = value.get(key, 0) + number
        else:
            setattr(total, name, value + more)


@functools.cache
def _fields(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Type and whether it is required, by name."""
    hints = get_type_hints(kind)
    return {
        field.name: (
            hints[field.name],
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
    }


def _value(hint: Any, value: object) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(origin):
        return read(origin, value)  # type: ignore[arg-type]  # a hint is a type
    if origin in (int, float):
        return _number(value)
    if origin is UnionType:
        return None if value is None else _value(arguments[0], value)
    if origin in (list, tuple):
        items = value if isinstance(value, (list, tuple)) else ()
        return origin(_value(arguments[0], item) for item in items)
    if not isinstance(value, origin):
        return origin()
    if isinstance(value, dict):
        return {str(key): _value(arguments[1], item) for key, item in value.items()}
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    return value if 0 <= value < MAX_NUMBER else 0
