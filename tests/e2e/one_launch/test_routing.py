"""Under xinference a request goes to the replica that answers it first."""

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from examples.documents import document
from tests.e2e.model import ROWS, TIMEOUT, Model, cached_tokens, wait_until
from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, question, route_of
from tests.harness import processes

ERROR = re.compile(r'"error": *["{]')
TOKENS = 200
"""More than are computed until the next requests arrive. These wait for half a minute at most."""


@pytest.fixture(scope="module", autouse=True)
def routed(model: Model) -> Iterator[None]:
    switch_routing(model, "auto")
    with ThreadPoolExecutor(2) as clients:  # so that both replicas know how fast they are
        all_of([clients.submit(model.post, text) for text in itertools.islice(documents(1), 6)])
    yield
    switch_routing(model, "off")


def switch_routing(model: Model, mode: str) -> None:
    model.cluster.call("PATCH", f"/v1/xavier/{model.uid}", {"routing": mode})

    def is_switched() -> bool:
        return bool(route_of(model.post("Hello"))[0]) == (mode == "auto")

    wait_until(is_switched, f"routing is {mode}")


def all_of(futures: Sequence[Future[requests.Response]]) -> list[requests.Response]:
    return [future.result(TIMEOUT) for future in futures]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_questions_about_a_document_go_where_it_was_computed(model: Model, path: str) -> None:
    text = next(text for text in documents(len(path)) if beyond_chunks(model, path, text) < 32)

    def put(number: int) -> requests.Response:
        return model.post(f"{text} question {number}", path=path)

    replica, reason = route_of(put(0))
    assert reason == "backlog"

    def offered() -> bool:
        chunks = explained(model, path, text)["chunks"]
        return all("pool" in chunk["replicas"].values() for chunk in chunks)

    wait_until(offered, "the tracker knows who holds the document")
    asked = []
    for number in range(1, 5):
        wait_until(
            lambda: not model.loads()[replica]["backlog_s"], "nothing keeps it from answering first"
        )
        asked.append(put(number))
    why = [answer.headers["x-xavier-route"] for answer in asked]
    assert [route_of(answer) for answer in asked] == [(replica, "local")] * 4, why
    assert min(map(cached_tokens, asked)) > 2000


def documents(seed: int) -> Iterator[str]:
    return (document(1000 * seed + number, ROWS) for number in itertools.count())


def beyond_chunks(model: Model, path: str, text: str) -> int:
    """The tokens after the last whole chunk, which every replica has to compute. If they are few,
    it does not matter that two replicas of equal speed never measure quite the same."""
    found = explained(model, path, text)
    return int(found["prompt_tokens"] % found["chunk_tokens"])


def explained(model: Model, path: str, text: str) -> dict[str, Any]:
    asked = model.cluster.call("POST", f"/v1/xavier/{model.uid}/explain", question(path, text))
    return dict(asked)


@pytest.mark.parametrize("stream", [True, False])
def test_every_text_route_is_routed(model: Model, stream: bool) -> None:
    for path in TEXT_ROUTES:
        answer = model.post("Hello", 4, path=path, stream=stream)
        assert route_of(answer)[0], path
        assert not ERROR.search(answer.text), path
    assert route_of(model.post("Hello", path="/v1/messages/count_tokens")) == ("", "")


def test_requests_beyond_the_limit_wait(model: Model) -> None:
    """Without a router, xinference would refuse every fifth request and more."""
    with ThreadPoolExecutor(16) as clients:
        futures = [clients.submit(model.post, f"count to {n}", 20) for n in range(16)]
        answers = all_of(futures)
    replicas = [route_of(answer)[0] for answer in answers]
    assert min(replicas.count(name) for name in set(replicas)) >= 4
    assert len(set(replicas)) == 2
    assert model.status()["routing"]["waited"] > 0


def test_an_operator_switches_routing_off_and_on(model: Model) -> None:
    switch_routing(model, "off")
    switch_routing(model, "auto")


@pytest.mark.long
def test_a_replica_that_is_removed_ends_its_answers(model: Model) -> None:
    """Meanwhile requests go to the other replica, which gets what only this one holds."""
    gone, stays = model.second, model.first
    text = next(documents(30))
    for number in range(2):
        model.answer(gone, f"{text} question {number}")
    with ThreadPoolExecutor(8) as clients:
        streams = [
            clients.submit(model.post, f"count to {n}", TOKENS, stream=True) for n in range(4)
        ]
        wait_until(
            lambda: requests_at(model) == {gone: 2, stays: 2}, "both replicas are at their limit"
        )
        removal = clients.submit(model.cluster.remove_replica, model.uid, 1)
        wait_until(lambda: model.replicas()[gone]["draining"], "it drains")
        meanwhile = [clients.submit(model.post, f"meanwhile {n}") for n in range(3)]
        answers, others = all_of(streams), all_of(meanwhile)
        removal.result(TIMEOUT)
    assert {route_of(answer)[0] for answer in answers} == {gone, stays}
    for answer in answers:
        assert not ERROR.search(answer.text)
        assert answer.text.count('"text":') >= TOKENS
        assert f'"completion_tokens": {TOKENS}' in answer.text.splitlines()[-2], "its last piece"
    assert {route_of(answer)[0] for answer in others} == {stays}
    wait_until(lambda: [*model.replicas()] == [stays], "it left")
    assert cached_tokens(model.post(text)) > 2000
    model.cluster.add_replica(model.uid)
    model.wait_until_sharing()
    wait_until(lambda: both_take_requests(model), "both replicas take requests")


def requests_at(model: Model) -> dict[str, int]:
    """Requests by replica."""
    return {replica: each["requests"] for replica, each in model.loads().items()}


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_no_request_fails_that_had_not_begun_to_answer(model: Model, stream: bool) -> None:
    """A replica is killed while its requests are being computed."""
    lost = model.replicas()[model.first]["incarnation"]
    with ThreadPoolExecutor(4) as clients:
        prompts = [f"{number} {document(10 + number, 3 * ROWS)}" for number in range(4)]
        futures = [clients.submit(model.post, prompt, stream=stream) for prompt in prompts]
        wait_until(lambda: sum(map(bool, requests_at(model).values())) == 2, "both compute")
        processes.kill(processes.model_process(model.first))
        answers = all_of(futures)
    assert not any(ERROR.search(answer.text) for answer in answers)
    assert model.status()["routing"]["moved"] > 0
    model.wait_until_sharing(without=lost)
    wait_until(lambda: both_take_requests(model), "both replicas take requests")


def both_take_requests(model: Model) -> bool:
    with ThreadPoolExecutor(4) as clients:
        futures = [clients.submit(model.post, "Hello", 8) for _ in range(4)]
        return len({route_of(answer)[0] for answer in all_of(futures)}) == 2


@pytest.mark.long
def test_a_replica_that_hangs_keeps_no_request(model: Model) -> None:
    with processes.frozen(processes.of_replica(model.first).all()):
        with ThreadPoolExecutor(4) as clients:
            futures = [clients.submit(model.post, f"Hello {number}") for number in range(4)]
            answers = all_of(futures)
        assert {route_of(answer)[0] for answer in answers} <= {model.first, model.second}
        assert route_of(model.post("Hello"))[0] == model.second
    model.wait_until_sharing()
