"""The API process's way to the models' trackers, through xinference's supervisor, and what `doctor`
gathers there from every process of a cluster (`bodies.Cluster`).

Threading: event loops of API, supervisor and workers; every call has a deadline.
"""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xoscar as xo

from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend.routers import Routers
from xinference_xavier.limits import CALL_DEADLINE
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.addresses import reachable_address
from xinference_xavier.runtime.aio import UNREACHABLE, in_thread, retrieve, within
from xinference_xavier.runtime.host import process_info
from xinference_xavier.serving import seam
from xinference_xavier.stats.report import report
from xinference_xavier.stats.schema import RoutingStats
from xinference_xavier.tracker.fanout import SELF_CHECK_DEADLINE

DEADLINE = 10.0
"""Seconds for any answer except an explanation."""


MayAsk = Callable[[str], bool]
"""Tells whether a caller may ask the model of a uid."""


MAX_AGE = 0.5
"""Seconds. Who asks each second for what has changed gets a report that is at most so old."""


@dataclass(frozen=True)
class ModelReport:
    """A model's report. The names of its prefixes are apart from what is `public`: they are texts
    of those who may ask the model."""

    public: dict[str, Any]
    prefixes: list[dict[str, Any]]

    @functools.cached_property
    def _encoded(self) -> tuple[bytes, bytes]:
        """What is `public`, and the names."""
        return _encode(self.public), _encode(self.prefixes)

    def json(self, may_ask: MayAsk) -> bytes:
        """What `seen_by` returns, as JSON that is made once for all callers."""
        public, names = self._encoded
        if not may_ask(self.public["model_uid"]):
            names = b"[]"
        return b'%b,"prefixes":%b}' % (public[:-1], names)

    def seen_by(self, may_ask: MayAsk) -> dict[str, Any]:
        """The report as this caller gets it."""
        names = self.prefixes if may_ask(self.public["model_uid"]) else []
        return {**self.public, "prefixes": names}


