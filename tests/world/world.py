"""A model's replicas on paper, behind xinference's own text routes.

Time is virtual. What routes is real: xinference's routes, the middleware, `RoutedModel`, the
model's router, the tracker's index and what it tells routers. A replica is a `ReplicaModel`: it
prefills, fetches, decodes, and reports every two seconds. There is no engine, no actor, no socket.

A scenario is a list of what happens when. Each request gets an `Answer`, whose `line` says where it
went and when it ended.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import xoscar as xo
from fastapi import APIRouter, FastAPI
from starlette.types import Message
from xoscar.api import IteratorWrapper

from benchmarks.replica_model import Elsewhere, Engine, Job, ReplicaModel, Source, Taken, Token
from benchmarks.traces import GROUP, Request
from tests.e2e.text_routes import COMPLETIONS, question
from tests.harness.comparisons import report
from tests.world.virtual import run
from xinference_xavier.errors import NotFoundError, PrefixNotFoundError, ReplicaNotServingError
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.protocol.load import Load, RequestReport, Serving, is_prefill
from xinference_xavier.protocol.tracker import Member, Settings, pack_short
from xinference_xavier.serving.prefix_routes import not_found
from xinference_xavier.serving.routing import ContentOf, add_routing
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.observers import Observers

CHUNK = 128
BYTES = 4
"""Bytes of text that are a token."""
ENGINE = Engine(prefill=10_000, fetch=500_000, slots=1000, chunk=CHUNK, token_bytes=16 * 1024)
REPORTS = 2.0
MODEL = "m"
FULL = "Rate limit reached for the model. Request limit {limit} for the model: {replica}"


def text(name: str, tokens: int) -> str:
    """A text of so many tokens, which begins like no other."""
    return (f"{name} " * (tokens * BYTES))[: tokens * BYTES]


@dataclass(eq=False)
class Answer:
    """What a client asked for, and what it got. Times are in seconds of the scenario."""

    prompt: str
    asked: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    first: float | None = None
    last: float | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def replica(self) -> str:
        """Empty if the request was not routed."""
        return self.headers.get("x-xavier-replica", "")

    @property
    def reason(self) -> str:
        return self.headers.get("x-xavier-route", "").split(";")[0]

    @property
    def terms(self) -> dict[str, float]:
        """Seconds that were foretold, by what they are for."""
        _, _, terms = self.headers["x-xavier-route"].partition("; ")
        found = (each.split("=") for each in terms.split(", "))
        return {name: float(seconds) for name, seconds in found}

    @property
    def line(self) -> str:
        went = f"{self.replica} {self.reason}" if self.replica else "in turn"
        outcome = went if self.status == 200 else f"{self.status}"
        times = (f"{each:.2f}" for each in (self.asked, self.first, self.last) if each is not None)
        return f"{self.prompt[:12].split(' ')[0]}: {outcome}, {' '.join(times)}"

    def leave(self) -> None:
        """The client disconnects."""
        self.gone.set()


class Stream(IteratorWrapper):  # type: ignore[misc]  # xoscar has no types
    """A stream of a model actor, as xinference knows it: it gives its place back at the actor."""

    def __init__(self, words: AsyncIterator[bytes], actor: ModelActor) -> None:
        super().__init__("", actor.address, actor.uid)
        self._words = words
        self._actor_ref = actor
        self._gc_destroy = False
        self.destroyed = False

    async def __anext__(self) -> bytes:
        return await anext(self._words)

    async def destroy(self) -> None:
        self.destroyed = True


class ModelActor:
    """A reference to the model actor of a replica; counts requests as xinference's decorator
    `request_limit` does."""

    address = "127.0.0.1:1"

    def __init__(self, replica: Replica) -> None:
        self.uid = replica.name
        self._replica = replica

    async def is_vllm_backend(self, **_: Any) -> bool:
        return True

    async def abort_request(self, name: str, *_: Any, **__: Any) -> str:
        self._replica.aborted.append(name)
        return "done"

    async def decrease_serve_count(self, **_: Any) -> None:
        self._replica.serving -= 1

    async def prepare_anthropic_request(
        self, messages: list[Any], config: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        return {"messages": messages, "generate_config": config, "input_tokens": 3}

    async def generate(self, prompt: str, config: dict[str, Any], **kwargs: Any) -> Any:
        return await self._answer(prompt, config, **kwargs)

    async def chat(self, messages: list[Any], config: dict[str, Any], **kwargs: Any) -> Any:
        parts = [each["content"] for each in messages]
        prompt = "".join(each if isinstance(each, str) else json.dumps(each) for each in parts)
        return await self._answer(prompt, config, **kwargs)

    async def _answer(
        self, prompt: str, config: dict[str, Any], request_id: str = "", **_: Any
    ) -> Any:
        replica = self._replica
        name = request_id or f"the engine's {len(replica.asked)}"
        replica.asked.append(name)
        replica.prompts.append(prompt)
        await replica.reached()
        if replica.serving >= replica.limit:
            raise RuntimeError(FULL.format(limit=replica.limit, replica=self.uid))
        replica.serving += 1
        if config.get("stream"):
            return Stream(self._words(prompt, name), self)
        try:
            first, last = replica.begin(prompt, name)
            await first
            await last
            return json.dumps(_said(self.uid)).encode()
        finally:
            replica.serving -= 1

    async def _words(self, prompt: str, name: str) -> AsyncIterator[bytes]:
        first, last = self._replica.begin(prompt, name)
        for word in (first, last):
            await word
            yield f"data: {json.dumps(_said(self.uid))}\r\n\r\n".encode()


def _said(word: str) -> dict[str, Any]:
    said = {"role": "assistant", "content": word}
    choice = {"index": 0, "finish_reason": "stop", "text": word, "delta": said, "message": said}
    return {"id": "1", "object": "text_completion", "created": 1, "choices": [choice]}


class Replica(Elsewhere):
    """A record, and what it tells the tracker."""

    def __init__(self, name: str, world: World, engine: Engine, **serving: Any) -> None:
        self.name = name
        self.incarnation = f"{name} now"
        self.model = ReplicaModel(self.incarnation, engine, self)
        self.asked: list[str] = []
        """The names of its requests."""
        self.prompts: list[str] = []
        """What they ask."""
        self.aborted: list[str] = []
        self.serving = 0
        limit = serving.get("request_limit")
        self.limit = float("inf") if limit is None else limit
        self.fails: Exception | None = None
        self.hangs = False
        self._world = world
        self._engine = engine
        self._launched = world.launched._replace(slots=engine.requests, **serving)
        self._waiting: dict[str, tuple[asyncio.Future[None], asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sequence = 0
        self._reports: list[RequestReport] = []
        self._reporting = asyncio.ensure_future(self._report_forever())

    # -- requests ------------------------------------------------------------------------------

    async def reached(self) -> None:
        """A call arrives; raises what `fails` says."""
        await asyncio.sleep(0.001)
        if self.fails is not None:
            raise self.fails
        if self.hangs:
            await asyncio.Event().wait()

    def begin(self, prompt: str, name: str) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Compute a request; the results are its first and its last token."""
        asked = self._world.request(prompt, 1 if is_prefill(name) else None)
        loop = asyncio.get_running_loop()
        found = self._waiting[name] = loop.create_future(), loop.create_future()
        self._advance()
        self.model.receive(Job(name, asked), loop.time())
        keys = pack_short(asked.keys)
        self._reports.append(RequestReport(name, asked.tokens, keys))
        self.report()
        self._advance()
        return found

    def _advance(self) -> None:
        loop = asyncio.get_running_loop()
        for event in self.model.advance(loop.time()):
            first, last = self._waiting[event.job.name]
            _settle(first)
            if event.token is Token.FIRST:
                rows = pack_short(row.key for row in event.job.rows[event.job.local :])
                self._publish(rows, pack_short(event.job.evicted))
            else:
                _settle(last)
                del self._waiting[event.job.name]
                answer = event.job.asked.answer
                self._reports.append(RequestReport(event.job.name, 0, b"", answer))
        if self._timer is not None:
            self._timer.cancel()
        if (at := self.model.next_at()) < float("inf"):
            self._timer = loop.call_at(at, self._advance)

    def other(self, prompt: str, answer: int = 1) -> asyncio.Future[None]:
        """A request that comes another way, such as from another API process. The result is its
        last token."""
        others = self._world.others
        self._world.note(prompt, answer)
        self.serving += 1
        _, last = self.begin(prompt, f"other {len(others)}")
        others.append(last)
        last.add_done_callback(lambda _: self._other_ended())
        return last

    def _other_ended(self) -> None:
        self.serving -= 1

    def die(self) -> None:
        """The engine ends; the tracker notices at once."""
        self.fails = xo.ServerClosed(f"{self.name} has ended")
        for each in self._waiting.values():
            for word in each:
                if not word.done():
                    word.set_exception(self.fails)
                    word.exception()  # nobody may have asked for it
        if self._timer is not None:
            self._timer.cancel()
        self.leave()

    def vanish(self) -> None:
        """Its host is lost: no connection ends."""
        self.hangs = True
        self._reporting.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # -- the tracker ---------------------------------------------------------------------------

    def join(self) -> None:
        member = Member(self.incarnation, "127.0.0.1:1")
        tracker = self._world.tracker
        canaries = report(short=1.0)
        tracker.namespaces.join("n", member, tracker.now(), canaries)
        self.report()

    def leave(self) -> None:
        self._reporting.cancel()
        tracker = self._world.tracker
        tracker.namespaces.leave("n", self.incarnation)
        tracker.observers.forget(self.incarnation)

    def silence(self) -> None:
        """It answers, but reports no more by itself."""
        self._reporting.cancel()

    def drain(self, until: float | None = float("inf")) -> None:
        """It gets no more requests; again with None."""
        self._world.tracker.observers.drain(self.incarnation, until)

    def report(self) -> None:
        now, engine = asyncio.get_running_loop().time(), self._engine
        state = self.model.report(now)
        byte_s = 1 / engine.fetch / engine.token_bytes
        load = Load(
            self._launched,
            state.prefill_tokens,
            state.prefill_s,
            state.waiting + state.running,
            decoding=state.decoding,
            known=tuple(state.known),
            rates=(1 / engine.prefill, 0.0, engine.fetch_s, byte_s),
            step=(engine.base_s, engine.slope_s),
            free_tokens=max(0, state.free_tokens),
            kv_tokens=engine.kv_tokens,
        )
        reports, self._reports = tuple(self._reports), []
        self._world.tracker.observers.report(self.incarnation, load, reports)

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORTS)
            self._advance()
            self.report()

    def _publish(self, added: bytes, removed: bytes) -> None:
        self._sequence += 1
        found = self._world.tracker.namespaces.find("n")
        if found is not None:
            found.publish(self.incarnation, self._sequence, added, removed)

    # -- Elsewhere -----------------------------------------------------------------------------

    def find(self, name: str, keys: Sequence[bytes], now: float) -> Source:
        runs = [
            (len(list(itertools.takewhile(each.model.pool.lookup, keys))), number)
            for number, each in enumerate(self._world.replicas.values())
            if each is not self
        ]
        count, number = max(runs, default=(0, 0))
        seconds = self._engine.fetch_seconds(count)
        if seconds >= count * CHUNK / self._engine.prefill:
            return Source()
        return Source(count, seconds, 1 << number)

    def take(self, name: str, keys: Sequence[bytes], source: Source, now: float) -> Taken:
        donor = [*self._world.replicas.values()][source.peers.bit_length() - 1]
        granted = donor.model.pool.pin_shared(keys)
        donor.model.pool.unpin(granted)
        return Taken(len(granted), donor.incarnation)


