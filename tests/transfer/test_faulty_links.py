"""Whatever a donor sends, only right rows become hits, the others are free again in time, at most
our transfer process dies, and fetches from other donors work. Rows that are wrong as a whole are in
`tests/replica/test_sources.py`."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.replicas import (
    Outcome,
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    is_free,
    replicas,
    stored,
    wait_until,
)
from tests.transfer import faulty_links
from tests.transfer.faulty_links import Wrong

pytestmark = pytest.mark.process

WRONG = "tests.transfer.faulty_links:WrongDonor"
ROWS = 8  # per fetch, as many as `stored` makes
HALF = ROWS // 2
SHORT = 3.0  # seconds: the deadline of a fetch that should end by it
GRACE = 2.0  # until its end is noticed
LONG = 30.0  # the deadline of a fetch that should end earlier


class Scene(NamedTuple):
    wrong: ReplicaProcess
    right: ReplicaProcess
    consumer: ReplicaProcess


@pytest.fixture(scope="module")
def scene(
    tracker_process: TrackerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    with pytest.MonkeyPatch.context() as patch:
        script: Path = tmp_path_factory.mktemp("wrong") / "script"
        patch.setenv(faulty_links.SCRIPT, str(script))
        transports = {"wrong": WRONG, "right": "gloo", "fetching": "gloo"}
        with replicas(tracker_process.address, transports, fetch_timeout=LONG) as started:
            yield Scene(*started)


def fetch_wrong(scene: Scene, keys: list[bytes], wrong: Wrong, deadline: float) -> Outcome:
    if wrong is Wrong.REFUSED:
        started = scene.wrong.stats()["transfer_restarts"]
        scene.wrong.send_signal(signal.SIGKILL, "transfer")  # the next fetch needs a new link
        wait_until(
            lambda: scene.wrong.stats()["transfer_restarts"] > started and scene.wrong.is_up(),
            "the donor's transfer process is back",
        )
    faulty_links.begin(wrong)
    outcome: Outcome = scene.consumer.fetch("wrong", keys, deadline)
    assert outcome.state == "ROLLED_BACK"
    if deadline == SHORT:
        assert outcome.seconds < SHORT + GRACE
    else:
        assert outcome.seconds < LONG, "it ended before the deadline"
    return outcome


@pytest.mark.parametrize(
    ("wrong", "reason", "committed"),
    [
        (Wrong.REFUSED, "link", 0),
        (Wrong.SHORTER, "checksum", HALF),
        (Wrong.LATE, "timeout", HALF),
        (Wrong.LONGER, "transfer process died", 0),
    ],
)
def test_a_donor_that(scene: Scene, wrong: Wrong, reason: str, committed: int) -> None:
    keys = stored(scene.consumer, scene.wrong, scene.right)
    restarts = scene.consumer.stats()["transfer_restarts"]
    engine = scene.consumer.process.pid
    outcome = fetch_wrong(scene, keys, wrong, SHORT if reason == "timeout" else LONG)
    assert (outcome.reason, outcome.committed) == (reason, committed)
    wait_until(lambda: is_free(scene.consumer), "the rows are free again")
    wait_until(lambda: faulty_links.is_done(wrong), "the donor has finished its fault")
    missing = keys[committed:]
    assert not set(missing) & set(scene.consumer.held())
    wait_until(scene.consumer.is_up, "the consumer can fetch")
    assert scene.consumer.fetch("right", missing, LONG).committed == len(missing)
    assert scene.consumer.wrong_rows() == []
    died = reason == "transfer process died"
    assert scene.consumer.stats()["transfer_restarts"] == restarts + died
    assert scene.consumer.process.pid == engine
    assert scene.consumer.process.is_alive()
    wait_until(lambda: is_free(scene.wrong), "its grants have ended")
    again = stored(scene.consumer, scene.wrong, scene.right)
    assert scene.consumer.fetch("wrong", again, LONG).committed == ROWS, (
        "a donor that behaves again is used"
    )


def test_what_comes_after_the_rollback_changes_nothing_that_was_reused(scene: Scene) -> None:
    keys = stored(scene.consumer, scene.wrong, scene.right)
    fetch_wrong(scene, keys, Wrong.LATE, SHORT)
    wait_until(lambda: is_free(scene.consumer), "the rows are free again")
    assert not faulty_links.is_done(Wrong.LATE)
    others = fresh_keys(scene.consumer.counts().rows)
    assert scene.consumer.store(others) == len(others), "every slot is reused"
    wait_until(lambda: faulty_links.is_done(Wrong.LATE), "the donor has sent the rest")
    wait_until(lambda: len(scene.consumer.held()) == len(others), "all have their checksums")
    assert scene.consumer.wrong_rows() == []
