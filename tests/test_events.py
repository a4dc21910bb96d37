"""An event is the same in the process where it happens and in the one that receives it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from xinference_xavier.events import Event, check_event, event_dict


def made(kind: type[Event]) -> Event:
    values: dict[str, Any] = {"str": "text", "int": 1, "bool": True, "float": 1.5}
    return kind(**{field.name: values[str(field.type)] for field in fields(kind)})


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_event_travels_as_json(kind: type[Event]) -> None:
    event = made(kind)
    received = json.loads(json.dumps(event_dict(event)))
    check_event(received)
    assert received.pop("event") == kind.__name__
    assert kind(**received) == event
