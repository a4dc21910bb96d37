"""How the reported figures declare the metrics that they become."""

from dataclasses import field
from typing import Any


def shown_as(name: str, text: str, label: str = "") -> dict[str, str]:
    """A field's metadata: its metric, without prefix.

    A dictionary is shown as the sum of its values. With `label`, an object is shown as one series
    per field, and the field's name is the label's value.
    """
    return {"metric": name, "help": text, "label": label}


def metric(name: str, text: str, default: float | None = 0) -> Any:
    """A dataclass field with a metric."""
    return field(default=default, metadata=shown_as(name, text))
