"""What operators do with a running model, and what it tells them."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from examples import long_document_questions, multi_turn_chat, retrieval
from tests.e2e.conftest import FETCH_TIMEOUT
from tests.e2e.model import CHUNK, Model, question, wait_until
from tests.e2e.one_launch.conftest import UID
from tests.e2e.text_routes import CHAT
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient

pytestmark = pytest.mark.usefixtures("empty_pools")


def test_explain_says_what_a_request_finds(model: Model) -> None:
    cold = model.compute(model.first, question(110))
    whole = cold.prompt_tokens // CHUNK * CHUNK
    donor, consumer = (
        model.replicas()[each]["incarnation"] for each in (model.first, model.second)
    )
    with XavierClient(model.endpoint) as client:
        answer = client.explain(UID, question(110))
    assert (answer.prompt_tokens, answer.chunk_tokens) == (cold.prompt_tokens, CHUNK)
    assert {chunk.holders for chunk in answer.chunks} == {frozenset({donor})}
    assert (answer.held(donor), answer.held(consumer)) == (whole, 0)
    assert model.ask(model.second, question(110)).cached_tokens == whole


def test_explain_knows_what_a_chat_becomes(model: Model) -> None:
    """xinference applies its own chat template for the model, and `explain` the engine's."""
    messages = [{"role": "user", "content": question(112)}]
    model.post(question(112), path=CHAT)

    def held() -> bool:
        answer = client.explain(UID, messages=messages)
        return len(answer.chunks) > 10 and all(chunk.holders for chunk in answer.chunks)

    with XavierClient(model.endpoint) as client:
        wait_until(held, "a replica holds every chunk of the chat")


def test_what_was_dropped_is_computed_again(model: Model) -> None:
    cold = model.compute(model.first, question(111))
    with XavierClient(model.endpoint) as client:
        dropped = client.flush(UID)
    assert [replica.pool.used for replica in dropped.replicas] == [0, 0]
    wait_until(
        lambda: model.replicas()[model.first]["holdings"] == 0, "the tracker knows of the flush"
    )
    assert model.compute(model.second, question(111)).tokens == cold.tokens
    model.share(model.second, model.first, question(113))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (long_document_questions.main, "--documents 1 --rows 40 --questions 2"),
        (multi_turn_chat.main, "--rows 40 --turns 2"),
        (retrieval.main, "--passages 2 --rows 20 --questions 1"),
    ],
    ids=["long documents", "chat", "retrieval"],
)
def test_an_example_shows_what_came_from_a_peer(
    model: Model,
    capsys: pytest.CaptureFixture[str],
    example: Callable[[Sequence[str]], None],
    words: str,
) -> None:
    example(["--endpoint", model.endpoint, "--model", UID, "--max-tokens", "4", *words.split()])
    shown = capsys.readouterr().out
    computed, copied = re.findall(r" s to the first token, .* ([\d,]+) remote, ", shown)
    assert computed == "0"
    assert int(copied.replace(",", "")) > 1000


def test_defaults_of_the_cluster_apply_and_are_named(model: Model) -> None:
    """The launch has a queue of its own, and the environment a time limit of fetches."""
    for replica in model.status()["replicas"]:
        assert replica["from_environment"] == ["fetch_timeout"]
    with XavierClient(model.endpoint) as client:
        for check in client.cluster()["models"][UID]["self_checks"].values():
            config = check["config"]
            assert (config["fetch_timeout"], config["queue"]) == (FETCH_TIMEOUT, 20)
    doctor = CliRunner().invoke(main, ["doctor", "-e", model.endpoint])
    assert f"{UID}: {UID}-rep0 has xavier_fetch_timeout from the environment" in doctor.output


def test_a_replica_that_is_added_copies_and_one_that_is_removed_is_forgotten(model: Model) -> None:
    cold = model.compute(model.first, question(108))
    model.cluster.add_replica(UID)
    wait_until(lambda: model.is_sharing(3), "the third replica has joined")
    (added,) = model.replicas().keys() - {model.first, model.second}
    hit = model.ask(added, question(108))
    assert hit.cached_tokens == cold.prompt_tokens // CHUNK * CHUNK
    assert hit.tokens == cold.tokens
    last = max(each["replica_id"] for each in model.cluster.replicas(UID))
    model.cluster.remove_replica(UID, last)
    wait_until(lambda: added not in model.replicas(), "the tracker forgets it")


def test_an_operator_tries_whether_sharing_helps(model: Model) -> None:
    """And finds routing and sharing as they were."""
    with XavierClient(model.endpoint) as client, ExitStack() as at_end:
        at_end.callback(client.set_routing, UID, "off")
        client.set_routing(UID, "backlog")
        tried = CliRunner().invoke(main, ["try", UID, "-e", model.endpoint, "--tokens", "3000"])
        assert tried.exit_code == 0, tried.output
        for said in ("sharing off", "from: remote", "answers are equal", "× as fast"):
            assert said in tried.output
        too_short = CliRunner().invoke(main, ["try", UID, "-e", model.endpoint, "--tokens", "20"])
        assert too_short.exit_code == 2
        assert "no replica offers the prompt" in too_short.output
        assert client.status(UID).enabled
        assert client.status(UID).routing.mode == "backlog"
