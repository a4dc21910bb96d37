"""Under xinference a prefill replica computes long prompts, and a decode replica answers them."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from threading import Event
from typing import Any

import pytest
import requests
from xinference.client import Client

from examples.documents import document
from examples.local_cluster import LocalCluster
from tests.e2e.model import ARGUMENTS, ROWS, TIMEOUT, Model, cached_tokens, wait_until
from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, route_of
from tests.harness import processes

UID = "roles"
PREFILL, DECODE = f"{UID}-rep0", f"{UID}-rep1"
UNUSED = count(1000)  # documents
ALONE = {"request_id": "alone", "cache_salt": "alone"}
"""A request with a name and a salt of its own is computed where it is answered."""
COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
SCHEMA = {"schema": {**COLOURS, "required": ["colour"], "additionalProperties": False}}


@pytest.fixture(scope="module")
def model(cluster: LocalCluster) -> Iterator[Model]:
    """Its rows go over Gloo; those of other models of this cluster through shared memory."""
    launch_by_python_client(
        cluster,
        **ARGUMENTS
        | {"xavier_routing": "auto", "xavier_transport": "gloo"}
        | {"xavier_roles": "prefill:1,decode:1"},
    )
    model = Model(cluster, UID)
    try:
        model.wait_until_sharing()
        model.post("Hello")  # the first one only lets the API process look for the model
        wait_until(lambda: bool(route_of(model.post("Hello"))[0]), "requests are routed")
        with others_answered(model):
            wait_until(lambda: divides(model), "a prefill has been measured")
            yield model
    finally:
        cluster.terminate(UID)


@contextmanager
def others_answered(model: Model) -> Iterator[None]:
    """Meanwhile, the decode replica answers six readers, whom a prefill beside it would delay. The
    prefill replica shares the processor with them, and takes twice as long."""
    done = Event()

    def read() -> None:
        while not done.is_set():
            with suppress(requests.RequestException):  # a test has killed the replica
                model.post("Hello", 500)

    with ThreadPoolExecutor(6) as readers:
        for _ in range(6):
            readers.submit(read)
        try:
            yield
        finally:
            done.set()


def launch_by_python_client(cluster: LocalCluster, **options: Any) -> None:
    """Launch with xinference's Python client, as the README does; other modules use other ways."""
    Client(cluster.endpoint).launch_model(
        model_name="small",
        model_uid=UID,
        model_engine="vLLM",
        model_format="pytorch",
        quantization="none",
        model_size_in_billions=1,
        replica=2,
        n_gpu=None,
        enforce_eager=True,
        tensor_parallel_size=1,
        **options,
    )
    cluster.wait_ready(UID, 2)


def divides(model: Model) -> bool:
    """Whether a prefill is left to the prefill replica. None is until its speed is known."""
    return is_divided(model.post(document(next(UNUSED), ROWS)))


def is_divided(answer: requests.Response) -> bool:
    return route_of(answer) == (DECODE, "prefill")


def ask_divided(
    model: Model, path: str, tokens: int, **settings: Any
) -> tuple[str, requests.Response]:
    """A new document whose prefill was left to the prefill replica, and the answer. Both replicas
    share the processors of this host, so now and then the router rightly expects nothing of it."""
    for _ in range(20):
        text = document(next(UNUSED), ROWS)
        if is_divided(answer := model.post(text, tokens, path=path, **settings)):
            return text, answer
    raise AssertionError(f"never divided: {path}, {settings}")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_replica_computes_and_another_answers(model: Model, path: str) -> None:
    """After a prefill that fell behind its forecast, another document is tried: it is not waited
    for then."""

    def is_fetched() -> bool:
        return cached_tokens(ask_divided(model, path, 8)[1]) > 2000

    wait_until(is_fetched, "the prefill replica keeps to its forecast")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TEXT_ROUTES)
def test_every_text_route_is_divided(model: Model, path: str, stream: bool) -> None:
    ask_divided(model, path, 4, stream=stream)
    assert model.status()["routing"]["failed_prefills"] == 0


def test_a_short_prompt_is_answered_at_once(model: Model) -> None:
    replica, reason = route_of(model.post("Hello", 4))
    assert replica == DECODE
    assert reason != "prefill"


