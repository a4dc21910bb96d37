"""Gathers for `doctor` what every process of a cluster knows about itself.

    {"api": info, "supervisor": info, "workers": {address: info},
     "models": {model_uid: {"report": …, "tracker": info, "self_checks": {incarnation: …}}}}

`info` is that of `process_info`, with `address` and `cancel_circles` where there is an actor pool;
that of the API has `routes`, whether requests are routed.
An `error` stands in place of a missing part. Runs on the event loops of API, supervisor and
workers; every call has a deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.cancels import cancel_circles
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.host import process_info
from xinference_xavier.serving.tracker_gateway import UNREACHABLE, TrackerGateway
from xinference_xavier.tracker.fanout import SELF_CHECK_DEADLINE

_WORKER_DEADLINE = 5.0


async def worker_process_info(worker: Any) -> dict[str, Any]:
    """Becomes WorkerActor's method `xavier_process_info`."""
    return await _info_at(worker.address)


async def supervisor_process_info(supervisor: Any) -> dict[str, Any]:
    """Becomes SupervisorActor's method `xavier_process_info`; includes those of its `workers`."""
    workers = dict(supervisor._worker_address_to_worker)
    answers = await asyncio.gather(*map(_ask_worker, workers.values()))
    return {
        **await _info_at(supervisor.address),
        "workers": dict(zip(workers, answers, strict=True)),
    }


async def _info_at(address: str) -> dict[str, Any]:
    return {**process_info(), "address": address, "cancel_circles": await cancel_circles()}


async def cluster_info(trackers: TrackerGateway) -> dict[str, Any]:
    supervisor = await _or_error(lambda: trackers.ask_supervisor("xavier_process_info"))
    models: dict[str, Any] = {}
    if "error" not in supervisor:
        uids = await trackers.models()
        models = dict(
            zip(uids, await asyncio.gather(*(_model(trackers, uid) for uid in uids)), strict=True)
        )
    return {
        "api": {**process_info(), "routes": trackers.routers.in_use},
        "workers": supervisor.pop("workers", {}),
        "supervisor": supervisor,
        "models": models,
    }


async def _ask_worker(worker: Any) -> dict[str, Any]:
    # Within `_or_error`: a worker in this process lacks the method at once.
    return await _or_error(lambda: within(_WORKER_DEADLINE, worker.xavier_process_info()))


async def _model(trackers: TrackerGateway, model_uid: str) -> dict[str, Any]:
    try:
        report = await trackers.report(model_uid)
        tracker = await trackers.call(model_uid, "process_info")
        self_checks = await trackers.call(
            model_uid, "self_checks", deadline=SELF_CHECK_DEADLINE + 1
        )
        return {"report": report, "tracker": tracker, "self_checks": self_checks}
    except NotFoundError:
        return {"error": "no tracker"}
    except UNREACHABLE as error:
        return {"error": f"the tracker does not answer: {error!r}"}


async def _or_error(ask: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    try:
        return await ask()
    except Exception as error:  # a process without this extension may raise anything
        return {"error": str(error) or type(error).__name__}
