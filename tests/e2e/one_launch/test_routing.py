"""Under xinference a request goes to the replica that answers it first."""

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import requests

from examples.documents import document
from examples.local_cluster import LocalCluster
from tests.e2e import asking
from tests.e2e.asking import ROWS, TIMEOUT, cached_tokens
from tests.e2e.conftest import can_fetch, wait_for_engine, wait_until
from tests.e2e.one_launch.conftest import UID
from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, question, route_of
from tests.harness import processes
from tests.harness.clusters import ask_replica

ERROR = re.compile(r'"error": *["{]')
TOKENS = 200
"""More than are computed until the next requests arrive. These wait for half a minute at most."""
post, ask = partial(asking.post, UID), partial(asking.complete, UID)


@pytest.fixture(scope="module", autouse=True)
def routed(model: LocalCluster) -> Iterator[None]:
    switch_routing(model, "auto")
    with ThreadPoolExecutor(2) as clients:  # so that both replicas know how fast they are
        all_of([clients.submit(ask, model, text) for text in itertools.islice(documents(1), 6)])
    yield
    switch_routing(model, "off")


def switch_routing(cluster: LocalCluster, mode: str) -> None:
    cluster.call("PATCH", f"/v1/xavier/{UID}", {"routing": mode})

    def is_switched() -> bool:
        return bool(route_of(ask(cluster, "Hello"))[0]) == (mode == "auto")

    wait_until(is_switched, f"routing is {mode}")


def all_of(futures: Sequence[Future[requests.Response]]) -> list[requests.Response]:
    return [future.result(TIMEOUT) for future in futures]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_questions_about_a_document_go_where_it_was_computed(
    model: LocalCluster, path: str
) -> None:
    text = next(text for text in documents(len(path)) if beyond_chunks(model, path, text) < 32)

    def put(number: int) -> requests.Response:
        return post(model, path, f"{text} question {number}")

    replica, reason = route_of(put(0))
    assert reason == "backlog"

    explain = f"/v1/xavier/{UID}/explain"

    def offered() -> bool:
        chunks = model.call("POST", explain, question(path, text))["chunks"]
        return all("pool" in chunk["replicas"].values() for chunk in chunks)

    wait_until(offered, "the tracker knows who holds the document")
    asked = []
    for number in range(1, 5):
        wait_until(lambda: backlog(model, replica) == 0, "nothing keeps it from answering first")
        asked.append(put(number))
    why = [answer.headers["x-xavier-route"] for answer in asked]
    assert [route_of(answer) for answer in asked] == [(replica, "local")] * 4, why
    assert min(map(cached_tokens, asked)) > 2000


def documents(seed: int) -> Iterator[str]:
    return (document(1000 * seed + number, ROWS) for number in itertools.count())


def beyond_chunks(cluster: LocalCluster, path: str, text: str) -> int:
    """The tokens after the last whole chunk, which every replica has to compute. If they are few,
    it does not matter that two replicas of equal speed never measure quite the same."""
    found = cluster.call("POST", f"/v1/xavier/{UID}/explain", question(path, text))
    return int(found["prompt_tokens"] % found["chunk_tokens"])


@pytest.mark.parametrize("stream", [True, False])
def test_every_text_route_is_routed(model: LocalCluster, stream: bool) -> None:
    for path in TEXT_ROUTES:
        answer = post(model, path, "Hello", 4, stream=stream)
        assert route_of(answer)[0], path
        assert not ERROR.search(answer.text), path
    assert route_of(post(model, "/v1/messages/count_tokens", "Hello")) == ("", "")


def test_requests_beyond_the_limit_wait(model: LocalCluster) -> None:
    """Without a router, xinference would refuse every fifth request and more."""
    with ThreadPoolExecutor(16) as clients:
        futures = [clients.submit(ask, model, f"count to {n}", 20) for n in range(16)]
        answers = all_of(futures)
    replicas = [route_of(answer)[0] for answer in answers]
    assert min(replicas.count(name) for name in set(replicas)) >= 4
    assert len(set(replicas)) == 2
    assert model.xavier(UID)["routing"]["waited"] > 0


def test_an_operator_switches_routing_off_and_on(model: LocalCluster) -> None:
    switch_routing(model, "off")
    switch_routing(model, "auto")