def _settle(word: asyncio.Future[None]) -> None:
    if not word.done():
        word.set_result(None)


class Tracker:
    """What routers ask a model's tracker, without the actor."""

    def __init__(self, names: Callable[[str], str]) -> None:
        self.namespaces = Namespaces(MODEL, lease=10.0)
        self.observers = Observers(self.namespaces, names, self.now)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def observe(self, epoch: str, revision: int, version: int, timeout: float) -> Any:
        return await self.observers.wait(epoch, revision, version, timeout)


class Supervisor:
    """Knows where the replicas are. In turn is their order."""

    address = "127.0.0.1:1"

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = 0

    async def get_model(self, name: str, xavier_replica: bool = False, **_: Any) -> Any:
        actors = self._world.actors
        if not xavier_replica:
            if not actors:
                raise ValueError(f"Model not found in the model list, uid: {name}")
            self._turn += 1
            return [*actors.values()][self._turn % len(actors)]
        if name not in actors:
            raise ReplicaNotServingError(f"{name} is not there")
        return actors[name]

    async def describe_model(self, model_uid: str, **_: Any) -> dict[str, str]:
        return {"model_family": "qwen2.5-instruct", "model_name": "qwen2.5-instruct"}

    async def resolve_token_router_runtime(self, model_uid: str) -> None:
        return None


