"""A decode replica leaves a prefill to a prefill replica if less is lost by waiting for it."""

import random
from collections.abc import Callable

import pytest

from tests.routing.holdings import Held
from xinference_xavier.routing.choice import Choice, Chunks, Prefill, Prompt
from xinference_xavier.routing.load import Rates, Report
from xinference_xavier.routing.router import Router

SIZE = Chunks(tokens=100, bytes=1000)
RATES = Rates(token_s=0.001, fetch_s=0.05, byte_s=1e-5)
"""A chunk takes 0.1 s to compute, and 0.01 s to fetch."""
KEYS = [b"%d" % number for number in range(10)]
PROMPT = Prompt(1000, KEYS)


class Cluster:
    """A prefill replica `p`, and `d` and `e`, which decode."""

    def __init__(self, threshold: int | None = None, **held: list[bytes]) -> None:
        self.held = Held({"p": [], "d": [], "e": []} | held)
        self.router = Router(self.held, SIZE, random.Random(0), threshold=threshold)
        self.report("p", "prefill")
        self.report("d", "decode")
        self.report("e", "decode")

    def report(
        self, name: str, role: str, backlog: float = 0.0, requests: int = 0, made: float = -1.0
    ) -> None:
        self.router.loads.report(name, Report(made, 0, backlog, requests, RATES, role=role))

    def choose(self, prompt: Prompt = PROMPT, *, whole: bool = False) -> Choice:
        choice = self.router.choose(prompt, 0.0, whole=whole)
        return choice


def busy(cluster: Cluster, *names: str, requests: int = 4) -> None:
    for name in names:
        cluster.report(name, "decode", requests=requests, made=0.0)


def test_a_replica_that_answers_others_leaves_a_long_prefill() -> None:
    cluster = Cluster()
    busy(cluster, "d", "e")
    choice = cluster.choose()
    assert choice.replica in "de"
    assert choice.reason == "prefill"
    assert choice.prefill == Prefill("p", 0.0, pytest.approx(1.0))
    assert choice.terms == pytest.approx((0.0, 1.05, 0.0))


def test_an_idle_one_computes_by_itself() -> None:
    """There is nobody whom it would keep waiting, and a transfer takes time."""
    choice = Cluster().choose()
    assert (choice.reason, choice.prefill) == ("backlog", None)
    assert choice.terms == pytest.approx((0.0, 0.0, 1.0))


@pytest.mark.parametrize(("decoding", "left"), [(0, False), (1, True)])
def test_what_counts_is_the_time_that_others_lose(decoding: int, left: bool) -> None:
    """The request waits 0.05 s longer, each of the others would wait for a second."""
    cluster = Cluster()
    busy(cluster, "d", "e", requests=decoding)
    assert (cluster.choose().prefill is not None) == left


@pytest.mark.parametrize(("queue", "left"), [(0.9, True), (1.1, False)])
def test_a_queue_longer_than_the_prefill_is_not_worth_it(queue: float, left: bool) -> None:
    cluster = Cluster()
    busy(cluster, "d", "e", requests=100)
    cluster.report("p", "prefill", backlog=queue, made=0.0)
    assert (cluster.choose().prefill is not None) == left


@pytest.mark.parametrize(("threshold", "left"), [(999, True), (1000, False)])
def test_a_threshold_replaces_the_forecast(threshold: int, left: bool) -> None:
    assert (Cluster(threshold).choose().prefill is not None) == left


def test_what_is_at_hand_is_answered_at_once() -> None:
    cluster = Cluster(threshold=500, d=KEYS[:6])
    choice = cluster.choose()
    assert (choice.replica, choice.reason, choice.prefill) == ("d", "local", None)


def test_replicas_of_any_role_prefill_for_themselves() -> None:
    cluster = Cluster()
    for name in "de":
        cluster.report(name, "any", requests=4, made=0.0)
    assert cluster.choose().prefill is None


def test_a_prefill_replica_answers_only_if_nobody_else_can() -> None:
    cluster = Cluster(p=KEYS)
    assert cluster.choose().replica in "de"
    cluster.router.lost("d")
    cluster.router.lost("e")
    assert cluster.choose().replica == "p"


def test_a_choice_tells_who_could_answer_and_who_would_prefill() -> None:
    cluster = Cluster()
    busy(cluster, "d")
    found = cluster.choose().explained({name: name.upper() for name in "pde"})
    assert found.keys() == {"D", "E"}
    assert found["D"]["prefill"] == "P"
    assert "prefill" not in found["E"]


def test_without_a_prefill_replica_the_others_do_it_all() -> None:
    cluster = Cluster()
    busy(cluster, "d", "e")
    cluster.router.lost("p")
    assert cluster.choose().reason == "backlog"


def test_a_whole_request_is_not_divided() -> None:
    cluster = Cluster()
    busy(cluster, "d", "e")
    assert cluster.choose(whole=True).prefill is None


def test_the_prefill_keeps_the_prefill_replica_busy_and_no_other() -> None:
    cluster = Cluster(threshold=0)
    choice = cluster.choose()
    cluster.router.sent("r", choice, 0.0)
    known = cluster.router.loads.known(0.0)
    assert known["p"].backlog_s == pytest.approx(1.0)
    assert known[choice.replica].backlog_s == 0.0
    cluster.router.prefilled("r")
    assert cluster.router.loads.known(0.0)["p"].requests == 0
    assert cluster.router.loads.known(0.0)[choice.replica].requests == 1


@pytest.mark.parametrize("end", [Router.ended, Router.failed])
def test_a_request_that_ends_takes_its_prefill_along(end: Callable[[Router, str], object]) -> None:
    cluster = Cluster(threshold=0)
    cluster.router.sent("r", cluster.choose(), 0.0)
    assert cluster.router.failed("r"), "it can move, and its prefill goes on"
    assert cluster.router.loads.known(0.0)["p"].requests == 1
    end(cluster.router, "r")
    assert cluster.router.loads.known(0.0)["p"].requests == 0


def test_the_next_question_follows_the_first() -> None:
    """Both replicas will hold the prompt."""
    cluster = Cluster(threshold=0)
    first = cluster.choose()
    cluster.router.sent("r", first, 0.0)
    assert cluster.choose().forecast.runs.tolist().count(10) == 1


def test_a_replica_that_accepts_nothing_is_left_out() -> None:
    cluster = Cluster(threshold=0)
    cluster.router.loads.close("d", 10.0)
    assert cluster.choose().replica == "e"


def test_a_prefill_is_work_of_the_replica_that_does_it() -> None:
    """New prompts do not avoid the replica that answers."""
    cluster = Cluster()
    busy(cluster, "d", "e")
    choice = cluster.choose()
    assert choice.prefill is not None
    cluster.router.sent("first", choice, 0.0)
    (other,) = {"d", "e"} - {choice.replica}
    cluster.report(choice.replica, "decode", made=0.1)
    cluster.report(other, "decode", backlog=0.3, made=0.1)
    new = Prompt(1000, [b"new %d" % number for number in range(10)])
    assert cluster.choose(new, whole=True).replica == choice.replica
