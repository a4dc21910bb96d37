"""REST routes: how a model's replicas share, and the switch.

``GET /v1/xavier/{model_uid}`` answers ``report``'s shape. ``POST`` answers the same, after it has
switched sharing off or on (``{"enabled": bool}``), or told the replicas that were reset since which
weights they have (``{"weights_version": str}``; ``"told"`` in the answer says what became of it).
404: no such model shares; 400: another body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import xoscar as xo
from fastapi import HTTPException, Request, Security
from fastapi.responses import JSONResponse

from xinference_xavier.addresses import reachable_address
from xinference_xavier.errors import NotFoundError
from xinference_xavier.tracker.actor import tracker_uid
from xinference_xavier.tracker.checks import (
    MAX_WEIGHTS_VERSION,
    check_switch,
    check_weights_version,
)

_PATH = "/v1/xavier/{model_uid}"
_DEADLINE = 10.0
_READ_SCOPE = "models:list"
_LAUNCH_SCOPE = "models:write"

_T = TypeVar("_T")


def add_routes(context: Any) -> None:
    """``context`` is xinference's APIExtensionContext."""

    def guarded_by(scope: str) -> list[Any]:
        return [Security(context.auth_service, scopes=[scope])] if context.auth_enabled else []

    async def find_tracker(model_uid: str) -> Any:
        supervisor = await context.get_supervisor_ref()
        address = await supervisor.xavier_tracker_address(model_uid)
        return await xo.actor_ref(
            address=reachable_address(address, via=supervisor.address), uid=tracker_uid(model_uid)
        )

    async def read(model_uid: str) -> dict[str, Any]:
        tracker = await find_tracker(model_uid)
        return report(await tracker.status())

    async def change(model_uid: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
        tracker = await find_tracker(model_uid)
        if "enabled" in wanted:
            await tracker.set_enabled(wanted["enabled"])
            return report(await tracker.status())
        told = await tracker.set_weights_version(wanted["weights_version"])
        return {**report(await tracker.status()), "told": told}

    async def get_sharing(model_uid: str) -> JSONResponse:
        return JSONResponse(await _answered(model_uid, read(model_uid)))

    async def set_sharing(model_uid: str, request: Request) -> JSONResponse:
        wanted = _wanted(await request.body())
        return JSONResponse(await _answered(model_uid, change(model_uid, wanted)))

    for method, endpoint, scope in (
        ("GET", get_sharing, _READ_SCOPE),
        ("POST", set_sharing, _LAUNCH_SCOPE),
    ):
        context.router.add_api_route(
            _PATH, endpoint, methods=[method], dependencies=guarded_by(scope)
        )


def report(status: Mapping[str, Any]) -> dict[str, Any]:
    """The tracker's status, one flat list of replicas with their statistics, and the sums.

    What a replica's statistics hold beyond the known fields is passed through; a replica that has
    not reported yet shows zeros.
    """
    replicas = [
        _replica(namespace, entry)
        for namespace, group in status["namespaces"].items()
        for entry in group["replicas"]
    ]
    totals = _counters()
    totals["holdings"] = 0
    for replica in replicas:
        _accumulate(totals, replica)
    return {
        "model_uid": status["model_uid"],
        "enabled": status["enabled"],
        "replicas": replicas,
        "totals": totals,
    }


def _counters() -> dict[str, Any]:
    return {
        "hits": dict.fromkeys(("own_prefix_cache", "own_pool", "peers", "computed"), 0),
        "bytes_received": 0,
        "bytes_sent": 0,
        "fetches": {"started": 0, "committed": 0, "rolled_back": {}},
        "requests": 0,
    }


def _replica(namespace: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    membership = {name: value for name, value in entry.items() if name != "stats"}
    return {
        **_counters(),
        "pool": {},
        "stale": False,
        **entry["stats"],
        **membership,
        "namespace": namespace,
    }


def _accumulate(totals: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add up what ``totals`` counts already; below ``rolled_back`` every reason counts."""
    for name, value in totals.items():
        other = part.get(name)
        if name == "rolled_back" and isinstance(other, Mapping):
            for reason, count in other.items():
                value[reason] = value.get(reason, 0) + count
        elif isinstance(value, dict) and isinstance(other, Mapping):
            _accumulate(value, other)
        elif isinstance(value, int) and isinstance(other, int):
            totals[name] = value + other


def _wanted(body: bytes) -> dict[str, Any]:
    try:
        wanted = json.loads(body)
        match wanted:
            case {"enabled": enabled} if len(wanted) == 1:
                check_switch(enabled)
                return {"enabled": enabled}
            case {"weights_version": version} if len(wanted) == 1:
                check_weights_version(version)
                return {"weights_version": version}
    except ValueError:
        pass  # no JSON, or a value that is none: refused below like all else
    raise HTTPException(
        400,
        'the body must be {"enabled": true}, {"enabled": false} or {"weights_version": "<text of 1 '
        f'to {MAX_WEIGHTS_VERSION} characters>"}}',
    )


async def _answered(model_uid: str, work: Awaitable[_T]) -> _T:
    """``work`` within the deadline, its failures turned into the HTTP answers they mean."""
    try:
        return await asyncio.wait_for(work, _DEADLINE)
    except NotFoundError as error:
        # Not str(error): xoscar puts the address of the process in front.
        raise HTTPException(404, f"model {error.model_uid!r} {error.reason}") from error
    except xo.ActorNotExist as error:
        raise HTTPException(404, f"model {model_uid!r} does not share its cache here") from error
    except (OSError, TimeoutError) as error:
        raise HTTPException(503, f"the tracker of {model_uid!r} does not answer") from error
