"""Named prefixes under xinference: computed once, used by name, and computed again when lost."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests

from examples.documents import document
from examples.local_cluster import LocalCluster
from examples.make_model import Shape, make_model
from tests.e2e.conftest import launched
from tests.e2e.model import ROWS, TIMEOUT, Model, wait_until
from tests.e2e.one_launch.conftest import UID, launch_by_command_line
from tests.e2e.text_routes import CHAT, COMPLETIONS, TEXT_ROUTES, body_of
from tests.harness import processes
from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ApiError, UnknownPrefixError
from xinference_xavier.stats.answers import NamedPrefix
from xinference_xavier.stats.schema import ReplicaStatus

OTHER_WEIGHTS = Shape(512, 7, 8, 4, 896)
REPORT = document(40, ROWS)
MESSAGES = [{"role": "system", "content": document(41, ROWS)}]


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[XavierClient]:
    with XavierClient(model.endpoint) as client:
        client.add_prefix(UID, "report", REPORT, copies="all")
        client.add_prefix(UID, "guide", messages=MESSAGES, copies="all")
        for name in ("report", "guide"):
            kept(client, name)
        yield client
        for found in client.prefixes(UID):
            client.remove_prefix(UID, found.name)


def kept(client: XavierClient, name: str, uid: str = UID) -> NamedPrefix:
    def state() -> str:
        found = client.prefix(uid, name)
        assert found.state != "failed", found.reason
        return found.state

    wait_until(lambda: state() == "kept", f"{name} is kept")
    return client.prefix(uid, name)


def ask(model: Model, path: str, text: str, **more: Any) -> requests.Response:
    """What comes from `headers` in `more` is sent as such."""
    headers = {"anthropic-version": "2023-06-01", **more.pop("headers", {})}
    body = body_of(path, UID, text, 8, temperature=0, **more)
    return requests.post(f"{model.endpoint}{path}", json=body, headers=headers, timeout=TIMEOUT)


def test_a_named_prompt_is_computed_once_and_used_by_both_replicas(
    model: Model, client: XavierClient
) -> None:
    found = client.prefix(UID, "report")
    assert found.tokens > 2000
    assert len(found.replicas) == 2
    whole = ask(model, COMPLETIONS, REPORT + "What is this?", cache_salt="cold").json()
    for number in range(4):
        way: dict[str, Any] = {"prefix_name": "report"}
        if number % 2:
            way = {"headers": {"X-Xavier-Prefix": "report"}}
        answer = ask(model, COMPLETIONS, "What is this?", **way).json()
        assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0.9 * found.tokens


def test_named_messages_go_before_those_of_every_route(model: Model, client: XavierClient) -> None:
    *_, found = client.watch_prefix(UID, "guide")
    assert found.state == "kept"
    for path in TEXT_ROUTES[1:]:
        answer = ask(model, path, "Hello", headers={"X-Xavier-Prefix": "guide"})
        usage = answer.json()["usage"]
        tokens = usage.get("prompt_tokens") or usage["input_tokens"]
        tokens += usage.get("cache_read_input_tokens", 0)  # Anthropic counts them apart
        assert tokens >= found.tokens, path
    answer = ask(model, CHAT, "Hello", headers={"X-Xavier-Prefix": "guide"}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.9 * found.tokens


def test_terms_are_changed(client: XavierClient) -> None:
    changed = client.change_prefix(UID, "report", ttl="2h", retention="hard")
    assert (changed.ttl, changed.retention, changed.copies) == (7200.0, "hard", "all")

    def is_firm() -> bool:
        return all(copy.firm for copy in client.prefix(UID, "report").replicas.values())

    wait_until(is_firm, "no copy can be evicted")


def test_an_unknown_name_is_refused(model: Model, client: XavierClient) -> None:
    answer = ask(model, COMPLETIONS, "Hello", prefix_name="reprot")
    assert answer.status_code == 404
    assert "did you mean 'report'?" in answer.text
    with pytest.raises(UnknownPrefixError):
        client.prefix(UID, "reprot")


def test_a_short_text_is_refused(client: XavierClient) -> None:
    with pytest.raises(ApiError, match=r"'short' has . tokens; give a prefix of at least 128"):
        client.add_prefix(UID, "short", "Hello")


def test_what_is_lost_is_computed_again(model: Model, client: XavierClient) -> None:
    (before,) = (each for each in client.prefixes(UID) if each.name == "report")
    client.flush(UID)
    wait_until(lambda: client.prefix(UID, "report").state != "kept", "it is lost")
    assert kept(client, "report").tokens == before.tokens


@pytest.mark.long
def test_a_replica_that_is_replaced_has_what_others_use_before_its_first_request(
    model: Model, client: XavierClient
) -> None:
    text = document(42, ROWS)
    for number in range(4):  # two at each replica
        ask(model, COMPLETIONS, f"{text}Question {number}")
    lost = model.replicas()[model.first]["incarnation"]
    processes.kill(processes.model_process(model.first))
    model.wait_until_sharing(without=lost)

    def replica() -> ReplicaStatus:
        (found,) = (each for each in client.status(UID).replicas if each.replica == model.first)
        return found

    wait_until(lambda: replica().fetches.committed > 0, "it has fetched")
    assert replica().bytes_received > 20 * replica().pool.row_bytes
    wait_until(lambda: ask(model, COMPLETIONS, "Hello").ok, "xinference has noticed")
    answers = [ask(model, COMPLETIONS, f"{text}What is this?").json() for _ in range(2)]
    for answer in answers:
        assert "usage" in answer, answer
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    assert replica().hits.computed < 0.2 * replica().hits.total
    assert replica().hits.remote == 0
    assert len(kept(client, "guide").replicas) == 2, "it has its copies, too"


@pytest.mark.long
def test_names_survive_a_launch_with_other_weights(
    model: Model, client: XavierClient, tmp_path: Path
) -> None:
    before = client.prefix(UID, "report")
    model.cluster.terminate(UID)
    model.cluster.register(make_model(tmp_path / "other", OTHER_WEIGHTS), "other")
    model.launch("other")
    try:
        found = kept(client, "report")
        assert (found.created, found.tokens) == (before.created, before.tokens)
        assert found.replicas.keys() == {model.first, model.second}
        whole = ask(model, COMPLETIONS, REPORT + "What is this?", cache_salt="cold").json()
        answer = ask(model, COMPLETIONS, "What is this?", prefix_name="report").json()
        assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.9 * found.tokens
    finally:  # later tests rely on how it was launched
        model.cluster.terminate(UID)
        launch_by_command_line(model.cluster)


@pytest.mark.long
def test_in_full_pools_hard_ones_stay_and_soft_ones_give_way(cluster: LocalCluster) -> None:
    """A document and the two names together are larger than a pool."""
    uid, numbers = "full", count(50)
    with (
        launched(cluster, uid, xavier_pool_bytes="128MiB") as model,
        XavierClient(cluster.endpoint) as client,
    ):
        client.add_prefix(uid, "hard", document(48, ROWS), copies="all", retention="hard")
        client.add_prefix(uid, "soft", document(49, ROWS), copies="all")
        kept(client, "hard", uid)
        kept(client, "soft", uid)

        def soft_gives_way() -> bool:
            model.complete(document(next(numbers), ROWS), max_tokens=1)
            hard = client.prefix(uid, "hard")
            assert all(copy.firm and copy.held == copy.chunks for copy in hard.replicas.values())
            return client.prefix(uid, "soft").state != "kept"

        wait_until(soft_gives_way, "the soft one gives way")
        kept(client, "soft", uid)  # once nobody asks


@pytest.mark.long
def test_marks_that_move_with_a_chat_cost_no_request(model: Model, client: XavierClient) -> None:
    def requests_of_replicas() -> int:
        return sum(each.requests for each in client.status(UID).replicas)

    for name in ("report", "guide"):
        kept(client, name)
    before, messages = requests_of_replicas(), list[dict[str, Any]]()
    for turn in range(3):
        text = document(60 + turn, 10)
        marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
        body = {"model": UID, "max_tokens": 8}
        answer = requests.post(
            f"{model.endpoint}/v1/messages",
            json={**body, "messages": [*messages, {"role": "user", "content": marked}]},
            headers={"anthropic-version": "2023-06-01"},
            timeout=TIMEOUT,
        ).json()
        usage = answer["usage"]
        assert usage["cache_creation_input_tokens"] > 100
        assert (usage["cache_read_input_tokens"] > 0) == (turn > 0)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "So?"}]
    # The keeper looks every second: by the time that it has computed another name, it has looked.
    client.add_prefix(UID, "later", document(63, ROWS))
    kept(client, "later")
    assert requests_of_replicas() == before + 3 + 1
    client.remove_prefix(UID, "later")


def test_a_removed_name_is_unknown(model: Model, client: XavierClient) -> None:
    for name in ("report", "guide"):
        client.remove_prefix(UID, name)
    assert client.prefixes(UID) == []
