"""xinference's own handlers of the text routes, with our middleware, `require_model` and router
before model actors. There is no engine and no supervisor's process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import xoscar as xo
from fastapi import APIRouter, FastAPI

from tests.e2e.text_routes import body_of
from tests.frontend.cluster import Cluster
from tests.serving.text_models import Asked, TextModel
from xinference_xavier.errors import PrefixNotFoundError
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.routing.texts import Text
from xinference_xavier.serving.launch.supervisor import finding_replicas
from xinference_xavier.serving.prefixes import not_found
from xinference_xavier.serving.routing import ContentOf, add_routing

HEADERS = {"anthropic-version": "2023-06-01"}
REPLICAS = ("m-0", "m-1")
WRAPPED = ("require_model", "parse_anthropic_request", "parse_responses_request")


async def no_prefixes(model_uid: str, tenant: str, name: str) -> Any:
    raise not_found(PrefixNotFoundError(f"no prefix named {name!r}"))


class Told(NamedTuple):
    """What a router is told of a request."""

    text: Text
    session: str


class _Known(Routers):
    """The router of the model "m" only."""

    def __init__(self, router: ModelRouter) -> None:
        self.router = router

    def get(self, model_uid: str) -> ModelRouter | None:
        return self.router if model_uid == "m" else None


class Worker:
    def __init__(self, models: dict[str, Any]) -> None:
        self._models = models

    async def get_model(self, model_uid: str) -> Any:
        return self._models[model_uid]


class Supervisor:
    """Knows where the replicas are. In turn is their order."""

    address = "127.0.0.1:1"

    def __init__(self, models: dict[str, Any]) -> None:
        self.models = models
        self._turn = 0
        self._replica_model_uid_to_worker = dict.fromkeys(models, Worker(models))

    @finding_replicas
    async def get_model(self, model_uid: str, **_: Any) -> Any:
        self._turn += 1
        return [*self.models.values()][self._turn % len(self.models)]

    async def describe_model(self, model_uid: str) -> dict[str, str]:
        return {"model_family": "qwen2.5-instruct", "model_name": "qwen2.5-instruct"}

    async def resolve_token_router_runtime(self, model_uid: str) -> None:
        return None


def llm_router(**attributes: Any) -> APIRouter:
    """xinference's routes of LLMs, of an API with these attributes."""
    from xinference.api.model_request_logging import ModelRequestLoggingRoute
    from xinference.api.restful_api import RESTfulAPI
    from xinference.api.routers import llm

    api = object.__new__(RESTfulAPI)
    vars(api).update(attributes, _advanced_auth_service=None, _auth_service=None)
    api._router = APIRouter(route_class=ModelRequestLoggingRoute)
    llm.register_routes(api)
    return api._router  # type: ignore[no-any-return]


class TextApi:
    """The API of a model "m" with two replicas at `address`, a pool in another process. `client`
    asks it, `cluster` is what the router is told."""

    models: dict[str, Any]
    client: httpx.AsyncClient
    app: FastAPI
    cluster: Cluster
    supervisor: Supervisor

    def __init__(self, address: str) -> None:
        self._address = address

    async def start(self, content_of: ContentOf = no_prefixes, **serving: Any) -> TextApi:
        """`serving` is how the replicas were launched."""
        from xinference.api import restful_api

        self.models = {}
        for name in REPLICAS:
            model = await xo.create_actor(TextModel, name, address=self._address, uid=name)
            await model.prepare()
            self.models[name] = model
        self.supervisor = Supervisor(self.models)
        self.cluster = Cluster(*REPLICAS, **serving)
        self.app = FastAPI()
        router = llm_router(
            _app=self.app,
            _get_supervisor_ref=self._get_supervisor_ref,
            _report_error_event=self._report_error_event,
        )
        self._originals = {name: getattr(restful_api, name) for name in WRAPPED}
        context = SimpleNamespace(app=self.app, router=router)
        add_routing(context, _Known(self.cluster.router), content_of)
        self.app.include_router(router)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://api",
            headers=HEADERS,
            timeout=60,
        )
        return self

    async def stop(self) -> None:
        from xinference.api import restful_api

        for name, original in self._originals.items():
            setattr(restful_api, name, original)
        await self.client.aclose()
        for name in [*self.models]:
            await self.end(name)

    async def ask(
        self,
        path: str,
        text: str = "hi",
        headers: dict[str, str] | None = None,
        model: str = "m",
        **more: Any,
    ) -> httpx.Response:
        body = body_of(path, model, text, **more)
        return await self.client.post(path, json=body, headers=headers)

    async def asked(self) -> list[Asked]:
        """What the replicas were asked."""
        return [each for model in self.models.values() for each in await model.asked()]

    async def prepare(self, **how: Any) -> None:
        """All replicas; see `TextModel`."""
        for model in self.models.values():
            await model.prepare(**how)

    async def end(self, replica: str) -> None:
        await xo.destroy_actor(self.models.pop(replica))

    async def serving(self) -> dict[str, int]:
        """The places that requests occupy, by replica."""
        return {name: await model.serving() for name, model in self.models.items()}

    async def _get_supervisor_ref(self) -> Supervisor:
        return self.supervisor

    async def _report_error_event(self, *_: object) -> None:
        pass