def test_the_next_question_needs_no_prefill_but_of_its_own_words(model: Model) -> None:
    text, _ = ask_divided(model, COMPLETIONS, 1)

    def follows() -> bool:
        answer = model.post(f"{text} What else?")
        return route_of(answer)[0] == DECODE and cached_tokens(answer) > 2000

    wait_until(follows, "the decode replica holds the document")


def test_the_answer_is_that_of_one_replica(model: Model) -> None:
    """Tokens and log-probabilities."""
    text, divided = ask_divided(model, COMPLETIONS, 8, logprobs=3, temperature=0, seed=7)
    whole = model.post(text, 8, logprobs=3, temperature=0, seed=7, **ALONE)
    assert route_of(whole)[1] != "prefill"
    assert cached_tokens(whole) == 0
    one, other = (each.json()["choices"][0] for each in (divided, whole))
    assert one["text"] == other["text"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(
        other["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert divided.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("path", "settings"),
    [
        pytest.param(COMPLETIONS, {"n": 2, "temperature": 1.0, "top_k": 1}, id="several answers"),
        pytest.param(COMPLETIONS, {"temperature": 0, "stop": ["e", "a", "1"]}, id="stop words"),
        pytest.param(
            CHAT,
            {
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "c", **SCHEMA}},
            },
            id="structured output",
        ),
        pytest.param(
            CHAT,
            {
                "temperature": 0,
                "tools": [
                    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}}
                ],
            },
            id="tools",
        ),
    ],
)
def test_settings_mean_the_same_as_with_one_replica(
    model: Model, path: str, settings: dict[str, Any]
) -> None:
    text, divided = ask_divided(model, path, 32, **settings)
    whole = model.post(text, 32, path=path, **settings, **ALONE)
    assert route_of(whole)[1] != "prefill"
    one, other = (answer.json() for answer in (divided, whole))
    assert one["choices"] == other["choices"]
    for tokens in ("prompt_tokens", "completion_tokens"):
        assert one["usage"][tokens] == other["usage"][tokens]


@contextmanager
def prefilling(model: Model, *numbers: int) -> Iterator[list[Future[requests.Response]]]:
    """Requests with these documents are under way, and the prefill replica computes."""
    wait_until(lambda: divides(model), "the router trusts the prefill replica")
    with ThreadPoolExecutor(len(numbers)) as clients:
        answering = [clients.submit(model.post, document(each, ROWS), 4) for each in numbers]
        wait_until(lambda: model.loads()[PREFILL]["requests"] > 0, "it computes")
        yield answering


def assert_answered(answering: Iterable[Future[requests.Response]]) -> None:
    for each in answering:
        assert each.result(TIMEOUT).json()["usage"]["completion_tokens"] == 4


@pytest.mark.long
def test_a_prefill_replica_that_hangs_costs_no_request(model: Model) -> None:
    """It may hang in the middle of a prefill or before."""
    with (
        prefilling(model, 75) as answering,
        processes.frozen(processes.of_replica(PREFILL).all()),
    ):
        assert_answered(answering)
        assert route_of(model.post(document(76, ROWS)))[0] == DECODE
    model.wait_until_sharing()


@pytest.mark.long
def test_a_transfer_that_breaks_off_costs_no_request(model: Model) -> None:
    transfer = processes.of_replica(PREFILL).transfer
    assert transfer is not None
    with prefilling(model, 77) as answering:
        processes.kill(transfer)
        assert_answered(answering)
    model.wait_until_sharing()


@pytest.mark.long
@pytest.mark.parametrize(("victim", "seed"), [(PREFILL, 80), (DECODE, 90)])
def test_a_killed_replica_costs_no_request(model: Model, victim: str, seed: int) -> None:
    lost, role = model.replicas()[victim]["incarnation"], model.loads()[victim]["role"]
    with prefilling(model, seed, seed + 1) as answering:
        processes.kill(processes.model_process(victim))
        assert_answered(answering)
    model.wait_until_sharing(without=lost)
    wait_until(lambda: model.loads().get(victim, {}).get("role") == role, "its role is known")
    wait_until(lambda: divides(model), "it does again what it did")
