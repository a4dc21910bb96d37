"""The REST routes, with a real tracker, real replicas' actors and a real supervisor's actor."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import xoscar as xo
from fastapi import HTTPException, Request

from tests.serving.supervisors import Supervisor, api_context, gateway_to, join
from xinference_xavier.errors import ExplainError
from xinference_xavier.protocol.load import Load, Serving
from xinference_xavier.protocol.tracker import SHORT_KEY, unpack_question
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.serving import api as module
from xinference_xavier.serving.api import add_routes
from xinference_xavier.serving.rest import answered_for, model_access
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import FirstTokens, ReplicaStats

HITS = {"prefix_cache": 1, "local_pool": 20, "disk": 5, "remote": 300, "computed": 4000}
WAITS, BOTH_WAITS = FirstTokens(), FirstTokens()
WAITS.remote.observe(1.5)
for _ in range(2):
    BOTH_WAITS.remote.observe(1.5)
STATS: dict[str, Any] = {
    "hits": HITS,
    "first_tokens": asdict(WAITS),
    "bytes_received": 7,
    "fetches": {"started": 5, "committed": 3, "rolled_back": {"timeout": 2}},
    "pool": {"rows": 16, "row_bytes": 64},
    "requests": 9,
    "seconds_saved": 1.5,
    "transport": "gloo",
}
QUESTION = {"prompt": "What?"}
CHUNK = {"from": 0, "to": 4, "replicas": {"a": "pool"}}
GUIDE = {
    **{"name": "guide", "state": "kept", "reason": "", "tokens": 4, "chunks": 1, "replicas": {}},
    **{"ttl": 60.0, "copies": 1, "retention": "soft", "created": 1.0, "used": 1.0, "expires": 2.0},
}
URL = "/v1/xavier/m"


class Replica(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A replica; the one with the incarnation "reset" was reset."""

    async def stats(self) -> dict[str, Any]:
        return STATS

    async def set_weights_version(self, version: str) -> bool:
        assert version == "2"
        return bool(self.uid == replica_uid("reset").encode())

    async def flush(self) -> int:
        return 3

    async def explain(self, packed: bytes) -> dict[str, Any]:
        question = unpack_question(packed)
        if salt := question.pop("cache_salt", None):
            raise ExplainError(f"nothing of {salt}")
        if question != QUESTION:
            raise ExplainError("no tokenizer here")
        return {
            **{"prompt_tokens": 5, "context_tokens": 4096, "chunk_tokens": 4},
            **{
                "chunks": [CHUNK],
            },
        }


def client_of(supervisor: Any) -> httpx.AsyncClient:
    context, trackers = api_context(), gateway_to(supervisor)
    add_routes(context, trackers)
    context.app.include_router(context.router)
    transport = httpx.ASGITransport(context.app)
    return httpx.AsyncClient(transport=transport, base_url="http://api")


