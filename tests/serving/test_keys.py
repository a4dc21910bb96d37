"""API keys that may change how models share. Accounts, keys and checks are xinference's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import HTTPException, Request
from fastapi.security import SecurityScopes
from xinference.api.oauth2.advanced.auth_service import AdvancedAuthService

from tests.serving.test_api import URL, client_of

CHANGES = {"permission_type": "xavier", "permission_value": "write"}
ALL = {"permission_type": "all"}
MODEL = {"permission_type": "model_id", "permission_value": "m"}
OTHER = {"permission_type": "model_id", "permission_value": "other"}
OPERATOR = ("models:list", "models:read", "models:write")
Keys = Callable[..., str]


@pytest.fixture
def service(tmp_path: Path) -> AdvancedAuthService:
    return AdvancedAuthService(str(tmp_path / "auth.db"), "a secret", "another secret")


@pytest.fixture
def make_key(service: AdvancedAuthService) -> Keys:
    """A new key of a new account with these rights."""

    def make(*permissions: dict[str, str], owner: tuple[str, ...] = OPERATOR) -> str:
        name = f"number {service.db.user_count()}"
        account = service.db.create_user(name, None, permissions=owner)
        made = service.create_api_key_for_user(account, name, model_permissions=[*permissions])
        return str(made["key"])

    return make


async def statuses(supervisor: Any, service: Any, key: str) -> list[int]:
    """Of all that changes something, and then of what all keys may do."""
    async with client_of(supervisor, service=service) as client:
        client.headers["authorization"] = f"Bearer {key}"
        answers: list[httpx.Response] = [
            await client.patch(URL, json={"enabled": False}),
            await client.put(f"{URL}/weights", json={"version": "2"}),
            await client.post(f"{URL}/flush"),
            await client.get(URL),
        ]
    return [answer.status_code for answer in answers]


MAY_CHANGE, MAY_READ = [200, 200, 200, 200], [403, 403, 403, 200]


@pytest.mark.parametrize("models", [ALL, MODEL])
async def test_a_key_changes_its_models_if_it_was_given_the_permission(
    models: dict[str, str], supervisor: Any, tracker: Any, service: Any, make_key: Keys
) -> None:
    assert await statuses(supervisor, service, make_key(models, CHANGES)) == MAY_CHANGE
    assert await statuses(supervisor, service, make_key(models)) == MAY_READ
    assert (await tracker.status())["enabled"] is False


@pytest.mark.parametrize(
    "permissions",
    [
        [OTHER, CHANGES],
        [CHANGES],
        [ALL, {"permission_type": "xavier"}],
        [ALL, {"permission_type": "xavier", "permission_value": "read"}],
        [ALL, {"permission_type": "model_id", "permission_value": "write"}],
    ],
    ids=["for another model", "for no model", "no value", "another value", "another type"],
)
async def test_no_other_key_changes_anything(
    permissions: Any, supervisor: Any, tracker: Any, service: Any, make_key: Keys
) -> None:
    assert await statuses(supervisor, service, make_key(*permissions)) == MAY_READ
    assert (await tracker.status())["enabled"] is True


async def test_a_key_may_do_no_more_than_its_owner(
    supervisor: Any, tracker: Any, service: Any, make_key: Keys
) -> None:
    """Accounts that may make keys for themselves choose their permissions."""
    reader = ("models:list", "models:read", "keys:create")
    assert await statuses(supervisor, service, make_key(ALL, CHANGES, owner=reader)) == MAY_READ
    key = make_key(ALL, CHANGES)
    assert await statuses(supervisor, service, key) == MAY_CHANGE
    service.db.set_user_permissions(service.validate_api_key(key).user_id, reader)
    assert await statuses(supervisor, service, key) == MAY_READ


async def test_a_disabled_key_opens_nothing(
    supervisor: Any, tracker: Any, service: Any, make_key: Keys
) -> None:
    key = make_key(ALL, CHANGES)
    service.disable_user(service.validate_api_key(key).user_id)
    assert await statuses(supervisor, service, key) == [401] * 4
    assert await statuses(supervisor, service, "sk-unknown") == [401] * 4


async def test_xinference_s_own_routes_stay_closed_to_such_a_key(
    service: Any, make_key: Keys
) -> None:
    """Launching and ending models, accounts and keys ask for other scopes."""
    scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": [], "client": None}
    key = make_key(ALL, CHANGES)
    with pytest.raises(HTTPException, match="API keys can only access"):
        await service(Request(scope), SecurityScopes(["models:write"]), key)
