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

import pytest
import xoscar

from tests.e2e.model import Model, question, wait_for_engine, wait_until
from tests.harness import processes

pytestmark = pytest.mark.long

short_question = partial(question, rows=30)  # about 1,500 tokens


def wait_back(model: Model, replica: str, old: str) -> float:
    """Wait until the replica whose incarnation was `old` is ready again and shares. Returns the
    seconds between the two."""

    def is_ready() -> bool:
        known = {each["replica_model_uid"]: each for each in model.cluster.replicas(model.uid)}
        return known.get(replica, {}).get("model_state") == "ready" and has_engine(replica)

    wait_for_engine(is_ready, f"{replica} is ready again")
    ready = time.monotonic()
    wait_until(lambda: model.is_sharing(without=old), f"{replica} has joined again")
    return time.monotonic() - ready


def has_engine(replica: str) -> bool:
    try:
        return bool(processes.of_replica(replica))
    except LookupError:
        return False


def test_a_replica_that_hangs_is_dropped_and_joins_again_by_itself(separate: Model) -> None:
    """Suspended for longer than its lease, it is no longer a donor. Resumed, it shares again by
    itself, as the same incarnation with all of its holdings."""
    cold = separate.compute(separate.first, short_question(400))
    member = separate.replicas()[separate.first]
    with processes.frozen(processes.of_member(member).all()):
        wait_until(lambda: separate.first not in separate.replicas(), "its lease has ended")
        # No other replica holds it.
        assert separate.compute(separate.second, short_question(400)).tokens == cold.tokens
    wait_until(lambda: separate.first in separate.replicas(), "it has joined again")
    wait_until(
        lambda: separate.replicas()[separate.first]["holdings"] >= member["holdings"],
        "its holdings are published again",
    )
    assert separate.replicas()[separate.first]["incarnation"] == member["incarnation"]
    separate.share(separate.first, separate.second, short_question(401))
    separate.share(separate.second, separate.first, short_question(402))


@pytest.mark.parametrize(
    ("victim", "number", "seed"), [("worker", 0, 410), ("engine", 1, 420), ("model", 0, 430)]
)
def test_a_killed_replica_comes_back_and_shares(
    separate: Model,
    victim: str,
    number: int,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    """The dead incarnation's entries disappear, the survivor answers throughout, and the replica
    that xinference starts in its place shares."""
    both = (separate.first, separate.second)
    replica, survivor = both[number], both[1 - number]
    cold = separate.compute(replica, short_question(seed))
    member = separate.replicas()[replica]
    doomed = processes.of_member(member)
    processes.kill(doomed.workers[0] if victim == "worker" else getattr(doomed, victim))
    # If only the engine died, the model process stays until its next request.
    processes.wait_gone(doomed.all() if victim == "model" else doomed.all()[1:])

    assert separate.answer(survivor, short_question(seed)).tokens == cold.tokens
    wait_until(lambda: member["incarnation"] not in separate.incarnations(), "it is dropped")
    if victim != "model":
        with pytest.raises((OSError, xoscar.ServerClosed)):
            separate.answer(replica, short_question(seed + 1))
    processes.wait_gone(doomed.all())

    seconds = wait_back(separate, replica, member["incarnation"])
    record_property("seconds from ready until it shares", seconds)
    separate.share(survivor, replica, short_question(seed + 2))
    separate.share(replica, survivor, short_question(seed + 3))
    assert member["incarnation"] not in separate.incarnations()
