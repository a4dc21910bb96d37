"""What a router knows of a replica goes with it."""

import random

from tests.harness.comparisons import compared, compared_index
from xinference_xavier.protocol.tracker import Left, Member, Update
from xinference_xavier.routing.forecast import Chunks, Prompt
from xinference_xavier.routing.known_replica import Replica, Report
from xinference_xavier.routing.router import Router

KEYS = [b"%012d" % number for number in range(4)]


def test_a_new_replica_has_nothing_of_the_lost_one_whose_number_it_gets() -> None:
    """Not what vLLM's own prefix cache had there, either."""
    index = compared_index()
    router = Router(index, Chunks(128, 1), random.Random(0))

    def update(news: Member | Left) -> None:
        index.apply(Update(1, "epoch", False, (news,)))

    def join(name: str) -> Replica:
        update(compared(name))
        replica = Replica(name, name, name, Report(0.0, 0, 0.0, 0))
        router.report(replica, replica.report)
        return replica

    def run(now: float) -> int:
        (found,) = router.forecasts(router._forecaster(Prompt(512, KEYS), now))
        return found.run

    old = join("old")
    assert run(1.0) == 0
    router._cached.add(old.bit, KEYS, 100.0)
    assert run(1.0) == len(KEYS)
    router.lose("old")
    update(Left("old"))
    new = join("new")
    assert (run(2.0), new.bit) == (0, old.bit)
