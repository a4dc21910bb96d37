"""An event is the same in the process where it happens and in the one that receives it. The
operator's function gets the events, and cannot harm anything else."""

import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.harness.replicas import TrackerProcess, replicas, stored, wait_until
from tests.recording import FILE, RECORD
from xinference_xavier import events as module
from xinference_xavier.errors import ConfigError
from xinference_xavier.events import (
    Event,
    Hooks,
    TrackerLost,
    TrackerRegained,
    check_event,
    event_dict,
    hooks_of,
    load_hook,
)


def made(kind: type[Event]) -> Event:
    values: dict[Any, Any] = {str: "text", int: 1, bool: True, float: 1.5}
    return kind(**{field.name: values[field.type] for field in fields(kind)})


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_event_travels_as_json(kind: type[Event]) -> None:
    event = made(kind)
    received = json.loads(json.dumps(event_dict(event)))
    check_event(received)
    assert received.pop("event") == kind.__name__
    assert kind(**received) == event


def event(number: int = 0) -> Event:
    return TrackerLost(model_uid="m", incarnation=str(number), reason="gone")


def test_events_come_in_order_and_on_another_thread() -> None:
    calls: list[tuple[Event, int]] = []
    hooks = Hooks(lambda each: calls.append((each, threading.get_ident())))
    events = [event(number) for number in range(100)]
    for each in events:
        hooks.notify(each)
    wait_until(lambda: len(calls) == 100, "the hook got all events")
    assert [each for each, _ in calls] == events
    assert {thread for _, thread in calls} != {threading.get_ident()}


def test_without_a_hook_there_is_no_thread() -> None:
    before = threading.active_count()
    Hooks().notify(event())
    assert threading.active_count() == before


def test_a_hook_that_raises_still_gets_the_next_event(caplog: pytest.LogCaptureFixture) -> None:
    def fail(each: Event) -> None:
        raise RuntimeError("the pager is broken")

    hooks = Hooks(fail)
    for number in range(3):
        hooks.notify(event(number))
    wait_until(lambda: hooks.failed == 3, "the hook got all events")
    assert caplog.text.count("xavier_hooks failed") == 1, "logged once"


def test_a_hook_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 10)
    release, called, ended = threading.Event(), threading.Event(), list[Event]()

    def hang(each: Event) -> None:
        called.set()
        release.wait()
        ended.append(each)

    hooks = Hooks(hang)
    hooks.notify(event())
    called.wait()
    for number in range(50):
        hooks.notify(event(number))
    assert hooks.dropped == 40
    release.set()
    wait_until(lambda: len(ended) == 11, "the hook got the waiting events")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere:hook", "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("json:nothing", "cannot be imported (AttributeError"),
        ("json:__doc__", "is not a function; name one as module:function"),
    ],
)
def test_an_invalid_hook_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_hook(path)
    assert f"xavier_hooks='{path}' {reason}" in str(refusal.value)
    hooks_of(path).notify(event())  # a replica goes on without it


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which processes that start from now on record events."""
    file = tmp_path / "events"
    file.touch()
    monkeypatch.setenv(FILE, str(file))
    return file


@pytest.fixture
def own_tracker(recorded: Path) -> Iterator[TrackerProcess]:
    tracker = TrackerProcess(hooks=RECORD, lease=2.0, tick=0.2)
    yield tracker
    tracker.kill()


def events(file: Path, **fields: Any) -> list[dict[str, Any]]:
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    return [each for each in recorded if fields.items() <= each.items()]


@pytest.mark.process
def test_the_hook_gets_the_events_of_replicas(recorded: Path, own_tracker: TrackerProcess) -> None:
    transports = {"consumer": "gloo", "donor": "gloo"}
    with replicas(own_tracker.address, transports, hooks=RECORD) as (consumer, donor):
        for name in transports:
            assert len(events(recorded, event="ReplicaJoined", incarnation=name)) == 1

        keys = stored(consumer, donor, count=2)
        donor.forget(keys)
        consumer.fetch("donor", keys, 30.0)
        wait_until(lambda: bool(events(recorded, event="FetchRolledBack")), "recorded")
        (fetch,) = events(recorded, event="FetchRolledBack")
        assert (fetch["incarnation"], fetch["donor"]) == ("consumer", "donor")
        assert (fetch["reason"], fetch["rows"], fetch["committed"]) == ("not held", 2, 0)

        donor.kill()
        wait_until(lambda: bool(events(recorded, event="ReplicaLost")), "recorded")
        assert events(recorded, event="ReplicaLost")[0]["incarnation"] == "donor"
        with replicas(own_tracker.address, {"donor": "gloo"}, hooks=RECORD):
            wait_until(lambda: bool(events(recorded, event="ReplicaRecovered")), "recorded")

        own_tracker.kill()
        lost = {"event": TrackerLost.__name__, "incarnation": "consumer"}
        wait_until(lambda: bool(events(recorded, **lost)), "recorded")
        assert not events(recorded, event=TrackerRegained.__name__)