def _encode(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


class _Reading(NamedTuple):
    began: float  # monotonic seconds
    report: asyncio.Task[ModelReport]


class TrackerGateway:
    """Belongs to one event loop. `get_supervisor_ref` is xinference's.

    Every method raises NotFoundError for a model that does not share, and one of `UNREACHABLE` if
    the supervisor or the tracker does not answer.
    """

    def __init__(self, get_supervisor_ref: Callable[[], Awaitable[Any]]) -> None:
        self.routers = Routers(self.find)
        self._get_supervisor_ref = get_supervisor_ref
        self._trackers: dict[str, Any] = {}
        self._readings: dict[str, _Reading] = {}

    async def models(self) -> dict[str, dict[str, str]]:
        """All models that share, each with the addresses of its replicas' workers."""
        return dict(await self.ask_supervisor("xavier_models"))

    async def ask_supervisor(self, method: str, *args: object, **how: object) -> Any:
        """Raises whatever a supervisor without this extension raises."""

        async def ask() -> Any:
            supervisor = await self._get_supervisor_ref()
            return await getattr(supervisor, method)(*args, **how)

        return await within(DEADLINE, ask())

    async def find(self, model_uid: str) -> Any:
        """A reference to the model's tracker."""

        async def ask() -> Any:
            supervisor = await self._get_supervisor_ref()
            address = await supervisor.xavier_tracker_address(model_uid)
            reachable = reachable_address(address, via=supervisor.address)
            return await _found(model_uid, xo.actor_ref(reachable, tracker_uid(model_uid)))

        return await within(DEADLINE, ask())

    async def call(
        self, model_uid: str, method: str, *args: object, deadline: float = DEADLINE
    ) -> Any:
        """Call the model's tracker, without asking the supervisor where it is while it answers."""
        if (known := self._trackers.get(model_uid)) is not None:
            try:
                return await within(deadline, getattr(known, method)(*args))
            except xo.ActorNotExist:  # there may be another one
                self._trackers.pop(model_uid, None)
            except UNREACHABLE:
                self._trackers.pop(model_uid, None)
                raise
        tracker = await self.find(model_uid)
        answer = await _found(model_uid, within(deadline, getattr(tracker, method)(*args)))
        self._trackers[model_uid] = tracker
        return answer

    async def report(self, model_uid: str) -> ModelReport:
        # For a thousand replicas this takes 0.4 s, in which requests would not be forwarded.
        making = in_thread(report, await self.call(model_uid, "status"))
        status = await within(DEADLINE, making)
        router = self.routers.get(model_uid)
        routing = asdict(RoutingStats()) if router is None else router.report()
        public = {**status, "routing": routing}
        names = public.pop("prefixes", [])
        return ModelReport(public, names)

    async def shared_report(self, model_uid: str, max_age: float) -> ModelReport:
        """A report begun at most `max_age` seconds ago, shared by all callers."""
        now = time.monotonic()
        for uid, reading in list(self._readings.items()):
            if now - reading.began > max_age and reading.report.done():
                del self._readings[uid]
        current = self._readings.get(model_uid)
        if current is None:
            current = _Reading(now, asyncio.ensure_future(self.report(model_uid)))
            current.report.add_done_callback(retrieve)
            self._readings[model_uid] = current
        # Shielded: the caller that began the reading may be cancelled while others wait for it.
        return await asyncio.shield(current.report)


async def _found(model_uid: str, call: Awaitable[Any]) -> Any:
    try:
        return await call
    except xo.ActorNotExist as error:
        raise NotFoundError(f"model {model_uid!r} does not share its cache here") from error


async def worker_process_info(worker: Any) -> dict[str, Any]:
    """Becomes WorkerActor's method `xavier_process_info`."""
    return {**_process(), "address": worker.address}


async def supervisor_process_info(supervisor: Any) -> dict[str, Any]:
    """Becomes SupervisorActor's method `xavier_process_info`; includes those of its `workers`."""
    workers = {} if seam.missing() else dict(seam.workers(supervisor))
    answers = await asyncio.gather(*map(_ask_worker, workers.values()))
    return {
        **_process(),
        "address": supervisor.address,
        "workers": dict(zip(workers, answers, strict=True)),
    }


async def cluster_info(trackers: TrackerGateway) -> dict[str, Any]:
    supervisor = await _or_error(lambda: trackers.ask_supervisor("xavier_process_info"))
    models: dict[str, Any] = {}
    if "error" not in supervisor and not supervisor.get("missing"):
        uids = await trackers.models()
        models = dict(
            zip(uids, await asyncio.gather(*(_model(trackers, uid) for uid in uids)), strict=True)
        )
    return {
        "api": _process(),
        "workers": supervisor.pop("workers", {}),
        "supervisor": supervisor,
        "models": models,
    }


def _process() -> dict[str, Any]:
    """`missing` is what its xinference lacks of what we use."""
    return {**process_info(), "missing": [*seam.missing()]}


async def _ask_worker(worker: Any) -> dict[str, Any]:
    # Within `_or_error`: a worker in this process lacks the method at once.
    return await _or_error(lambda: within(CALL_DEADLINE, worker.xavier_process_info()))


async def _model(trackers: TrackerGateway, model_uid: str) -> dict[str, Any]:
    try:
        report = (await trackers.report(model_uid)).public
        self_checks = await trackers.call(
            model_uid, "self_checks", deadline=SELF_CHECK_DEADLINE + 1
        )
        return {"report": report, "self_checks": self_checks}
    except NotFoundError:
        return {"error": "no tracker"}
    except UNREACHABLE as error:
        return {"error": f"the tracker does not answer: {error!r}"}


async def _or_error(ask: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    try:
        return await ask()
    except Exception as error:  # a process without this extension may raise anything
        return {"error": str(error) or type(error).__name__}
