"""The client, against a real API and real replicas."""

import threading
from collections.abc import Iterator

import pytest

from tests.harness.api import Pair
from tests.harness.replicas import (
    CHUNK_TOKENS,
    MODEL,
    fresh_keys,
    fresh_numbers,
    make_key,
    wait_until,
)
from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ModelNotFoundError
from xinference_xavier.stats.answers import EventRecord
from xinference_xavier.stats.schema import ModelStatus

pytestmark = pytest.mark.process


@pytest.fixture
def client(pair: Pair) -> Iterator[XavierClient]:
    with XavierClient(pair.api.endpoint) as client:
        yield client


def wait_until_known(pair: Pair, key: bytes) -> None:
    wait_until(
        lambda: pair.second.holders(key) == ("first",), "the second knows what the first holds"
    )


def share(pair: Pair) -> tuple[list[int], ModelStatus]:
    """Have the second fetch two chunks from the first; return them, and the status before that."""
    with XavierClient(pair.api.endpoint) as client:
        before = client.status(MODEL)
    numbers = fresh_numbers(2)
    keys = [make_key(number) for number in numbers]
    pair.first.store(keys)
    wait_until_known(pair, keys[1])
    assert pair.second.fetch("first", keys, 30.0).committed == 2
    return numbers, before


def test_status_is_typed_and_sums_up(pair: Pair, client: XavierClient) -> None:
    _, before = share(pair)
    status = client.status(MODEL)
    assert [replica.incarnation for replica in status.replicas] == ["first", "second"]
    assert (status.model_uid, status.enabled) == (MODEL, True)
    second = status.replicas[1]
    moved = 2 * second.pool.row_bytes
    assert second.bytes_received - before.replicas[1].bytes_received == moved
    assert second.received_from["first"] - before.replicas[1].received_from.get("first", 0) == moved
    assert status.totals.fetches.committed - before.totals.fetches.committed == 1
    assert (second.pool.rows, second.pool.pinned, second.fetching) == (64, 0, {})
    assert status.raw["replicas"][1]["incarnation"] == "second"
    assert [each.model_uid for each in client.models().models] == [MODEL]


def test_explain_says_where_chunks_are(pair: Pair, client: XavierClient) -> None:
    numbers, _ = share(pair)
    mine, unknown = fresh_numbers(2)
    pair.first.store([make_key(mine)])
    wait_until_known(pair, make_key(mine))
    prompt = " ".join(map(str, [*numbers, mine, unknown]))
    answer = client.explain(MODEL, prompt)
    assert (answer.prompt_tokens, answer.chunk_tokens) == (4 * CHUNK_TOKENS, CHUNK_TOKENS)
    both = {"first", "second"}
    assert [set(chunk.holders) for chunk in answer.chunks] == [both, both, {"first"}, set()]
    assert (answer.chunks[1].start, answer.chunks[1].end) == (CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    assert (answer.held("first"), answer.held("second")) == (3 * CHUNK_TOKENS, 2 * CHUNK_TOKENS)


def test_explain_takes_one_question(client: XavierClient) -> None:
    with pytest.raises(ValueError, match="either a prompt or messages"):
        client.explain(MODEL)
    with pytest.raises(ValueError, match="either a prompt or messages"):
        client.explain(MODEL, "1", messages=[])


def test_flushed_chunks_are_gone_everywhere(pair: Pair, client: XavierClient) -> None:
    """Neither the index nor a replica finds them, and later chunks are kept."""
    numbers, _ = share(pair)
    status = client.flush(MODEL)
    told = status.raw["answers"]
    assert (sorted(told["flushed"]), told["unreachable"]) == (["first", "second"], [])
    assert [replica.pool.used for replica in status.replicas] == [0, 0]
    keys = [make_key(number) for number in numbers]
    for replica in (pair.first, pair.second):
        wait_until(lambda r=replica: not any(map(r.holders, keys)), "their peers have no chunks")
    answer = client.explain(MODEL, " ".join(map(str, numbers)))
    assert {chunk.holders for chunk in answer.chunks} == {frozenset()}
    share(pair)


def test_recent_events_and_events_as_they_happen(pair: Pair, client: XavierClient) -> None:
    events = client.events(MODEL)
    assert [next(events).event for _ in range(2)] == ["ReplicaJoined"] * 2
    told: list[EventRecord] = []
    listening = threading.Thread(target=lambda: told.extend(_until_dropped(events)))
    listening.start()
    with XavierClient(pair.api.endpoint) as other:
        other.flush(MODEL)
    listening.join(60)
    assert told[-1].event == "CacheFlushed"
    assert told[-1].fields == {"model_uid": MODEL, "replicas": 2}


def _until_dropped(events: Iterator[EventRecord]) -> Iterator[EventRecord]:
    for event in events:
        yield event
        if event.event == "CacheFlushed" and event.fields["replicas"] == 2:
            return


def test_events_of_a_replica_reach_the_client(pair: Pair, client: XavierClient) -> None:
    keys = fresh_keys(2)
    pair.first.store(keys)
    wait_until_known(pair, keys[1])
    pair.first.forget(keys)
    assert pair.second.fetch("first", keys, 30.0).reason == "not held"
    event = next(each for each in client.events(MODEL) if each.event == "FetchRolledBack")
    assert (event.fields["incarnation"], event.fields["donor"]) == ("second", "first")
    assert (event.fields["reason"], event.fields["rows"]) == ("not held", 2)


def test_a_model_that_does_not_share_is_not_found(client: XavierClient) -> None:
    with pytest.raises(ModelNotFoundError, match="does not share its cache here"):
        client.status("other")
    with pytest.raises(ModelNotFoundError, match="does not share its cache here"):
        next(client.watch("other"))
