"""With xinference's authentication on, our routes answer only with the right permissions. API,
accounts, tokens and API keys are xinference's own; tracker and replicas are real.

Pages and scripts are public, like xinference's own; their data comes from the API.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from aioprometheus.collectors import Registry
from click.testing import CliRunner, Result
from fastapi.routing import APIRoute

from tests.harness.api import Pair
from tests.harness.guarded_api import GuardedApi, User, bearer
from tests.harness.replicas import CHUNK_TOKENS, MODEL
from tests.serving.supervisors import api_context
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient
from xinference_xavier.errors import ApiError
from xinference_xavier.serving.extension import XavierExtension

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
LIST, READ, WRITE = "models:list", "models:read", "models:write"
RIGHTS = {
    "GET /v1/xavier": LIST,
    "GET /v1/cluster/xavier": LIST,
    "GET /v1/xavier/{model_uid}": LIST,
    "GET /v1/xavier/{model_uid}/events": LIST,
    "GET /v1/xavier/{model_uid}/history": LIST,
    "PATCH /v1/xavier/{model_uid}": WRITE,
    "PUT /v1/xavier/{model_uid}/weights": WRITE,
    "POST /v1/xavier/{model_uid}/explain": READ,
    "POST /v1/xavier/{model_uid}/flush": WRITE,
    "GET /v1/xavier/{model_uid}/prefixes": READ,
    "POST /v1/xavier/{model_uid}/prefixes": READ,
    "GET /v1/xavier/{model_uid}/prefixes/{name}": READ,
    "PATCH /v1/xavier/{model_uid}/prefixes/{name}": READ,
    "DELETE /v1/xavier/{model_uid}/prefixes/{name}": READ,
}
ADD = "POST /v1/xavier/{model_uid}/prefixes"
FOR_EVERYBODY = {"/xavier", "/xavier/", "/xavier/{digest}/{path:path}"}
BODIES = {
    "PATCH /v1/xavier/{model_uid}": {"enabled": True},
    "PUT /v1/xavier/{model_uid}/weights": {"version": "2"},
    "POST /v1/xavier/{model_uid}/explain": {"prompt": "1"},
    ADD: {"name": "guide", "prompt": "1 2"},
    "PATCH /v1/xavier/{model_uid}/prefixes/{name}": {"ttl": "2h"},
}
ROUTES = sorted(RIGHTS)
REPORTS = [route for route in ROUTES if re.fullmatch(
    r"GET /v1/(cluster/)?xavier|\w+ /v1/xavier/{model_uid}(/weights|/flush)?", route
)]  # fmt: skip
"""Routes that answer with reports."""


class Guarded(NamedTuple):
    api: GuardedApi
    users: dict[str, User]  # by the only permission of each
    key: str
    elsewhere: str  # a key for another model


@pytest.fixture(scope="module")
def guarded(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    api = GuardedApi(pair.api.address, tmp_path_factory.mktemp("xinference"))
    try:
        users = {
            right: api.user(f"may-{right.replace(':', '-')}", [right])
            for right in (LIST, READ, WRITE)
        }
        yield Guarded(api, users, api.api_key("all"), api.api_key("other", "another model"))
    finally:
        api.stop()


def ask(guarded: Guarded, route: str, headers: dict[str, str] | None = None) -> httpx.Response:
    if "{name}" in route:
        assert ask(guarded, ADD, guarded.api.admin.headers).is_success
    method, path = route.replace("{model_uid}", MODEL).replace("{name}", "guide").split()
    return guarded.api.http.request(method, path, json=BODIES.get(route), headers=headers)


def served() -> list[APIRoute]:
    """All of our routes."""
    context = api_context()
    context.app.state.registry = Registry()
    XavierExtension().configure_api(context)
    return [route for route in context.router.routes if isinstance(route, APIRoute)]


def test_these_tests_cover_every_route() -> None:
    open_to_all = {route.path for route in served() if not route.path.startswith("/v1/")}
    assert open_to_all == FOR_EVERYBODY
    data = [route for route in served() if route.path.startswith("/v1/")]
    assert {f"{method} {route.path}" for route in data for method in route.methods} == set(RIGHTS)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stranger_gets_no_answer(guarded: Guarded, route: str) -> None:
    for headers in (
        {},
        bearer("not-a-token"),
        bearer("sk-notakey"),
        {"Authorization": "Basic YTpi"},
    ):
        answer = ask(guarded, route, headers)
        assert answer.status_code == 401
        assert answer.json() == {"detail": "Could not validate credentials"}


@pytest.mark.parametrize("route", ROUTES)
def test_only_the_right_permission_opens_a_route(guarded: Guarded, route: str) -> None:
    for right, user in guarded.users.items():
        answer = ask(guarded, route, user.headers)
        allowed = right == RIGHTS[route]
        assert answer.is_success if allowed else answer.status_code == 403, right
    assert ask(guarded, route, guarded.api.admin.headers).is_success


@pytest.mark.parametrize("route", ROUTES)
def test_an_api_key_reads_and_asks_but_changes_nothing(guarded: Guarded, route: str) -> None:
    """xinference's API keys have only these two permissions."""
    answer = ask(guarded, route, bearer(guarded.key))
    assert answer.is_success == (RIGHTS[route] != WRITE)


