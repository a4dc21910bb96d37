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
from fastapi.routing import APIRoute

from tests.harness.api import Pair
from tests.harness.guarded_api import GuardedApi, User, bearer
from tests.harness.replicas import MODEL
from tests.serving.supervisors import api_context
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
STRANGERS: list[dict[str, str]] = [
    {},
    bearer("not-a-token"),
    bearer("sk-notakey"),
    {"Authorization": "Basic YTpi"},
]


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
def test_who_may_ask(guarded: Guarded, route: str) -> None:
    """xinference's API keys may list all models, and ask their own."""
    for headers in STRANGERS:
        answer = ask(guarded, route, headers)
        assert answer.status_code == 401
        assert answer.json() == {"detail": "Could not validate credentials"}
    right = RIGHTS[route]
    table = [
        ("admin", guarded.api.admin.headers, True),
        *((each, user.headers, each == right) for each, user in guarded.users.items()),
        ("a key", bearer(guarded.key), right != WRITE),
        ("a key of another model", bearer(guarded.elsewhere), right == LIST),
    ]
    for who, headers, may in table:
        answer = ask(guarded, route, headers)
        assert answer.is_success if may else answer.status_code == 403, who


@pytest.mark.parametrize("route", REPORTS)
def test_a_key_for_another_model_reads_no_names_of_this_one(guarded: Guarded, route: str) -> None:
    """The rest of a report is for everybody who may list models."""
    assert ask(guarded, ADD, guarded.api.admin.headers).is_success
    assert "guide" not in ask(guarded, route, bearer(guarded.elsewhere)).text
    shown = ask(guarded, route, guarded.api.admin.headers).text
    assert ("guide" in shown) is (route != "GET /v1/cluster/xavier")


def test_without_permission_nobody_learns_whether_a_model_exists(guarded: Guarded) -> None:
    path, writer = "/v1/xavier/other", guarded.users[WRITE].headers
    assert guarded.api.http.get(path).status_code == 401
    assert guarded.api.http.get(path, headers=writer).status_code == 403


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
