"""The main job on real software: a replica does not compute again what another has computed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from examples import long_document_questions, multi_turn_chat, retrieval
from examples.documents import document, prompt, questions
from examples.local_cluster import Completion, LocalCluster
from tests.e2e.asking import CHUNK, ROWS, TIMEOUT, question, tracker_exists
from tests.e2e.conftest import can_fetch, wait_until
from tests.e2e.one_launch.conftest import UID
from tests.harness import asynchronous
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient
from xinference_xavier.serving.metrics import PREFIX
from xinference_xavier.stats.answers import Reuse

pytestmark = pytest.mark.main_job

SALTS = find_spec("xinference.cache_isolation") is not None
"""From 4.1 on, xinference passes a request's `cache_salt` on."""


@pytest.fixture(scope="module", autouse=True)
def empty_pools(model: LocalCluster) -> None:
    """Tests count what replicas hold; what other modules have left would be evicted meanwhile."""
    with XavierClient(model.endpoint) as client:
        client.flush(UID)
    wait_until(
        lambda: not any(each["holdings"] for each in replicas(model).values()),
        "the tracker knows that the pools are empty",
    )


def replicas(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    return cluster.members(UID)


def ask(cluster: LocalCluster, text: str, **options: Any) -> tuple[str, Completion]:
    """The incarnation of the replica that answered, and its answer."""
    before = replicas(cluster)
    answer = cluster.complete(UID, text, **options)
    answered: list[str] = []

    def one_more_finished() -> bool:
        answered[:] = [
            incarnation
            for incarnation, replica in replicas(cluster).items()
            if replica["requests"] > before[incarnation]["requests"]
        ]
        return bool(answered)

    wait_until(one_more_finished, "a replica has counted the request")
    assert len(answered) == 1
    return answered[0], answer


def compute(cluster: LocalCluster, text: str, **options: Any) -> tuple[str, Completion]:
    """Have one replica compute `text`: its incarnation, once the chunks are published, and its
    answer."""
    before = replicas(cluster)
    replica, answer = ask(cluster, text, **options)
    held = before[replica]["holdings"] + answer.prompt_tokens // CHUNK
    wait_until(
        lambda: replicas(cluster)[replica]["holdings"] >= held,
        f"{replica} has published {held} chunks",
    )
    return replica, answer


def share(cluster: LocalCluster, seed: int) -> tuple[str, str, Completion]:
    """Have one replica compute a document, then ask the other: (donor, consumer, answer)."""
    donor, _ = compute(cluster, question(seed))
    consumer, answer = ask(cluster, question(seed))
    assert consumer != donor, "xinference sends requests to the replicas in turn"
    return donor, consumer, answer


def test_its_engines_schedule_as_engines_on_gpus_do(model: LocalCluster) -> None:
    assert model.log.read_text().count(asynchronous.LINE) >= 2


def test_remote_hit_reuses_the_prompt_and_changes_nothing(model: LocalCluster) -> None:
    """A remote hit moves bytes and has the tokens and log-probabilities of a local hit."""
    before = replicas(model)
    donor, consumer, remote = share(model, seed=100)
    whole = remote.prompt_tokens // CHUNK
    assert remote.cached_tokens == whole * CHUNK

    after = replicas(model)
    moved = after[consumer]["bytes_received"] - before[consumer]["bytes_received"]
    assert moved == whole * after[consumer]["pool"]["row_bytes"]
    assert after[donor]["bytes_sent"] - before[donor]["bytes_sent"] == moved
    peers = after[consumer]["hits"]["remote"] - before[consumer]["hits"]["remote"]
    assert peers == whole * CHUNK
    for replica, source in ((donor, "computed"), (consumer, "remote")):
        earlier, now = (each[replica]["first_tokens"][source] for each in (before, after))
        assert sum(now["counts"]) == sum(earlier["counts"]) + 1
        assert 0 < now["sum"] - earlier["sum"] < TIMEOUT

    local_donor, local = ask(model, question(100))
    assert local_donor == donor
    assert local.cached_tokens == remote.cached_tokens
    if SALTS:
        # A request with a salt of its own reuses nothing, so its answer is computed cold.
        salts = ("alone", "alone too")
        computed = dict(ask(model, question(100), cache_salt=salt) for salt in salts)
        assert [computed[each].cached_tokens for each in (donor, consumer)] == [0, 0]
        assert local.tokens == computed[donor].tokens
        # First compare the engines themselves: if they differ, the rest says nothing of sharing.
        assert computed[consumer].logprobs == pytest.approx(computed[donor].logprobs, abs=1e-4)
        assert local.logprobs == pytest.approx(computed[donor].logprobs, abs=1e-4)
    assert remote.tokens == local.tokens
    assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-4)


