"""An event is the same in the process where it happens and in the one that receives it. The
operator's function gets the events, and cannot harm anything else."""

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.harness.replicas import TrackerProcess, replicas, stored, wait_until
from tests.recording import FILE, RECORD
from xinference_xavier.errors import ConfigError
from xinference_xavier.events import (
    Event,
    Hook,
    TrackerLost,
    event_dict,
    load_hook,
    read_event,
)
from xinference_xavier.runtime.aio import within
from xinference_xavier.tracker import log as module
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.log import EventLog, call_hook

DEADLINE = 60.0  # of the tests' own waits


def made(kind: type[Event]) -> Event:
    values: dict[Any, Any] = {str: "text", int: 1, bool: True, float: 1.5}
    return kind(**{field.name: values[field.type] for field in fields(kind)})


@pytest.mark.parametrize("kind", Event.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_event_travels_as_json(kind: type[Event]) -> None:
    event = made(kind)
    received = json.loads(json.dumps(event_dict(event)))
    assert received["event"] == kind.__name__
    assert read_event(received) == event


def event(number: int = 0) -> Event:
    return TrackerLost(model_uid="m", incarnation=str(number), reason="gone")


@asynccontextmanager
async def calling(hook: Hook) -> AsyncIterator[EventLog]:
    """A log whose events `hook` gets."""
    log = EventLog()
    task = asyncio.create_task(call_hook(hook, log))
    yield log
    task.cancel()
    await asyncio.wait([task])


def recorder() -> tuple[queue.SimpleQueue[Event], Callable[[], Awaitable[Event]]]:
    """A queue for a hook's events, and how to wait for the next one."""
    told = queue.SimpleQueue[Event]()
    return told, lambda: within(DEADLINE, asyncio.to_thread(told.get, timeout=DEADLINE))


async def test_events_come_in_order_and_on_another_thread() -> None:
    told, following = recorder()
    threads = set[int]()

    def hook(each: Event) -> None:
        threads.add(threading.get_ident())
        told.put(each)

    events = [event(number) for number in range(100)]
    async with calling(hook) as log:
        for each in events:
            log.add(each)
        assert [await following() for _ in events] == events
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_the_events_of_replicas_come_as_they_were_made() -> None:
    told, following = recorder()
    reported = event()
    async with calling(told.put) as log:
        log.add_reported((event_dict(reported),))
        assert await following() == reported


async def test_a_hook_that_raises_still_gets_the_next_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told, following = recorder()
    errors = iter([RuntimeError("the pager is broken"), SystemExit(1)])

    def fail(each: Event) -> None:
        told.put(each)
        for error in errors:
            raise error

    async with calling(fail) as log:
        for each in (event(1), event(2), event(3)):
            log.add(each)
            assert await following() == each
    assert caplog.text.count("xavier_hooks failed: event=TrackerLost(") == 2
    assert "RuntimeError: the pager is broken" in caplog.text, "with the traceback"


async def test_a_hook_that_hangs_misses_what_leaves_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    told, following = recorder()
    release = threading.Event()

    def hang(each: Event) -> None:
        told.put(each)
        release.wait()

    events = [event(number) for number in range(50)]
    async with calling(hang) as log:
        log.add(events[0])
        assert await following() == events[0]
        for each in events[1:]:
            log.add(each)
        release.set()
        assert [await following() for _ in range(10)] == events[-10:]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere:hook", "cannot be imported (ModuleNotFoundError: No module named 'nowhere')"),
        ("json:nothing", "cannot be imported (AttributeError"),
        ("json:__doc__", "is not a function; name one as module:function"),
    ],
)
def test_an_invalid_hook_is_refused(
    path: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_hook(path)
    assert f"xavier_hooks='{path}' {reason}" in str(refusal.value)
    BlockTracker("m", hooks=path)  # in a new supervisor without that module
    assert f"xavier_hooks='{path}' {reason}" in caplog.text


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a tracker that starts from now on records events."""
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
    with replicas(own_tracker.address, transports) as (consumer, donor):
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
        with replicas(own_tracker.address, {"donor": "gloo"}):
            wait_until(lambda: bool(events(recorded, event="ReplicaRecovered")), "recorded")