@pytest.fixture
async def client(supervisor: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(supervisor) as client:
        yield client


class Model:
    """The model `m`: its tracker and replicas, at one address, and a client of the API."""

    def __init__(self, client: httpx.AsyncClient, tracker: Any, address: str) -> None:
        self.client, self.tracker, self.address = client, tracker, address

    async def add(self, incarnation: str, chunks: int = 1, *, silent: bool = False) -> None:
        """A replica joins, and says that it holds so many chunks."""
        if not silent:
            await xo.create_actor(Replica, address=self.address, uid=replica_uid(incarnation))
        await join(self.tracker, incarnation, address=self.address)
        keys = [f"{incarnation}{number}".encode().rjust(SHORT_KEY) for number in range(chunks)]
        await self.tracker.publish("ns", incarnation, 1, b"".join(keys), b"", True)

    async def get(self) -> Any:
        answer = await self.client.get(URL)
        assert answer.status_code == 200
        return answer.json()

    async def change(self, **body: Any) -> Any:
        answer = await self.client.patch(URL, json=body)
        assert answer.status_code == 200
        return answer.json()

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.client.post(f"{URL}{path}", json=body)
        assert answer.status_code == 200
        return answer.json()

    async def explain(self) -> Any:
        return await self.post("/explain", **QUESTION)


@pytest.fixture
def model(client: httpx.AsyncClient, tracker: Any, address: str) -> Model:
    return Model(client, tracker, address)


async def test_replicas_and_totals(model: Model) -> None:
    await model.add("a", 2)
    await model.add("b", 3)
    body = await model.get()
    assert (body["model_uid"], body["enabled"]) == ("m", True)
    first, second = sorted(body["replicas"], key=lambda replica: replica["incarnation"])
    assert (first["incarnation"], first["address"], first["namespace"]) == (
        "a",
        model.address,
        "ns",
    )
    assert (first["holdings"], second["holdings"]) == (2, 3)
    assert first["stale"] is False
    assert read(ReplicaStats, first) == read(ReplicaStats, STATS)
    assert body["totals"] == {
        "holdings": 5,
        "hits": {source: 2 * tokens for source, tokens in HITS.items()},
        "first_tokens": asdict(BOTH_WAITS),
        "bytes_received": 14,
        "fetches": {"started": 10, "committed": 6, "rolled_back": {"timeout": 4}},
        "requests": 18,
        "seconds_saved": 3.0,
    }


async def test_nobody_is_sent_again_what_he_has(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages ask each second."""
    await model.add("a")
    tag = (await model.client.get(URL)).headers["etag"]
    monkeypatch.setattr(module, "MAX_AGE", 3600.0)
    for _ in range(2):
        again = await model.client.get(URL, headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        await model.tracker.set_enabled(False)
    assert not (await model.get())["enabled"], "who has none gets the latest"
    monkeypatch.setattr(module, "MAX_AGE", -1.0)
    later = await model.client.get(URL, headers={"if-none-match": tag})
    assert (later.json()["enabled"], later.headers["etag"] != tag) == (False, True)


async def test_the_latest_events_and_then_only_new_ones(model: Model) -> None:
    await model.add("a")
    first = (await model.client.get(f"{URL}/events")).json()
    assert [each["event"] for each in first["events"]] == ["ReplicaJoined"]
    after = {"after": first["last"]}
    assert (await model.client.get(f"{URL}/events", params=after)).json() == {
        **{"last": first["last"], "events": []}
    }
    await model.tracker.set_enabled(False)
    new = (await model.client.get(f"{URL}/events", params=after)).json()
    assert [each["event"] for each in new["events"]] == ["SharingSwitched"]
    assert new["last"] > first["last"]


@pytest.mark.parametrize("after", ["x", "-1"])
async def test_what_is_no_number_of_an_event_is_refused(model: Model, after: str) -> None:
    answer = await model.client.get(f"{URL}/events", params={"after": after})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"after='{after}': Input should be")


async def test_loads_and_forecasts_of_the_replicas(model: Model) -> None:
    """Replicas report them first."""
    await model.add("a")
    serving = Serving(chunk_tokens=4, chunk_bytes=1, request_limit=3)
    load = Load(serving, 1000, 3600.0, 3, rates=(0.5, 0.0, 0.0, 0.0))
    assert (await model.get())["routing"]["loads"] == {}
    await model.tracker.report_load("ns", "a", load, ())
    async with asyncio.timeout(60):
        while not (found := (await model.get())["routing"])["loads"]:
            pass
    assert found["mode"] == "auto"
    assert found["loads"]["a"] == {
        "backlog_s": pytest.approx(3600.0, abs=60.0),
        "requests": 3,
        "accepts": False,
        "role": "any",
    }


async def test_setting_the_weights_version(model: Model) -> None:
    await model.add("reset")
    await model.add("as it was")
    await model.add("silent", silent=True)
    answer = await model.client.put(f"{URL}/weights", json={"version": "2"})
    assert answer.json()["answers"] == {
        "joined": ["reset"],
        "not_reset": ["as it was"],
        "unreachable": ["silent"],
    }


async def test_several_settings_change_at_once(model: Model) -> None:
    answer = await model.change(enabled=False, routing="backlog")
    assert (answer["enabled"], answer["routing"]["mode"]) == (False, "backlog")
    answer = await model.change(enabled=True, routing="off", for_s=60)
    assert (answer["enabled"], answer["routing"]["mode"]) == (True, "off")
    answer = await model.change(routing="off", for_s=0)
    assert (answer["enabled"], answer["routing"]["mode"]) == (False, "backlog")


async def test_all_models_at_once(model: Model) -> None:
    answer = await model.client.get("/v1/xavier")
    assert answer.status_code == 200
    assert answer.json() == {"models": [await model.get()], "unavailable": {}}


async def test_a_model_that_does_not_answer_does_not_hide_the_others(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("/v1/xavier")
    assert answer.json() == {
        "models": [],
        "unavailable": {"m": "model 'm' does not share its cache here"},
    }


async def test_flushing_asks_all_replicas(model: Model) -> None:
    await model.add("a")
    await model.add("silent", silent=True)
    assert (await model.post("/flush"))["answers"] == {"flushed": ["a"], "unreachable": ["silent"]}


async def test_explaining_passes_the_replicas_answer_on(model: Model) -> None:
    empty = await model.client.post(f"{URL}/explain", json=QUESTION)
    assert (empty.status_code, empty.json()["detail"]) == (503, "no replica has joined yet")
    await model.add("a")
    answer = await model.explain()
    assert (answer["prompt_tokens"], answer["chunks"]) == (5, [CHUNK])
    salted = await model.client.post(f"{URL}/explain", json={**QUESTION, "cache_salt": "tenant"})
    assert (salted.status_code, salted.json()["detail"]) == (503, "nothing of tenant")
    refused = await model.client.post(f"{URL}/explain", json={"prompt": "else"})
    assert (refused.status_code, refused.json()["detail"]) == (503, "no tokenizer here")


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    for answer in (
        await client.get("/v1/xavier/other"),
        await client.get("/v1/xavier/other/events"),
        await client.get("/v1/xavier/other/history"),
        await client.patch("/v1/xavier/other", json={"enabled": False}),
        await client.post("/v1/xavier/other/flush"),
        await client.post("/v1/xavier/other/explain", json=QUESTION),
    ):
        assert answer.status_code == 404
        assert answer.json()["detail"] == "model 'other' does not share its cache here"
        assert answer.headers["x-xavier-not-found"] == "model"


async def test_a_supervisor_that_is_gone_is_unavailable() -> None:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    gone = await xo.create_actor(Supervisor, address=pool.external_address)
    await pool.stop()
    async with client_of(gone) as client:
        for path in ("/v1/xavier", URL, f"{URL}/events"):
            assert (await client.get(path)).status_code == 503


async def test_other_errors_pass() -> None:
    async def fails() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        await answered_for("m", fails())


class Key(SimpleNamespace):
    def has_model_access(self, model_uid: str, model_type: str) -> bool:
        return (model_uid, model_type) == ("mine", "LLM")


class Service:
    """xinference's, of sessions."""

    def validate_model_access(self, token: str, model_uid: str, model_type: str) -> bool:
        return (token, model_uid, model_type) == ("token", "mine", "LLM")


def request(**state: Any) -> Request:
    headers = [(b"authorization", b"Bearer token")]
    return Request({"type": "http", "headers": headers, "state": state})


@pytest.mark.parametrize("state", [{"authenticated_api_key": Key()}, {}])
def test_a_key_is_good_for_its_models_only(state: Any) -> None:
    check = model_access(api_context(Service()))
    check(request(**state), "mine")
    with pytest.raises(HTTPException, match="the API key is not valid for model 'other'"):
        check(request(**state), "other")