def test_generated_tokens_are_offered_too(model: LocalCluster) -> None:
    """They serve the next turn of a chat. A random model cannot show that turn itself, because its
    output does not tokenize back to the same tokens."""
    before = replicas(model)
    replica, answer = ask(model, question(102), max_tokens=3 * CHUNK)
    with_answer = (answer.prompt_tokens + 3 * CHUNK - 1) // CHUNK
    assert with_answer > answer.prompt_tokens // CHUNK
    wait_until(
        lambda: replicas(model)[replica]["holdings"] >= before[replica]["holdings"] + with_answer,
        "the chunks of prompt and answer are published",
    )


if SALTS:

    def test_a_tenants_salt_isolates_its_prefixes(model: LocalCluster) -> None:
        _, cold = compute(model, question(103), cache_salt="tenant a")
        _, other = ask(model, question(103), cache_salt="tenant b")
        assert other.cached_tokens == 0
        assert other.tokens == cold.tokens


def test_sharing_is_switched_off_and_on_at_run_time(model: LocalCluster) -> None:
    model.switch_sharing(UID, False)
    assert model.xavier(UID)["enabled"] is False
    _, _, alone = share(model, seed=104)
    assert alone.cached_tokens == 0
    model.switch_sharing(UID, True)
    _, _, shared = share(model, seed=105)
    assert shared.cached_tokens > 0


def test_explain_predicts_what_a_request_reuses(model: LocalCluster) -> None:
    before = replicas(model)
    donor, cold = compute(model, question(110))
    (consumer,) = set(before) - {donor}
    whole = cold.prompt_tokens // CHUNK * CHUNK
    rest = cold.prompt_tokens - whole
    with XavierClient(model.endpoint) as client:
        answer = client.explain(UID, question(110))
    assert (answer.prompt_tokens, answer.chunk_tokens) == (cold.prompt_tokens, CHUNK)
    assert {chunk.holders for chunk in answer.chunks} == {frozenset({donor})}
    assert answer.reuse == {
        donor: Reuse(local_pool=whole, computed=rest),
        consumer: Reuse(remote=whole, computed=rest),
    }
    asked, remote = ask(model, question(110))
    assert (asked, remote.cached_tokens) == (consumer, answer.reuse[consumer].remote)


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


def test_of_two_that_get_a_long_prompt_at_once_one_computes_it(model: LocalCluster) -> None:
    """The answers are equal even if waiting did not pay on a busy machine."""
    before = replicas(model)
    assert all(replica["prefill_tokens_per_s"] for replica in before.values())
    text = prompt(document(115, 3 * ROWS), questions(115, 3 * ROWS)[0])
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: model.complete(UID, text), range(2)))
    assert answers[0].tokens == answers[1].tokens

    def counted(name: str) -> int:
        after = replicas(model)
        return sum(after[each]["waits"][name] - before[each]["waits"][name] for each in before)

    wait_until(lambda: counted("claimed") == counted("waited") == 1, "one computed, one waited")


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


def test_doctor_finds_nothing_that_keeps_them_from_sharing(model: LocalCluster) -> None:
    program = Path(sys.executable).parent / "xinference-xavier"
    words = [program, "doctor", "--json", "--endpoint", model.endpoint]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if finding["grave"]] == []
    small = [each for each in findings if "of the KV cache that it backs" in each["problem"]]
    assert len(small) == 2, "tests need small pools"
    with XavierClient(model.endpoint) as client:
        facts = client.cluster()
    (worker,) = facts["workers"].values()
    assert worker["versions"]["vllm"]
    self_checks = facts["models"][UID]["self_checks"].values()
    assert all(set(each["peers"].values()) == {None} for each in self_checks)
    first, second = (each["fingerprint_fields"] for each in self_checks)
    assert first == second
    assert first["model.dtype"] == "torch.float32"


