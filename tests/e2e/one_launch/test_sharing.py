"""The main job on real software. A replica does not compute again what another has computed. A
failure costs at most a recomputation."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.documents import document, prompt, questions
from tests.e2e.model import CHUNK, ROWS, TIMEOUT, Model, question, wait_until
from tests.faults import CORRUPT_ROW, Fault
from tests.harness import asynchronous
from xinference_xavier.client import XavierClient
from xinference_xavier.serving.metrics import PREFIX

pytestmark = [pytest.mark.main_job, pytest.mark.usefixtures("empty_pools")]


def rolled_back(replica: Mapping[str, Any]) -> Counter[str]:
    """How many of its fetches were rolled back, by reason."""
    return Counter(replica["fetches"]["rolled_back"])


def test_its_engines_schedule_as_engines_on_gpus_do(model: Model) -> None:
    assert model.cluster.log.read_text().count(asynchronous.LINE) >= 2


def test_remote_hit_reuses_the_prompt_and_changes_nothing(model: Model) -> None:
    """A remote hit has bytes from the peer, and the tokens and log-probabilities of a local hit."""
    donor, consumer = model.first, model.second
    before = model.replicas()
    remote = model.share(donor, consumer, question(100))
    whole = remote.prompt_tokens // CHUNK

    after = model.replicas()
    received = after[consumer]["bytes_received"] - before[consumer]["bytes_received"]
    assert received == whole * after[consumer]["pool"]["row_bytes"]
    assert after[donor]["bytes_sent"] - before[donor]["bytes_sent"] == received
    peers = after[consumer]["hits"]["remote"] - before[consumer]["hits"]["remote"]
    assert peers == whole * CHUNK
    for replica, source in ((donor, "computed"), (consumer, "remote")):
        earlier, now = (each[replica]["first_tokens"][source] for each in (before, after))
        assert sum(now["counts"]) == sum(earlier["counts"]) + 1
        assert 0 < now["sum"] - earlier["sum"] < TIMEOUT

    local = model.ask(donor, question(100))
    assert local.cached_tokens == remote.cached_tokens
    # A request with a salt of its own reuses nothing.
    cold, other = (
        model.compute(each, question(100), cache_salt=each) for each in (donor, consumer)
    )
    assert local.tokens == cold.tokens
    # First compare the engines themselves: if they differ, the rest says nothing of sharing.
    assert other.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    assert local.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    assert remote.tokens == local.tokens
    assert remote.logprobs == pytest.approx(local.logprobs, abs=1e-4)


def test_generated_tokens_are_offered_too(model: Model) -> None:
    """They serve the next turn of a chat. A random model cannot show that turn itself, because its
    output does not tokenize back to the same tokens."""

    def held() -> int:
        return int(model.replicas()[model.first]["holdings"])

    before = held()
    answer = model.ask(model.first, question(102), max_tokens=3 * CHUNK)
    with_answer = (answer.prompt_tokens + 3 * CHUNK - 1) // CHUNK
    assert with_answer > answer.prompt_tokens // CHUNK
    wait_until(lambda: held() >= before + with_answer, "the chunks of both are published")


def test_a_tenants_salt_isolates_its_prefixes(model: Model) -> None:
    cold = model.compute(model.first, question(103), cache_salt="tenant a")
    other = model.ask(model.second, question(103), cache_salt="tenant b")
    assert other.cached_tokens == 0
    assert other.tokens == cold.tokens


def test_sharing_is_switched_off_and_on_at_run_time(model: Model) -> None:
    model.cluster.switch_sharing(model.uid, False)
    assert model.status()["enabled"] is False
    model.compute(model.first, question(104))
    assert model.ask(model.second, question(104)).cached_tokens == 0
    model.cluster.switch_sharing(model.uid, True)
    model.share(model.first, model.second, question(105))


def test_of_two_that_get_a_long_prompt_at_once_one_computes_it(model: Model) -> None:
    """The answers are equal even if waiting did not pay on a busy machine."""
    before = model.replicas()
    assert all(replica["prefill_tokens_per_s"] for replica in before.values())
    text = prompt(document(115, 3 * ROWS), questions(115, 3 * ROWS)[0])
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(model.complete, [text, text]))
    assert answers[0].tokens == answers[1].tokens

    def counted(name: str) -> int:
        after = model.replicas()
        return sum(after[each]["waits"][name] - before[each]["waits"][name] for each in before)

    wait_until(lambda: counted("claimed") == counted("waited") == 1, "one computed, one waited")


def test_doctor_finds_nothing_that_keeps_them_from_sharing(model: Model) -> None:
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
    self_checks = facts["models"][model.uid]["self_checks"].values()
    assert all(set(each["peers"].values()) == {None} for each in self_checks)
    first, second = (each["fingerprint_fields"] for each in self_checks)
    assert first == second
    assert first["model.dtype"] == "torch.float32"


def test_events_are_heard_over_xinferences_own_server(model: Model) -> None:
    with XavierClient(model.endpoint) as client:
        events = client.events(model.uid)
        assert next(events).event == "ReplicaJoined"
        assert next(client.watch(model.uid)).model_uid == model.uid


def test_xinferences_own_metrics_show_a_remote_hit(model: Model) -> None:
    """Our metrics appear beside xinference's own, without a key."""
    answer = model.share(model.second, model.first, question(114))
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
        if sample.name == "xinference:model_info" and sample.labels["model_uid"] == model.uid
    }
    labels = {"model_uid": model.uid, "replica_index": "0", "worker_address": worker}
    (tokens,) = values(f"{PREFIX}prompt_tokens_total", **labels, source="remote")
    assert tokens >= answer.cached_tokens > 0
    fetched = {**labels, "outcome": "committed", "transport": "gloo"}
    (fetches,) = values(f"{PREFIX}fetches_total", **fetched)
    assert fetches >= 1
    assert values(f"{PREFIX}up") == values(f"{PREFIX}tracker_up", model_uid=model.uid) == [1]


