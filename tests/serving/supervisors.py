"""A stand-in for xinference's supervisor, and what xinference hands to an extension."""

from collections.abc import Awaitable, Callable
from typing import Any

import xoscar as xo
from fastapi import APIRouter, FastAPI
from xinference.extensions import APIExtensionContext

from xinference_xavier.errors import NotFoundError
from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.serving.gateway import TrackerGateway, supervisor_process_info

KEY_BYTES = 36


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Knows where the trackers of some models are."""

    xavier_process_info = supervisor_process_info

    def __init__(self, workers: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._addresses: dict[str, str | None] = {}
        self._worker_address_to_worker = workers or {}

    async def put(self, model_uid: str, address: str | None = "") -> None:
        """The model's tracker is at `address`, by default here; None: the model has ended."""
        self._addresses[model_uid] = address

    async def xavier_models(self) -> dict[str, dict[str, str]]:
        return {uid: {} for uid in self._addresses}

    async def xavier_tracker_address(self, model_uid: str, create: bool = False) -> str:
        assert not create
        address = self._addresses.get(model_uid)
        if address is None:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return address or str(self.address)


class Bare(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A process without our extension."""


async def join(
    tracker: Any, incarnation: str, name: str = "", address: str = "127.0.0.1:1"
) -> None:
    await tracker.join("ns", Member(incarnation, address), Settings(), name)


def gateway_to(supervisor: Any) -> TrackerGateway:
    return TrackerGateway(ref_to(supervisor))


def ref_to(supervisor: Any) -> Callable[[], Awaitable[Any]]:
    async def get_supervisor_ref() -> Any:
        return supervisor

    return get_supervisor_ref


async def _nobody() -> Any:
    raise AssertionError("nothing calls the supervisor")


def api_context(auth_service: Any = None) -> APIExtensionContext:
    """What an API hands to an extension. With an `auth_service`, it requires authentication."""
    return APIExtensionContext(
        app=FastAPI(),
        router=APIRouter(),
        auth_service=auth_service,
        auth_enabled=auth_service is not None,
        get_supervisor_ref=_nobody,
    )
