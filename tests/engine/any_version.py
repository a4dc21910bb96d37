"""Calls what takes other arguments in other versions of vLLM."""

import inspect
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _parameters(function: Callable[..., Any]) -> Collection[str]:
    return inspect.signature(function).parameters.keys()


def called(function: Callable[..., T], **arguments: Any) -> T:
    """Call `function` with those of the `arguments` that the installed version takes."""
    taken = _parameters(function)
    return function(**{name: value for name, value in arguments.items() if name in taken})