@pytest.mark.parametrize("route", [route for route in ROUTES if RIGHTS[route] == READ])
def test_a_key_for_another_model_neither_explains_nor_names_texts_of_this_one(
    guarded: Guarded, route: str
) -> None:
    """Nor could it ask this model anything."""
    headers = bearer(guarded.elsewhere)
    answer = ask(guarded, route, headers)
    assert answer.status_code == 403
    assert answer.json()["detail"] == f"the API key is not valid for model {MODEL!r}"
    assert ask(guarded, "GET /v1/xavier/{model_uid}", headers).status_code == 200


def test_a_key_for_another_model_reads_no_names_of_this_one(guarded: Guarded) -> None:
    """The rest of a report is for everybody who may list models."""
    assert ask(guarded, ADD, guarded.api.admin.headers).is_success
    for route in ROUTES:
        assert "guide" not in ask(guarded, route, bearer(guarded.elsewhere)).text, route
    for route in REPORTS:
        shown = ask(guarded, route, guarded.api.admin.headers).text
        assert ("guide" in shown) is (route != "GET /v1/cluster/xavier"), route


def test_without_permission_nobody_learns_whether_a_model_exists(guarded: Guarded) -> None:
    for path in (MODEL, "other"):
        assert guarded.api.http.get(f"/v1/xavier/{path}").status_code == 401
        writer = guarded.users[WRITE].headers
        assert guarded.api.http.get(f"/v1/xavier/{path}", headers=writer).status_code == 403


@pytest.mark.parametrize("path", sorted(FOR_EVERYBODY))
def test_pages_are_public_like_xinferences_own(guarded: Guarded, path: str) -> None:
    """They hold no data: everyone gets the same page."""
    if path not in ("/xavier", "/xavier/"):
        (path, *_) = re.findall(r'src="([^"]+)"', guarded.api.http.get("/xavier/").text)
    for each in ("/login", path):
        assert guarded.api.http.get(each, follow_redirects=True).status_code == 200
    of_admin = guarded.api.http.get(path, headers=guarded.api.admin.headers)
    assert guarded.api.http.get(path).content == of_admin.content


def test_the_route_that_examples_wait_for_needs_no_permission(guarded: Guarded) -> None:
    """Otherwise they would wait for ever where xinference requires a sign-in, its default."""
    waiting = "curl --silent --fail --output /dev/null "
    for example in ("two_hosts.sh", "docker-compose/compose.yaml"):
        (address,) = re.findall(rf"{waiting}(\S+)", (EXAMPLES / example).read_text())
        path = address.strip('";').partition("/v1/")[2]
        assert guarded.api.http.get(f"/v1/{path}").status_code == 200, address


def test_metrics_are_as_open_as_xinferences_own(guarded: Guarded) -> None:
    shown = guarded.api.http.get("/metrics")
    assert shown.status_code == 200
    names = set(re.findall(r"^xinference:\w+", shown.text, re.MULTILINE))
    ours = {name for name in names if name.startswith("xinference:xavier_")}
    assert ours
    assert names - ours


def test_the_client_with_a_token_and_with_a_key(guarded: Guarded) -> None:
    endpoint = guarded.api.endpoint
    with XavierClient(endpoint, guarded.users[LIST].token) as client:
        assert [each.model_uid for each in client.models().models] == [MODEL]
        assert next(client.watch(MODEL)).model_uid == MODEL
        assert next(client.events(MODEL)).event == "ReplicaJoined"
        with pytest.raises(ApiError, match="Not enough permissions") as refused:
            client.flush(MODEL)
        assert refused.value.status == 403
    with XavierClient(endpoint, guarded.key) as client:
        assert client.status(MODEL).enabled
        assert client.explain(MODEL, "1").prompt_tokens == CHUNK_TOKENS
        with pytest.raises(ApiError, match="API keys can only access model query"):
            client.switch(MODEL, True)
    with XavierClient(endpoint, guarded.users[WRITE].token) as client:
        assert client.switch(MODEL, True).enabled
        assert client.flush(MODEL).raw["answers"]["unreachable"] == []


def test_the_command_line(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))  # no login is stored here
    monkeypatch.setenv("XINFERENCE_ENDPOINT", guarded.api.endpoint)

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, words)

    monkeypatch.delenv("XINFERENCE_API_KEY", raising=False)
    refused = run("status")
    assert refused.exit_code == 3
    assert "log in with `xinference login`" in refused.output
    monkeypatch.setenv("XINFERENCE_API_KEY", guarded.key)
    assert MODEL in run("status").output
    assert run("doctor").exit_code in (0, 1)  # it could look, whatever it found
    flush = ("flush", MODEL, "--yes")
    assert run(*flush).exit_code == 3
    assert run(*flush, "--api-key", guarded.users[WRITE].token).exit_code == 0