def test_the_log_says_once_that_sharing_works_and_once_that_it_stopped(
    model: Model,
) -> None:
    """The lines look like vLLM's own. An earlier test has switched sharing off and on."""
    lines = [
        line
        for line in model.cluster.log.read_text().splitlines()
        if re.search("sharing (works|stopped)", line)
    ]
    for incarnation in model.incarnations():
        told = [line for line in lines if incarnation in line]
        changes = ["sharing works" in line for line in told]
        assert changes == [number % 2 == 0 for number in range(len(told))]
        assert "INFO" in told[0]
        assert "WARNING" in told[1]


def test_a_killed_transfer_process_costs_a_recomputation_at_most(model: Model) -> None:
    donor, consumer = model.first, model.second
    cold = model.compute(donor, question(106))
    os.kill(model.replicas()[consumer]["transfer_pid"], 9)
    assert model.ask(consumer, question(106)).tokens == cold.tokens
    wait_until(model.is_sharing, "the transfer process is back")
    model.share(donor, consumer, question(107))
    assert model.replicas()[consumer]["transfer_restarts"] == 1


def test_a_damaged_byte_is_noticed_and_the_answer_is_right(model: Model, fault: Path) -> None:
    cold = model.compute(model.first, question(116))
    earlier = model.replicas()[model.second]
    fault.write_text(Fault.CORRUPT)
    try:
        answer = model.ask(model.second, question(116))
    finally:
        fault.write_text(Fault.NONE)
    assert answer.tokens == cold.tokens
    assert answer.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    now = model.replicas()[model.second]
    assert rolled_back(now) - rolled_back(earlier) == {"checksum": 1}
    # The rows before the damaged one count, as many as were there when it was found.
    assert now["hits"]["remote"] - earlier["hits"]["remote"] <= CORRUPT_ROW * CHUNK


def test_a_donor_killed_while_it_serves_costs_a_recomputation(model: Model, fault: Path) -> None:
    """One of the last, because it costs a replica."""
    donor, consumer = model.first, model.second
    cold = model.compute(donor, question(117))
    before = model.replicas()
    engine = psutil.Process(before[donor]["transfer_pid"]).parent()
    assert engine is not None

    def is_fetching() -> bool:
        fetches = [each[consumer]["fetches"]["started"] for each in (before, model.replicas())]
        return fetches[0] < fetches[1]

    fault.write_text(Fault.STALL)
    try:
        with ThreadPoolExecutor(1) as client:
            asking = client.submit(model.answer, consumer, question(117))
            wait_until(is_fetching, "the fetch is under way")
            engine.send_signal(signal.SIGKILL)
            answer = asking.result()
    finally:
        fault.write_text(Fault.NONE)
    assert answer.tokens == cold.tokens
    assert rolled_back(model.replicas()[consumer]) - rolled_back(before[consumer])


def test_terminating_the_model_leaves_no_actor_of_ours(model: Model) -> None:
    assert model.has_tracker()
    model.cluster.terminate(model.uid)
    assert not model.has_tracker()
