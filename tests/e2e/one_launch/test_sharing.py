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
from examples.local_cluster import LocalCluster
from tests.e2e.asking import CHUNK, ROWS, TIMEOUT, question, tracker_exists
from tests.e2e.conftest import can_fetch, wait_until
from tests.e2e.one_launch.conftest import UID, ask, compute, replicas, share
from tests.faults import CORRUPT_ROW, Fault
from tests.harness import asynchronous
from xinference_xavier.client import XavierClient
from xinference_xavier.serving.metrics import PREFIX

pytestmark = [pytest.mark.main_job, pytest.mark.usefixtures("empty_pools")]


def rolled_back(replica: Mapping[str, Any]) -> Counter[str]:
    """How many of its fetches were rolled back, by reason."""
    return Counter(replica["fetches"]["rolled_back"])


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


def test_a_damaged_byte_is_noticed_and_the_answer_is_right(
    model: LocalCluster, fault: Path
) -> None:
    donor, cold = compute(model, question(116))
    before = replicas(model)
    fault.write_text(Fault.CORRUPT)
    try:
        consumer, answer = ask(model, question(116))
    finally:
        fault.write_text(Fault.NONE)
    assert consumer != donor
    assert answer.tokens == cold.tokens
    assert answer.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    earlier, now = before[consumer], replicas(model)[consumer]
    assert rolled_back(now) - rolled_back(earlier) == {"checksum": 1}
    # The rows before the damaged one count, as many as were there when it was found.
    assert now["hits"]["remote"] - earlier["hits"]["remote"] <= CORRUPT_ROW * CHUNK


def test_a_donor_killed_while_it_serves_costs_a_recomputation(
    model: LocalCluster, fault: Path
) -> None:
    """One of the last, because it costs a replica."""
    donor, cold = compute(model, question(117))
    before = replicas(model)
    (consumer,) = set(before) - {donor}
    engine = psutil.Process(before[donor]["transfer_pid"]).parent()
    assert engine is not None

    def is_fetching() -> bool:
        fetches = [each[consumer]["fetches"]["started"] for each in (before, replicas(model))]
        return fetches[0] < fetches[1]

    fault.write_text(Fault.STALL)
    try:
        with ThreadPoolExecutor(1) as client:
            asking = client.submit(model.complete, UID, question(117))
            wait_until(is_fetching, "the fetch is under way")
            engine.send_signal(signal.SIGKILL)
            answer = asking.result()
    finally:
        fault.write_text(Fault.NONE)
    assert answer.tokens == cold.tokens
    assert rolled_back(replicas(model)[consumer]) - rolled_back(before[consumer])


def test_terminating_the_model_leaves_no_actor_of_ours(model: LocalCluster) -> None:
    assert tracker_exists(model, UID)
    model.terminate(UID)
    assert not tracker_exists(model, UID)