@pytest.mark.long
def test_a_replica_that_is_removed_ends_its_answers(model: LocalCluster) -> None:
    """Meanwhile requests go to the other replica, which gets what only this one holds."""
    gone, stays = f"{UID}-rep1", f"{UID}-rep0"
    text, status = next(documents(30)), model.replicas(UID)[0]
    for number in range(2):
        ask_replica(status["worker_address"], gone, f"{text} question {number}")
    with ThreadPoolExecutor(8) as clients:
        streams = [
            clients.submit(ask, model, f"count to {n}", TOKENS, stream=True) for n in range(4)
        ]
        wait_until(lambda: loads(model) == {gone: 2, stays: 2}, "both replicas are at their limit")
        removal = clients.submit(model.remove_replica, UID, 1)
        wait_until(lambda: draining(model) == [gone], "it drains")
        meanwhile = [clients.submit(ask, model, f"meanwhile {n}") for n in range(3)]
        answers, others = all_of(streams), all_of(meanwhile)
        removal.result(TIMEOUT)
    assert {route_of(answer)[0] for answer in answers} == {gone, stays}
    for answer in answers:
        assert not ERROR.search(answer.text)
        assert answer.text.count('"text":') >= TOKENS
        assert f'"completion_tokens": {TOKENS}' in answer.text.splitlines()[-2], "its last piece"
    assert {route_of(answer)[0] for answer in others} == {stays}
    members = model.members
    wait_until(lambda: [each["replica"] for each in members(UID).values()] == [stays], "it left")
    assert cached_tokens(ask(model, text)) > 2000
    model.add_replica(UID)
    wait_for_engine(lambda: can_fetch(model, UID, 2), "another one has joined")
    wait_until(lambda: both_take_requests(model), "both replicas take requests")


def loads(cluster: LocalCluster) -> dict[str, int]:
    """Requests by replica."""
    known = cluster.xavier(UID)["routing"]["loads"]
    return {replica: each["requests"] for replica, each in known.items()}


def draining(cluster: LocalCluster) -> list[str]:
    return [each["replica"] for each in cluster.xavier(UID)["replicas"] if each["draining"]]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_no_request_fails_that_had_not_begun_to_answer(model: LocalCluster, stream: bool) -> None:
    """A replica is killed while its requests are being computed."""
    before = model.members(UID).keys()
    with ThreadPoolExecutor(4) as clients:
        prompts = [f"{number} {document(10 + number, 3 * ROWS)}" for number in range(4)]
        futures = [clients.submit(ask, model, prompt, stream=stream) for prompt in prompts]
        wait_until(lambda: busy(model) == 2, "both replicas compute")
        processes.kill(processes.model_process(f"{UID}-rep0"))
        answers = all_of(futures)
    assert not any(ERROR.search(answer.text) for answer in answers)
    assert model.xavier(UID)["routing"]["moved"] > 0
    wait_for_engine(
        lambda: can_fetch(model, UID, 2) and len(model.members(UID).keys() & before) == 1,
        "another engine has taken the place of the killed one",
    )
    wait_until(lambda: both_take_requests(model), "both replicas take requests")


def backlog(cluster: LocalCluster, replica: str) -> float:
    """Seconds, as the router expects."""
    return float(cluster.xavier(UID)["routing"]["loads"][replica]["backlog_s"])


def busy(cluster: LocalCluster) -> int:
    """The number of replicas with requests under way."""
    return sum(requests > 0 for requests in loads(cluster).values())


def both_take_requests(cluster: LocalCluster) -> bool:
    with ThreadPoolExecutor(4) as clients:
        futures = [clients.submit(ask, cluster, "Hello", 8) for _ in range(4)]
        return len({route_of(answer)[0] for answer in all_of(futures)}) == 2


@pytest.mark.long
def test_a_replica_that_hangs_keeps_no_request(model: LocalCluster) -> None:
    with processes.frozen(processes.of_replica(f"{UID}-rep0").all()):
        with ThreadPoolExecutor(4) as clients:
            futures = [clients.submit(ask, model, f"Hello {number}") for number in range(4)]
            answers = all_of(futures)
        assert {route_of(answer)[0] for answer in answers} <= {f"{UID}-rep0", f"{UID}-rep1"}
        assert route_of(ask(model, "Hello"))[0] == f"{UID}-rep1"
    wait_for_engine(lambda: can_fetch(model, UID, 2), "the replica is back")