async def no_prefixes(model_uid: str, tenant: str, name: str) -> Any:
    raise not_found(PrefixNotFoundError(f"no prefix named {name!r}"))


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


WRAPPED = ("require_model", "parse_anthropic_request", "parse_responses_request")


class World:
    """`launched` is how the replicas were launched, `names` the fields in which one differs."""

    def __init__(
        self, *names: str, engine: Engine = ENGINE, seed: int = 0, **launched: Any
    ) -> None:
        self.began = asyncio.get_running_loop().time()
        self.launched = Serving(CHUNK, CHUNK * engine.token_bytes, queue=100)._replace(**launched)
        self.engine = engine
        self.tracker = Tracker(lambda incarnation: incarnation.removesuffix(" now"))
        self.replicas: dict[str, Replica] = {}
        self.actors: dict[str, ModelActor] = {}
        self.answers: list[Answer] = []
        self.others: list[asyncio.Future[None]] = []
        """Requests that come another way."""
        self.routers = Routers(self._find_tracker)
        self._supervisor = Supervisor(self)
        self._lengths: dict[str, int] = {}
        self._settings = Settings()
        self._seed = seed
        self._app = FastAPI()
        for name in names:
            self.add(name)

    @property
    def now(self) -> float:
        """Seconds of the scenario."""
        return asyncio.get_running_loop().time() - self.began

    @property
    def router(self) -> ModelRouter:
        router = self.routers.get(MODEL)
        assert router is not None, "nothing is known of the model yet"
        return router

    def add(self, name: str, engine: Engine | None = None, **serving: Any) -> Replica:
        replica = self.replicas[name] = Replica(name, self, engine or self.engine, **serving)
        self.actors[name] = ModelActor(replica)
        replica.join()
        return replica

    def remove(self, name: str) -> None:
        """xinference no longer has it, and the tracker knows."""
        del self.actors[name]
        self.replicas.pop(name).leave()

    def configure(self, **settings: Any) -> None:
        """The operator's settings."""
        self._settings = self._settings._replace(version=self._settings.version + 1, **settings)
        self.tracker.namespaces.configure(self._settings)

    def note(self, prompt: str, answer: int) -> None:
        """The answer to this prompt will have so many tokens."""
        self._lengths[prompt] = answer

    def request(self, prompt: str, answer: int | None = None) -> Request:
        """What the engine makes of a prompt."""
        data = prompt.encode()
        digest, keys = sha256(), list[bytes]()
        for start in range(0, len(data) - CHUNK * BYTES + 1, CHUNK * BYTES):
            digest.update(data[start : start + CHUNK * BYTES])
            keys.append(digest.digest() + GROUP)
        tokens = max(1, len(data) // BYTES)
        return Request(self.now, tokens, keys, answer or self._lengths.get(prompt, 1))

    # -- requests ------------------------------------------------------------------------------

    def ask(
        self,
        prompt: str,
        answer: int = 1,
        *,
        path: str = COMPLETIONS,
        headers: dict[str, str] | None = None,
        stream: bool = True,
        **body: Any,
    ) -> Answer:
        """A client asks now, and its answer will have so many tokens."""
        self.note(prompt, answer)
        asked = Answer(prompt, self.now)
        self.answers.append(asked)
        limit = {"max_tokens": 4096} if path.endswith("/messages") else {}  # Anthropic's must have
        body = {"model": MODEL, "stream": stream, **limit, **question(path, prompt), **body}
        asked.task = asyncio.ensure_future(self._ask(asked, path, body, headers or {}))
        return asked

    async def answer(self, prompt: str = "hi", **how: Any) -> Answer:
        """What a client asks now, once it has been answered."""
        asked = self.ask(prompt, **how)
        assert asked.task is not None
        await asked.task
        return asked

    async def _ask(
        self, asked: Answer, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        given = {"content-type": "application/json", "anthropic-version": "2023-06-01", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": json.dumps(body).encode()}
            await asked.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                asked.status = message["status"]
                asked.headers = {
                    name.decode(): value.decode() for name, value in message["headers"]
                }
                assert len(asked.headers) == len(message["headers"]), "one comes twice"
            elif message.get("body"):
                asked.first = asked.first or self.now
                asked.body += message["body"]

        await self._app(scope, receive, send)
        asked.last = self.now

    async def done(self) -> list[str]:
        """All answers have ended; the line of each."""
        tasks = [each.task for each in self.answers if each.task is not None]
        await asyncio.gather(*tasks, *self.others, return_exceptions=True)
        return [each.line for each in self.answers]

    def left(self) -> dict[str, Any]:
        """What is left of requests, if anything is: nothing, once all have ended and closed their
        streams."""
        router = self.router
        replicas = router._router.replicas.values()
        found = {
            "routes": router._router.routes,
            "places": [place for each in replicas for place in each.places],
            "answers": sum(each.answers for each in replicas),
            "waiting": len(router._queue),
            "serving": {each.name: each.serving for each in self.living if each.serving},
        }
        return {name: each for name, each in found.items() if each}

    @property
    def living(self) -> list[Replica]:
        return [each for each in self.replicas.values() if each.fails is None]

    # -- the API process -----------------------------------------------------------------------

    @asynccontextmanager
    async def serving(self, content_of: ContentOf = no_prefixes) -> AsyncIterator[World]:
        """The API runs, and knows the model."""
        from xinference.api import restful_api

        originals = {name: getattr(restful_api, name) for name in WRAPPED}
        router = llm_router(
            _app=self._app,
            _get_supervisor_ref=self._get_supervisor,
            _report_error_event=self._report_error_event,
        )
        context = SimpleNamespace(app=self._app, router=router)
        add_routing(context, self.routers, content_of)
        self._app.include_router(router)
        self.routers.get(MODEL)
        await asyncio.sleep(0.1)
        if (known := self.routers.get(MODEL)) is not None:
            known._source.seed(self._seed)
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(restful_api, name, original)
            await self.routers.close()
            for replica in self.replicas.values():
                replica.leave()

    async def _get_supervisor(self) -> Supervisor:
        return self._supervisor

    async def _find_tracker(self, model_uid: str) -> Tracker:
        if model_uid != MODEL:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return self.tracker

    async def _report_error_event(self, *_: object) -> None:
        pass


Scenario = Callable[[World], Awaitable[None]]


def play(
    scenario: Scenario, *names: str, content_of: ContentOf = no_prefixes, **how: Any
) -> list[str]:
    """The lines of all answers, once the scenario has ended and they have, too."""

    async def main() -> list[str]:
        async with World(*names, **how).serving(content_of) as world:
            await scenario(world)
            return await world.done()

    return run(main())


def in_world(*names: str, **how: Any) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Makes a test of a scenario: it plays, and nothing of its requests must be left at its end.
    What it takes besides the world are parameters of the test."""

    def decorate(scenario: Callable[..., Awaitable[None]]) -> Any:
        def test(**given: Any) -> None:
            async def whole(world: World) -> None:
                await scenario(world, **given)
                await world.done()
                await asyncio.sleep(REPORTS)
                assert not (left := world.left()), left

            play(whole, *names, **how)

        signature = inspect.signature(scenario)
        parameters = [*signature.parameters.values()][1:]
        vars(test).update(vars(scenario), __signature__=signature.replace(parameters=parameters))
        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        test.__module__ = scenario.__module__
        return test

    return decorate