def test_defaults_of_the_cluster_apply_and_are_named(model: LocalCluster) -> None:
    """The launch has a queue of its own, and the environment a time limit of fetches."""
    for replica in model.xavier(UID)["replicas"]:
        assert replica["from_environment"] == ["fetch_timeout"]
    with XavierClient(model.endpoint) as client:
        for check in client.cluster()["models"][UID]["self_checks"].values():
            assert (check["config"]["fetch_timeout"], check["config"]["queue"]) == (6.0, 20)
    doctor = CliRunner().invoke(main, ["doctor", "-e", model.endpoint])
    assert f"{UID}: {UID}-rep0 has xavier_fetch_timeout from the environment" in doctor.output


def test_events_are_heard_over_xinferences_own_server(model: LocalCluster) -> None:
    with XavierClient(model.endpoint) as client:
        events = client.events(UID)
        assert next(events).event == "ReplicaJoined"
        assert next(client.watch(UID)).model_uid == UID


def test_xinferences_own_metrics_show_a_remote_hit(model: LocalCluster) -> None:
    """Our metrics appear beside xinference's own, without a key."""
    _, consumer, answer = share(model, seed=114)
    shown = httpx.get(f"{model.endpoint}/metrics").text
    assert "\nxinference:model_info{" in shown
    samples = [
        sample for family in text_string_to_metric_families(shown) for sample in family.samples
    ]

    def values(name: str, **labels: str) -> list[float]:
        return [
            sample.value
            for sample in samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    (worker,) = {
        sample.labels["worker_address"]
        for sample in samples
        if sample.name == "xinference:model_info" and sample.labels["model_uid"] == UID
    }
    number = replicas(model)[consumer]["replica"].removeprefix(f"{UID}-rep")
    labels = {"model_uid": UID, "replica_index": number, "worker_address": worker}
    (tokens,) = values(f"{PREFIX}prompt_tokens_total", **labels, source="remote")
    assert tokens >= answer.cached_tokens > 0
    fetched = {**labels, "outcome": "committed", "transport": "shared_memory"}
    (fetches,) = values(f"{PREFIX}fetches_total", **fetched)
    assert fetches >= 1
    assert values(f"{PREFIX}up") == values(f"{PREFIX}tracker_up", model_uid=UID) == [1]


def test_the_log_says_once_that_sharing_works_and_once_that_it_stopped(
    model: LocalCluster,
) -> None:
    """The lines look like vLLM's own. An earlier test has switched sharing off and on."""
    lines = [
        line
        for line in model.log.read_text().splitlines()
        if re.search("sharing (works|stopped)", line)
    ]
    for incarnation in replicas(model):
        told = [line for line in lines if incarnation in line]
        changes = ["sharing works" in line for line in told]
        assert changes == [number % 2 == 0 for number in range(len(told))]
        assert "INFO" in told[0]
        assert "WARNING" in told[1]


def test_a_killed_transfer_process_costs_a_recomputation_at_most(model: LocalCluster) -> None:
    before = replicas(model)
    donor, cold = compute(model, question(106))
    (consumer,) = set(before) - {donor}
    os.kill(replicas(model)[consumer]["transfer_pid"], 9)
    _, answer = ask(model, question(106))
    assert answer.tokens == cold.tokens
    wait_until(lambda: can_fetch(model, UID, 2), "the transfer process is back")
    _, _, again = share(model, seed=107)
    assert again.cached_tokens > 0
    assert replicas(model)[consumer]["transfer_restarts"] == 1


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
        for said in ("sharing off", "from: remote", "answers are equal", "helps: "):
            assert said in tried.output
        too_short = CliRunner().invoke(main, ["try", UID, "-e", model.endpoint, "--tokens", "20"])
        assert too_short.exit_code == 2
        assert "no replica offers the prompt" in too_short.output
        assert client.status(UID).enabled
        assert client.status(UID).routing.mode == "backlog"


def test_terminating_the_model_leaves_no_actor_of_ours(model: LocalCluster) -> None:
    assert tracker_exists(model, UID)
    model.terminate(UID)
    assert not tracker_exists(model, UID)
