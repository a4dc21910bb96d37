"""The object that XINFERENCE_EXTENSIONS names meets the rules of xinference's loader."""

import inspect
import json
from typing import Any

import httpx
from fastapi import Request, Response
from xinference.extensions import EXTENSION_API_VERSION

from tests.serving.supervisors import api_context
from xinference_xavier import __version__
from xinference_xavier.serving.extension import XavierExtension


def test_it_is_what_the_loader_accepts() -> None:
    extension = XavierExtension()
    assert extension.name == "xinference_xavier"
    assert extension.api_version == EXTENSION_API_VERSION
    for hook in ("configure_api", "worker_metadata", "filter_worker_resources"):
        assert not inspect.iscoroutinefunction(getattr(extension, hook))


def test_metadata_is_plain_data() -> None:
    assert json.loads(json.dumps(XavierExtension().worker_metadata())) == {"version": __version__}


def test_every_device_stays_visible() -> None:
    worker = {"gpu_devices": [0, 2]}
    visible = XavierExtension().filter_worker_resources(worker, [worker])
    assert visible == [0, 2]
    assert visible is not worker["gpu_devices"]


async def test_what_xinference_refuses_costs_nothing() -> None:
    """xinference answers so to an address that is not allowed."""
    context = api_context()  # its supervisor may not be called

    @context.app.middleware("http")
    async def refuse(request: Request, _: Any) -> Response:
        return Response("Access denied", 403)

    XavierExtension().configure_api(context)
    transport = httpx.ASGITransport(context.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        assert (await client.get("/metrics")).status_code == 403
