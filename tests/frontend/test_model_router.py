"""Requests go to the replica that answers first, wait where none accepts them, and move once if
theirs is lost."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.frontend.cluster import CHUNK, Cluster, document, keys
from tests.tracker_pools import let_others_run
from xinference_xavier.frontend import model_router as module
from xinference_xavier.frontend.model_router import ModelRouter, QueueFullError, Route
from xinference_xavier.protocol.load import RequestReport
from xinference_xavier.protocol.tracker import pack, without_rank
from xinference_xavier.routing.router import Router
from xinference_xavier.routing.texts import Text


async def route(cluster: Cluster, text: Text = module.NO_TEXT, session: str = "") -> Route:
    found = await cluster.router.route(text, session)
    assert found is not None
    return found


async def learn(cluster: Cluster, text: Text, tokens: int, name: str) -> str:
    """A replica computes the text; returns which."""
    first = await route(cluster, text)
    cluster.router.named(first, name)
    known = keys(name, tokens // CHUNK)
    cluster.tell(requests=[RequestReport(name, tokens, pack(known))])
    cluster.hold(first.replica, known)
    cluster.router.answered(first, streamed=True)
    cluster.router.end(first)
    return first.replica


async def full(**serving: int) -> tuple[Cluster, Route]:
    """A replica with as many requests as it accepts: one."""
    cluster = Cluster("m-0", request_limit=1, **serving)
    return cluster, await route(cluster)


async def waiting(cluster: Cluster, count: int = 1) -> list[asyncio.Task[Route]]:
    """Requests that wait."""
    tasks = [asyncio.create_task(route(cluster)) for _ in range(count)]
    await let_others_run()
    assert not any(task.done() for task in tasks)
    return tasks


async def test_a_request_goes_to_the_smallest_backlog() -> None:
    cluster = Cluster("m-0", "m-1", "m-2")
    cluster.tell(*(cluster.load(f"m-{number}", 3.0 - number) for number in range(3)))
    found = await route(cluster)
    assert (found.replica, found.choice.reason) == ("m-2", "backlog")
    assert found.choice.terms.backlog == pytest.approx(1.0)


async def test_a_burst_spreads_before_anybody_reports() -> None:
    cluster = Cluster("m-0", "m-1", "m-2")
    chosen = Counter([(await route(cluster, document(f"d{n}"))).replica for n in range(9)])
    assert chosen == {"m-0": 3, "m-1": 3, "m-2": 3}


async def test_a_known_prefix_draws_requests_while_its_replica_is_not_busy() -> None:
    cluster = Cluster("m-0", "m-1")
    text = document("long")
    owner = await learn(cluster, text, 5000, "long")
    cluster.rest(3600.0)
    again = await route(cluster, text)
    assert (again.replica, again.choice.reason) == (owner, "local")
    cluster.router.end(again)
    cluster.tell(cluster.load(owner, 60.0))
    elsewhere = await route(cluster, text)
    assert (elsewhere.replica == owner, elsewhere.choice.reason) == (False, "fetch")
    assert elsewhere.choice.terms.fetch < 0.1 < cluster.router.explain(text)[owner]["backlog"]


async def test_a_request_follows_another_with_the_same_new_text() -> None:
    """Waiting for the rest of it takes less time than computing all of it elsewhere."""
    cluster = Cluster("m-0", "m-1", "m-2")
    first = await route(cluster, document("new"))
    cluster.now += 0.9 * first.choice.terms.compute
    assert (await route(cluster, document("new"))).replica == first.replica
    assert (await route(cluster, document("other"))).replica != first.replica


async def test_a_text_that_is_being_computed_is_expected_by_its_keys() -> None:
    """From the report on, the router knows the text by other keys than before."""
    cluster = Cluster("m-0", "m-1", "m-2")
    text = document("new")
    first = await route(cluster, text)
    cluster.router.named(first, "first")
    cluster.tell(requests=[RequestReport("first", 5000, pack(keys("first", 39)))])
    cluster.now += 0.9 * first.choice.terms.compute
    assert (await route(cluster, text)).replica == first.replica


async def test_a_session_decides_between_equals() -> None:
    cluster = Cluster("m-0", "m-1", "m-2", "m-3")
    first = await route(cluster, session="chat")
    cluster.router.end(first)
    cluster.rest(60.0)
    for _ in range(5):
        again = await route(cluster, session="chat")
        assert again.replica == first.replica
        cluster.router.end(again)
        cluster.now += 1.0


@pytest.mark.parametrize("launched", [True, False])
async def test_by_backlog_only_if_so_configured(launched: bool) -> None:
    cluster = Cluster("m-0", "m-1", routing="backlog" if launched else "auto")
    if not launched:
        cluster.configure(routing="backlog")
    owner = await learn(cluster, document("long"), 5000, "long")
    cluster.now += 3600.0
    other = next(name for name in ("m-0", "m-1") if name != owner)
    cluster.tell(cluster.load(owner, 0.1), cluster.load(other, 0.0))
    assert (await route(cluster, document("long"))).replica == other


async def test_nothing_is_routed_while_it_is_off() -> None:
    cluster = Cluster("m-0", routing="off")
    assert await cluster.router.route() is None
    cluster.configure(routing="auto")
    assert (await route(cluster)).replica == "m-0"
    cluster.configure(routing="off")
    assert await cluster.router.route() is None
    assert cluster.router.counts.unrouted == 2


async def test_nothing_is_routed_while_no_replica_reports() -> None:
    assert await ModelRouter().route() is None
    cluster = Cluster("m-0", "m-1")
    cluster.now += 9.9
    assert await cluster.router.route() is not None
    cluster.now += 0.1
    assert await cluster.router.route() is None
    cluster.tell(cluster.load("m-1"))
    assert (await route(cluster)).replica == "m-1"


async def test_a_clock_that_jumps_ahead_costs_no_request() -> None:
    """All reports are old at once. The next ones are not."""
    cluster = Cluster("m-0", "m-1")
    before = await route(cluster, document("before"))
    cluster.now += 3600.0
    assert await cluster.router.route() is None  # in turn, as without a router
    cluster.router.answered(before, streamed=True)
    cluster.router.end(before)
    cluster.tell(cluster.load("m-0", 3.0), cluster.load("m-1", 1.0))
    assert (await route(cluster)).replica == "m-1"


async def test_a_router_that_starts_knows_of_the_requests_that_others_sent() -> None:
    """A restarted process has no history of its own."""
    cluster = Cluster(request_limit=2)
    cluster.join("m-0", "m-1")
    cluster.tell(cluster.load("m-0", 0.0, requests=2), cluster.load("m-1", 3.0, requests=1))
    assert (await route(cluster)).replica == "m-1"


async def test_requests_wait_in_order_where_all_replicas_are_at_their_limit() -> None:
    cluster = Cluster("m-0", "m-1", request_limit=1)
    running = [await route(cluster), await route(cluster)]
    assert {each.replica for each in running} == {"m-0", "m-1"}
    first, second = await waiting(cluster, 2)
    cluster.router.end(running[0])
    assert (await first).replica == running[0].replica
    assert not second.done()
    cluster.join("m-2")
    assert (await second).replica == "m-2"
    assert cluster.router.counts.waited == 2


async def test_a_request_does_not_overtake_those_that_wait() -> None:
    """Not even to a replica that has been left alone for long enough."""
    cluster = Cluster("m-0", "m-1", request_limit=1)
    moved = await route(cluster)
    left_alone = moved.replica
    assert await cluster.router.move(moved)
    (first,) = await waiting(cluster)
    cluster.rest(module.CLOSED - 1.0)
    cluster.now += 1.0
    (second,) = await waiting(cluster)
    cluster.tell(cluster.load("m-0"), cluster.load("m-1"))
    assert (await first).replica == left_alone
    second.cancel()


async def test_an_error_while_choosing_is_of_the_request_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def choose(*_: object, **__: object) -> None:
        raise IndexError("a defect")

    cluster, running = await full()
    (first,) = await waiting(cluster)
    monkeypatch.setattr(Router, "choose", choose)
    cluster.router.end(running)
    with pytest.raises(IndexError, match="a defect"):
        await first


async def test_beyond_its_bound_the_queue_refuses_requests() -> None:
    cluster, _ = await full(queue=1)
    (task,) = await waiting(cluster)
    with pytest.raises(QueueFullError) as refused:
        await cluster.router.route()
    assert refused.value.retry_after >= 1
    assert cluster.router.counts.refused == 1
    task.cancel()


async def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, _ = await full()
    cluster.router._queue.patience = 0.01
    with pytest.raises(QueueFullError):
        await cluster.router.route()
    assert not cluster.router._waiting


async def test_a_client_that_goes_leaves_the_queue() -> None:
    cluster, running = await full()
    gone, stays = await waiting(cluster, 2)
    gone.cancel()
    await asyncio.wait({gone})
    cluster.router.end(running)
    assert (await stays).replica == "m-0"


async def test_a_client_that_goes_when_its_turn_comes_keeps_no_place() -> None:
    cluster, running = await full()
    gone, stays = await waiting(cluster, 2)
    cluster.router.end(running)
    gone.cancel()  # it has its place, but did not run since
    assert (await stays).replica == "m-0"


async def test_requests_that_wait_for_a_router_that_is_closed_go_in_turn() -> None:
    cluster, running = await full()
    asking = asyncio.create_task(cluster.router.route())
    moving = asyncio.create_task(cluster.router.move(running, module.Failure.FULL))
    await let_others_run()
    cluster.router.close()
    assert await asking is None
    assert not await moving
    assert await cluster.router.route() is None
    cluster.router.end(running)
    assert not cluster.router._routes
    assert not cluster.router._queue.first


async def expires(cluster: Cluster, running: Route) -> None:
    """The tracker is lost."""
    cluster.now += 10.0
    cluster.router.admit()


async def is_closed(cluster: Cluster, running: Route) -> None:
    assert not await cluster.router.move(running)
    cluster.router.end(running)


async def leaves(cluster: Cluster, running: Route) -> None:
    cluster.tell(gone=["m-0"])


@pytest.mark.parametrize("happens", [expires, is_closed, leaves])
async def test_requests_that_wait_go_in_turn_once_no_replica_works(happens: Any) -> None:
    cluster, running = await full()
    asking = [asyncio.create_task(cluster.router.route()) for _ in range(2)]
    await let_others_run()
    await happens(cluster, running)
    cluster.join("m-1")  # they have gone
    assert await asyncio.gather(*asking) == [None, None]
    assert cluster.router.loads()["m-1"].requests == 0


async def test_ten_thousand_requests_wait() -> None:
    cluster, running = await full(queue=10_000)
    cluster.router._queue.patience = 600.0  # of a busy machine
    tasks = await waiting(cluster, 10_000)
    for task in tasks:
        cluster.router.end(running)
        running = await task
    assert cluster.router.counts.waited == 10_000


async def test_requests_of_a_replica_that_is_lost_move_once() -> None:
    cluster = Cluster("m-0", "m-1")
    moving = await route(cluster)
    other = await route(cluster)
    cluster.tell(gone=[moving.replica])
    assert moving.lost.is_set()
    assert not other.lost.is_set()
    assert await cluster.router.move(moving)
    assert moving.replica == other.replica
    assert not moving.lost.is_set()
    assert not await cluster.router.move(moving), "it may be the cause"


async def test_a_request_whose_answer_has_begun_does_not_move() -> None:
    cluster = Cluster("m-0", "m-1")
    begun = await route(cluster)
    cluster.router.answered(begun, streamed=True)
    cluster.tell(gone=[begun.replica])
    assert not begun.lost.is_set()
    assert not await cluster.router.move(begun)


async def test_a_replica_that_failed_a_request_gets_no_other_for_a_while() -> None:
    """Its engine may go on reporting."""
    cluster = Cluster("m-0", "m-1")
    failed = await route(cluster)
    first = failed.replica
    assert await cluster.router.move(failed)
    assert failed.replica != first
    assert {(await route(cluster)).replica for _ in range(4)} == {failed.replica}
    cluster.now += module.CLOSED - 1.0
    cluster.tell(cluster.load(first), cluster.load(failed.replica, 3.0))
    assert (await route(cluster)).replica == failed.replica
    cluster.now += 1.0
    assert (await route(cluster)).replica == first


async def test_a_replica_that_is_full_gets_none_until_it_reports() -> None:
    cluster = Cluster("m-0", "m-1")
    refused = await route(cluster)
    first = refused.replica
    assert await cluster.router.move(refused, module.Failure.FULL)
    assert {(await route(cluster)).replica for _ in range(4)} == {refused.replica}
    cluster.tell(cluster.load(first))
    assert (await route(cluster)).replica == first


async def test_a_replica_that_does_not_serve_yet_costs_a_request_nothing() -> None:
    """Neither its place in the queue nor its one move. The replica gets requests a second later."""
    cluster, running = await full()
    (first,) = await waiting(cluster)
    cluster.now += 1.0
    (second,) = await waiting(cluster)
    cluster.join("m-1")
    early = await first
    assert early.replica == "m-1"
    cluster.now += 1.0
    (third,) = await waiting(cluster)  # the queue is full
    for _ in range(2):
        moving = asyncio.create_task(cluster.router.move(early, module.Failure.NOT_SERVING))
        await asyncio.sleep(0)
        cluster.tell(cluster.load("m-1"))
        assert not moving.done()
        cluster.now += 2.0
        cluster.tell(cluster.load("m-1"))
        assert await moving
        assert early.replica == "m-1"
    assert not second.done()
    cluster.router.end(running)
    assert (await second).replica == "m-0"
    cluster.router.end(await second)
    cluster.router.end(await third)
    assert await cluster.router.move(early), "lost for the first time"
    assert early.replica == "m-0"


async def test_a_request_does_not_come_back_for_ever() -> None:
    cluster = Cluster("m-0", "m-1")
    asked = await route(cluster)
    cluster.rest(module.PATIENCE)
    assert not await cluster.router.move(asked, module.Failure.NOT_SERVING)


RANKS = ("m-rep0_dp0", "m-rep0_dp1", "m-rep1_dp0", "m-rep1_dp1")


@pytest.mark.parametrize("gone", [False, True])
async def test_a_replica_fails_with_all_its_ranks(gone: bool) -> None:
    for seed in range(50):
        cluster = Cluster(*RANKS)
        cluster.router._router._source.seed(seed)
        asked = await route(cluster)
        failed = asked.replica
        if gone:
            cluster.tell(gone=[failed])
        assert await cluster.router.move(asked)
        assert without_rank(asked.replica) != without_rank(failed)


async def test_ranks_have_one_limit() -> None:
    cluster = Cluster(*RANKS[:2], request_limit=4)
    running = [await route(cluster) for _ in range(4)]
    for number, each in enumerate(running):
        cluster.router.named(each, f"{number}")
    (task,) = await waiting(cluster)
    at_one = cluster.load(RANKS[0], requests=4, known=("0", "1", "2", "3"))
    cluster.tell(at_one, cluster.load(RANKS[1]))
    assert not any(each.accepts for each in cluster.router.loads().values())
    cluster.router.end(running[0])
    refused = await task  # the replica chooses the rank, so one report has all
    assert await queued(cluster.router.move(refused, module.Failure.FULL))


async def queued(moving: Coroutine[Any, Any, bool]) -> bool:
    """Whether the request waits. It is cancelled."""
    task = asyncio.ensure_future(moving)
    await let_others_run()
    return task.cancel()


async def test_a_request_fails_with_the_last_replica() -> None:
    cluster = Cluster("m-0")
    assert not await cluster.router.move(await route(cluster))


async def test_replicas_that_a_complete_report_lacks_are_gone() -> None:
    """The tracker was lost with what it knew."""
    cluster = Cluster("m-0", "m-1")
    lost = await route(cluster)
    kept = next(name for name in ("m-0", "m-1") if name != lost.replica)
    cluster.tell(cluster.load(kept), complete=True)
    assert lost.lost.is_set()


async def test_a_malformed_observation_changes_nothing() -> None:
    cluster = Cluster("m-0")
    with pytest.raises(ValueError, match="malformed observation"):
        next(cluster.router.observe(("hello",)))  # type: ignore[arg-type]
    assert (await route(cluster)).replica == "m-0"


async def test_a_request_that_has_ended_takes_no_place_though_its_replica_still_reports_it() -> (
    None
):
    cluster = Cluster("m-0", request_limit=1)
    ended = await route(cluster)
    cluster.router.named(ended, "ended")
    cluster.router.end(ended)
    cluster.tell(cluster.load("m-0", requests=1, known=("ended",)))
    again = await route(cluster)
    cluster.router.end(again)
    cluster.tell(cluster.load("m-0", requests=1, known=("somebody else's",)))
    (task,) = await waiting(cluster)
    task.cancel()


async def test_a_text_is_learned_though_its_answer_ended_before_its_report() -> None:
    cluster = Cluster("m-0", "m-1")
    text = document("quick")
    first = await route(cluster, text)
    cluster.router.named(first, "quick")
    cluster.router.answered(first, streamed=True)
    cluster.router.end(first)
    known = keys("quick", 39)
    cluster.tell(requests=[RequestReport("quick", 5000, pack(known))])
    cluster.hold(first.replica, known)
    cluster.rest(3600.0)
    again = await route(cluster, text)
    assert (again.replica, again.choice.reason) == (first.replica, "local")


async def test_only_the_names_of_the_latest_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 10)
    cluster = Cluster("m-0", "m-1")
    for number in range(50):
        ended = await route(cluster, document(f"{number}"))
        cluster.router.named(ended, f"name {number}")
        cluster.router.end(ended)
        cluster.router.end(ended)
    assert not cluster.router._routes
    assert [*cluster.router._names] == [f"name {number}" for number in range(40, 50)]
    assert cluster.router._router.loads.running.sum() == 0


async def test_forecasts_are_compared_with_the_first_bytes_by_reason() -> None:
    cluster = Cluster("m-0")
    cluster.tell(cluster.load("m-0", 2.0))
    asked = await route(cluster, document("long"))
    predicted = sum(asked.choice.terms)
    cluster.now += 5.0
    cluster.router.answered(asked, streamed=True)
    found = cluster.router.report()["first_bytes"][asked.choice.reason]
    sums = {name: seconds["sum"] for name, seconds in found.items()}
    assert sums == {"predicted": predicted, "actual": 5.0, "error": abs(5.0 - predicted)}


async def test_it_explains_what_it_would_choose() -> None:
    cluster = Cluster("m-0", "m-1")
    cluster.tell(cluster.load("m-0", 2.0))
    found = cluster.router.explain(document("long"))
    assert found["m-0"]["backlog"] == pytest.approx(2.0)
    assert found["m-0"]["compute"] == found["m-1"]["compute"] > 1.0
    assert cluster.router.report()["choices"] == {}


async def test_it_explains_who_would_prefill() -> None:
    cluster = Cluster("m-0", "m-1")
    decodes, prefills = (cluster.serving._replace(role=role) for role in ("decode", "prefill"))
    busy = cluster.load("m-1", serving=decodes, requests=1)
    cluster.tell(cluster.load("m-0", serving=prefills), busy)
    found = cluster.router.explain(document("long"))
    assert found.keys() == {"m-1"}, "the other one answers nobody"
    assert found["m-1"].pop("fetch") > 1.0
    assert found["m-1"] == {"backlog": 0.0, "compute": 0.0, "prefill": "m-0"}


async def test_a_replica_that_drains_ends_its_requests_and_gets_no_more() -> None:
    cluster = Cluster("m-0", "m-1", queue=2)
    text = document("long")
    owner = await learn(cluster, text, 5000, "long")
    other = "m-1" if owner == "m-0" else "m-0"
    begun = await route(cluster, text)
    cluster.tell(cluster.load(owner)._replace(draining=True))
    for _ in range(3):
        assert (await route(cluster, text)).replica == other
    cluster.tell(cluster.load(owner)._replace(draining=True), cluster.load(other, 3600.0))
    assert (await route(cluster, text, "session")).replica == other
    assert not begun.lost.is_set()
    assert cluster.router.explain(text).keys() == {other}
    cluster.tell(cluster.load(owner))
    assert (await route(cluster, text)).replica == owner


async def test_waiting_requests_go_elsewhere_too() -> None:
    cluster = Cluster("m-0", "m-1", queue=2, request_limit=1)
    running = [await route(cluster) for _ in range(2)]
    (task,) = await waiting(cluster)
    drains, stays = (each.replica for each in running)
    cluster.tell(cluster.load(drains, requests=1)._replace(draining=True))
    cluster.router.end(running[0])
    await asyncio.sleep(0)
    assert not task.done()
    cluster.router.end(running[1])
    assert (await task).replica == stays


async def test_where_all_drain_requests_go_in_turn() -> None:
    cluster = Cluster("m-0")
    cluster.tell(cluster.load("m-0")._replace(draining=True))
    assert await cluster.router.route() is None
