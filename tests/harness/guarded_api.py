"""xinference's own API in a separate process, with authentication on and our extension loaded, in
front of a supervisor of `tests/harness/api.py`. There are no models and no accounts at first.

xinference reads its environment when it is imported, so only the new process imports it.
"""

import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.harness.remote import Remote, spawned, tell_ready

_PATIENCE = 300.0
_PASSWORD = "a long password"


class User(NamedTuple):
    name: str
    password: str
    token: str

    @property
    def headers(self) -> dict[str, str]:
        return bearer(self.token)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class GuardedApi:
    def __init__(self, supervisor: str, home: Path, tenants: str = "") -> None:
        """`supervisor` is an address, `home` becomes XINFERENCE_HOME, where accounts are kept.
        `tenants` is the value of XINFERENCE_XAVIER_TENANTS."""
        self._process = Remote(_serve, supervisor, str(home), tenants, context=spawned())
        port, setup_token = self._process.wait_until_ready(_PATIENCE)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.endpoint, timeout=_PATIENCE)
        account = {"username": "admin", "password": _PASSWORD, "setup_token": setup_token}
        self._done(self.http.post("/v1/admin/setup", json=account))
        self.admin = self.sign_in("admin")

    def stop(self) -> None:
        self.http.close()
        self._process.kill()

    def user(self, name: str, permissions: Sequence[str]) -> User:
        """A new account with these rights, signed in."""
        account = {"username": name, "password": _PASSWORD, "permissions": list(permissions)}
        self._done(self.http.post("/v1/admin/users", json=account, headers=self.admin.headers))
        return self.sign_in(name)

    def sign_in(self, name: str) -> User:
        account = {"username": name, "password": _PASSWORD}
        answer = self._done(self.http.post("/token", json=account))
        return User(name, _PASSWORD, answer.json()["access_token"])

    def api_key(self, name: str, model_uid: str | None = None) -> str:
        """A key for one model, or for all."""
        allowed = [{"permission_type": "model_id", "permission_value": model_uid}]
        body = {"name": name, "model_permissions": allowed if model_uid is not None else None}
        answer = self.http.post("/v1/admin/keys", json=body, headers=self.admin.headers)
        key: str = self._done(answer).json()["key"]
        return key

    @staticmethod
    def _done(answer: httpx.Response) -> httpx.Response:
        assert answer.is_success, answer.text
        return answer


def _serve(pipe: Connection, supervisor: str, home: str, tenants: str) -> None:
    os.environ.update(
        XINFERENCE_HOME=home,
        XINFERENCE_AUTH_ADVANCED="true",
        XINFERENCE_EXTENSIONS="xinference_xavier:extension",
        XINFERENCE_XAVIER_TENANTS=tenants,
        # It locks an address out after ten failures, and all tests have the same address.
        XINFERENCE_RATE_LIMIT_IP_MAX_FAILURES="1000000",
    )
    from xinference.api.restful_api import RESTfulAPI

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        api = RESTfulAPI(supervisor, "127.0.0.1", port)
        tell_ready(pipe, (port, api._advanced_auth_service.setup_token))
        api.serve(sockets=[listening])
