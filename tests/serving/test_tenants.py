"""Each API key has a salt of its own, joined to the request's own: two keys share nothing."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from xinference import extensions
from xinference.api.restful_api import RESTfulAPI

import xinference_xavier
from tests.harness.api import Pair
from tests.harness.guarded_api import GuardedApi, bearer
from tests.harness.replicas import MODEL
from xinference_xavier.errors import ConfigError
from xinference_xavier.serving.rest import tenant_of
from xinference_xavier.serving.tenants import VARIABLE, TenantsExtension

PREFIXES = f"/v1/xavier/{MODEL}/prefixes"


@pytest.fixture(autouse=True)
def _extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "get_extensions", lambda: (TenantsExtension(),))


def request(key: str | None = None, user: str = "someone") -> Request:
    """An authenticated one."""
    asked = Request({"type": "http", "headers": [], "query_string": b""})
    asked.state.audit_identity = {"user": user}
    if key is not None:
        asked.state.authenticated_api_key = SimpleNamespace(key_hash=key)
    return asked


def applied(asked: Request, **body: Any) -> tuple[Any, str]:
    """The salt with which xinference asks the model, and the one by which we route and name."""
    asked._json = body  # xinference has read it by then
    RESTfulAPI._apply_cache_salt(asked, body)
    return body["cache_salt"], tenant_of(asked, body["cache_salt"])


def test_a_request_s_own_salt_is_joined() -> None:
    salts = {
        applied(request(key), **({"cache_salt": own} if own is not None else {}))[0]
        for key in ("a", "b")
        for own in (None, "", "x", "y")
    }
    assert len(salts) == 8
    assert applied(request("a"))[0] == applied(request("a"))[0], "a key shares with itself"
    stolen = applied(request("a"), cache_salt="x")[0]
    assert applied(request("b"), cache_salt=stolen)[0] != stolen


def test_the_router_and_the_names_have_the_salt_of_the_model() -> None:
    """xinference has replaced the request's own by then."""
    asked, ours = applied(request("a"), cache_salt="x")
    assert asked == ours
    assert tenant_of(request("a"), "x") == asked  # a route of ours


def test_a_login_without_a_key_is_its_account() -> None:
    salts = {applied(request(user=user))[0] for user in ("a", "b")}
    assert len(salts | {applied(request("a"))[0]}) == 3


def test_it_is_off_by_default_and_needs_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not hasattr(xinference_xavier.extension(), "cache_salt")
    monkeypatch.setenv(VARIABLE, "api_key")
    found = xinference_xavier.extension()
    with pytest.raises(ConfigError, match="needs accounts"):
        found.configure_api(SimpleNamespace(auth_enabled=False))
    monkeypatch.setenv(VARIABLE, "user")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='user' is not a choice; use api_key"):
        xinference_xavier.extension()


@pytest.fixture
def api(pair: Pair, tmp_path: Path) -> Iterator[GuardedApi]:
    api = GuardedApi(pair.api.address, tmp_path, tenants="api_key")
    yield api
    api.stop()


@pytest.mark.process
def test_with_real_keys_a_name_belongs_to_one_of_them(api: GuardedApi) -> None:
    one, other = (bearer(api.api_key(name)) for name in ("one", "other"))
    added = api.http.post(PREFIXES, json={"name": "guide", "prompt": "1 2"}, headers=one)
    assert added.status_code == 201
    names = [
        [each["name"] for each in api.http.get(PREFIXES, headers=key).json()["prefixes"]]
        for key in (one, other, api.admin.headers)
    ]
    assert names == [["guide"], [], []]
