"""Commands of objects in other processes are answered, or it is said why not."""

import threading

import pytest

from tests.harness.remote import EndedError, Remote, RemoteError, obey

pytestmark = pytest.mark.process


def test_a_command_is_answered_or_raises_what_the_object_raised() -> None:
    with Remote(obey, dict, name="table") as remote:
        remote.call("update", key="value")
        assert remote.call("get", "key") == "value"
        with pytest.raises(RemoteError, match=r"table: KeyError"):
            remote.call("pop", "nothing")


def test_nobody_waits_longer_than_the_patience() -> None:
    with Remote(obey, threading.Event, name="event") as remote:
        remote.wait_until_ready()
        remote.patience = 0.1
        waiting = remote.begin("wait")
        with pytest.raises(TimeoutError, match="event does not answer wait"):
            waiting.result()
        remote.kill()


def test_what_a_dead_process_was_asked_ends_at_once() -> None:
    with Remote(obey, threading.Event, name="event") as remote:
        waiting = remote.begin("wait")
        remote.kill()
        with pytest.raises(EndedError, match="event has ended"):
            waiting.result()
