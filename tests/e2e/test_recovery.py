"""Level 2: replicas that die or hang under xinference, and come back.

xinference 4.1 recovers a replica only when its model process ends. The worker's actor pool notices
within seconds and launches the replica again with the same arguments, without a limit unless
XINFERENCE_MODEL_ACTOR_AUTO_RECOVER_LIMIT is set (`core/worker.py`, `recover_sub_pool`). When an
engine or a vLLM worker dies (either takes the other with it), the model process lives on until its
next request. That request fails and ends the process (`model/llm/vllm/utils.py`,
`_stop_after_engine_death`), because the health check expects a RuntimeError, which vLLM's
EngineDeadError is not. So xinference considers an idle dead replica "ready"; only its expired lease
tells the others. test_sharing.py kills a transfer process.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import xoscar

from examples.local_cluster import Completion
from tests.e2e import asking
from tests.e2e.asking import CHUNK, published
from tests.e2e.conftest import REPLICAS, SEPARATE_UID, can_fetch, wait_for_engine, wait_until
from tests.harness import processes
from tests.harness.clusters import SeparateCluster

pytestmark = pytest.mark.long

UID = SEPARATE_UID
FIRST, SECOND = REPLICAS
question = partial(asking.question, rows=30)  # about 1,500 tokens


@pytest.fixture
def model(separate_cluster: SeparateCluster) -> SeparateCluster:
    wait_for_engine(lambda: can_fetch(separate_cluster, UID, 2), "both replicas can fetch")
    return separate_cluster


def members(cluster: SeparateCluster) -> dict[str, dict[str, Any]]:
    return cluster.members(UID)


def member_of(cluster: SeparateCluster, replica: str) -> dict[str, Any]:
    (member,) = (each for each in members(cluster).values() if each["replica"] == replica)
    return member


def compute(cluster: SeparateCluster, replica: str, seed: int) -> Completion:
    """Have that replica compute a document's question; return when its chunks are published."""
    incarnation = member_of(cluster, replica)["incarnation"]
    _, answer = published(
        cluster, UID, lambda: cluster.ask(replica, question(seed)), by=incarnation
    )
    assert answer.cached_tokens == 0
    return answer


def assert_shares(cluster: SeparateCluster, donor: str, consumer: str, seed: int) -> None:
    """What `donor` computes is a remote hit at `consumer`, with the same answer."""
    cold = compute(cluster, donor, seed)
    received = member_of(cluster, consumer)["bytes_received"]
    answer = cluster.ask(consumer, question(seed))
    assert answer.tokens == cold.tokens
    assert answer.cached_tokens == cold.prompt_tokens // CHUNK * CHUNK
    assert member_of(cluster, consumer)["bytes_received"] > received


def wait_back(cluster: SeparateCluster, replica: str, old: str) -> float:
    """Wait until the replica whose incarnation was `old` is ready again and shares. Returns the
    seconds between the two."""

    def answers() -> bool:
        states = {r["replica_model_uid"]: r["model_state"] for r in cluster.replicas(UID)}
        return states.get(replica) == "ready" and bool(_model_of(replica))

    wait_for_engine(answers, f"{replica} is ready again")
    ready = time.monotonic()
    wait_until(
        lambda: old not in members(cluster) and can_fetch(cluster, UID, 2),
        f"{replica} has joined as another incarnation",
    )
    return time.monotonic() - ready


def _model_of(replica: str) -> psutil.Process | None:
    try:
        return processes.of_replica(replica).model
    except LookupError:
        return None


def test_a_replica_that_hangs_is_dropped_and_joins_again_by_itself(model: SeparateCluster) -> None:
    """Suspended for longer than its lease, it is no longer a donor. Resumed, it shares again by
    itself, as the same incarnation with all of its holdings."""
    cold = compute(model, FIRST, 400)
    member = member_of(model, FIRST)
    hung = processes.of_member(member)
    with processes.frozen(hung.all()):
        wait_until(lambda: member["incarnation"] not in members(model), "its lease has ended")
        alone = model.ask(SECOND, question(400))  # no other replica holds it
        assert alone.tokens == cold.tokens
        assert alone.cached_tokens == 0
    wait_until(lambda: member["incarnation"] in members(model), "it has joined again")
    wait_until(
        lambda: members(model)[member["incarnation"]]["holdings"] >= member["holdings"],
        "its holdings are published again",
    )
    assert_shares(model, FIRST, SECOND, 401)
    assert_shares(model, SECOND, FIRST, 402)


@pytest.mark.parametrize(
    ("replica", "survivor", "victim", "seed"),
    [
        (FIRST, SECOND, "worker", 410),
        (SECOND, FIRST, "engine", 420),
        (FIRST, SECOND, "model", 430),
    ],
)
def test_a_killed_replica_comes_back_and_shares(
    model: SeparateCluster,
    replica: str,
    survivor: str,
    victim: str,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    """The dead incarnation's entries disappear, the survivor answers throughout, and the replica
    that xinference starts in its place shares."""
    cold = compute(model, replica, seed)
    member = member_of(model, replica)
    doomed = processes.of_member(member)
    process = doomed.workers[0] if victim == "worker" else getattr(doomed, victim)
    processes.kill(process)
    # If only the engine died, the model process stays until its next request.
    left = doomed.all()[1:] if victim != "model" else doomed.all()
    processes.wait_gone(left)

    answer = model.ask(survivor, question(seed))
    assert answer.tokens == cold.tokens
    wait_until(lambda: member["incarnation"] not in members(model), "the dead one is dropped")
    if victim != "model":
        with pytest.raises((OSError, xoscar.ServerClosed)):
            model.ask(replica, question(seed + 1))
    processes.wait_gone(doomed.all())

    seconds = wait_back(model, replica, member["incarnation"])
    record_property("seconds from ready until it shares", seconds)
    assert_shares(model, survivor, replica, seed + 2)
    assert_shares(model, replica, survivor, seed + 3)
    assert member["incarnation"] not in members(model)
