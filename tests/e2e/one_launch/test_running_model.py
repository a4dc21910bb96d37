"""What operators do with a running model, and what it tells them."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from examples import long_document_questions, multi_turn_chat, retrieval
from examples.local_cluster import LocalCluster
from tests.e2e.asking import CHUNK, question
from tests.e2e.conftest import FETCH_TIMEOUT, can_fetch, wait_until
from tests.e2e.one_launch.conftest import UID, ask, compute, replicas, share
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient

pytestmark = pytest.mark.usefixtures("empty_pools")


def test_explain_says_what_a_request_finds(model: LocalCluster) -> None:
    before = replicas(model)
    donor, cold = compute(model, question(110))
    (consumer,) = set(before) - {donor}
    whole = cold.prompt_tokens // CHUNK * CHUNK
    with XavierClient(model.endpoint) as client:
        answer = client.explain(UID, question(110))
    assert (answer.prompt_tokens, answer.chunk_tokens) == (cold.prompt_tokens, CHUNK)
    assert {chunk.holders for chunk in answer.chunks} == {frozenset({donor})}
    assert (answer.held(donor), answer.held(consumer)) == (whole, 0)
    asked, remote = ask(model, question(110))
    assert (asked, remote.cached_tokens) == (consumer, whole)


def test_explain_knows_what_a_chat_becomes(model: LocalCluster) -> None:
    """xinference applies its own chat template for the model, and `explain` the engine's."""
    messages = [{"role": "user", "content": question(112)}]
    before = replicas(model)
    body = {"model": UID, "messages": messages, "max_tokens": 1}
    model.call("POST", "/v1/chat/completions", body)

    def held() -> bool:
        answer = client.explain(UID, messages=messages)
        return len(answer.chunks) > 10 and all(chunk.holders for chunk in answer.chunks)

    with XavierClient(model.endpoint) as client:
        wait_until(held, "a replica holds every chunk of the chat")
    assert set(replicas(model)) == set(before)


def test_what_was_dropped_is_computed_again(model: LocalCluster) -> None:
    donor, cold = compute(model, question(111))
    with XavierClient(model.endpoint) as client:
        dropped = client.flush(UID)
    assert [replica.pool.used for replica in dropped.replicas] == [0, 0]
    wait_until(lambda: replicas(model)[donor]["holdings"] == 0, "the tracker knows of the flush")
    asked, again = ask(model, question(111))
    assert asked != donor
    assert (again.cached_tokens, again.tokens) == (0, cold.tokens)
    share(model, seed=113)


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
    model: LocalCluster,
    capsys: pytest.CaptureFixture[str],
    example: Callable[[Sequence[str]], None],
    words: str,
) -> None:
    example(["--endpoint", model.endpoint, "--model", UID, "--max-tokens", "4", *words.split()])
    shown = capsys.readouterr().out
    computed, copied = re.findall(r" s to the first token, .* ([\d,]+) remote, ", shown)
    assert computed == "0"
    assert int(copied.replace(",", "")) > 1000


def test_defaults_of_the_cluster_apply_and_are_named(model: LocalCluster) -> None:
    """The launch has a queue of its own, and the environment a time limit of fetches."""
    for replica in model.xavier(UID)["replicas"]:
        assert replica["from_environment"] == ["fetch_timeout"]
    with XavierClient(model.endpoint) as client:
        for check in client.cluster()["models"][UID]["self_checks"].values():
            config = check["config"]
            assert (config["fetch_timeout"], config["queue"]) == (FETCH_TIMEOUT, 20)
    doctor = CliRunner().invoke(main, ["doctor", "-e", model.endpoint])
    assert f"{UID}: {UID}-rep0 has xavier_fetch_timeout from the environment" in doctor.output


def test_a_replica_added_later_gets_hits(model: LocalCluster) -> None:
    known = set(replicas(model))
    text = question(108)
    cold = model.complete(UID, text)
    held = sum(replica["holdings"] for replica in replicas(model).values())
    model.add_replica(UID)
    wait_until(lambda: can_fetch(model, UID, 3), "the third replica has joined")
    (added,) = set(replicas(model)) - known
    assert held > 0
    answers = [ask(model, text) for _ in range(3)]
    hit = next(answer for incarnation, answer in answers if incarnation == added)
    assert hit.cached_tokens == cold.prompt_tokens // CHUNK * CHUNK
    assert hit.tokens == cold.tokens


def test_a_removed_replica_disappears_from_the_tracker(model: LocalCluster) -> None:
    before = len(replicas(model))
    last = max(replica["replica_id"] for replica in model.replicas(UID))
    model.remove_replica(UID, last)
    wait_until(lambda: len(replicas(model)) == before - 1, "the replica is gone")


def test_an_operator_tries_whether_sharing_helps(model: LocalCluster) -> None:
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
