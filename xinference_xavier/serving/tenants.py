"""`XINFERENCE_XAVIER_TENANTS=api_key`: each API key is a tenant, without the client's help.

xinference asks an extension that supplies salts for the `cache_salt` of each request, so this is a
setting of the API process and not of a launch. The key and the request's own salt, if it has one,
make one salt, so tenants can divide what is theirs further. A login without a key counts as its
account.
"""

import hashlib
import json
import os
from typing import Any

from xinference_xavier.errors import ConfigError
from xinference_xavier.serving import seam
from xinference_xavier.serving.extension import XavierExtension

VARIABLE = "XINFERENCE_XAVIER_TENANTS"
BY_KEY = "api_key"


def by_key() -> bool:
    """True if each API key is a tenant. Raises ConfigError."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in ("", BY_KEY):
        raise ConfigError(VARIABLE, value, "is not a choice", f"use {BY_KEY}, or leave it out")
    return value == BY_KEY


class TenantsExtension(XavierExtension):
    """The extension where each API key is a tenant. xinference takes one that has `cache_salt` as
    the one that supplies salts, so only this one has it."""

    def configure_api(self, context: Any) -> None:
        if not context.auth_enabled:
            raise ConfigError(
                VARIABLE,
                BY_KEY,
                "needs accounts, and XINFERENCE_AUTH_ADVANCED switches them off",
                "leave one of the two out",
            )
        super().configure_api(context)

    def cache_salt(self, request: Any) -> Any:
        """The same for a request whenever it is asked: xinference replaces the request's own."""
        state = request.state
        if not hasattr(state, "xavier_salt"):
            own = seam.own_salt(request)
            parts = f"{seam.identity(request)}\0{json.dumps(own)}"
            state.xavier_salt = hashlib.sha256(parts.encode()).hexdigest()
        return seam.cache_salt(state.xavier_salt)
