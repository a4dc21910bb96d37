"""What every process of a cluster knows of itself, gathered for ``doctor``.

    {"api": facts, "supervisor": facts, "workers": {address: facts},
     "models": {model_uid: {"report": …, "tracker": facts, "self_checks": {incarnation: …}}}}

``facts`` are ``process_info``, with ``address`` and ``cancel_circles`` where there is an actor
pool; whatever could not be learnt is an ``error`` instead. Runs on the event loops of API,
supervisor and workers; every question has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.cancels import cancel_circles
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.host import process_info
from xinference_xavier.serving.tracker_gateway import UNREACHABLE, TrackerGateway
from xinference_xavier.tracker.fanout import SELF_CHECK_DEADLINE

_WORKER_DEADLINE = 5.0
_SUPERVISOR_DEADLINE = 10.0


async def worker_facts(worker: Any) -> dict[str, Any]:
    """Becomes a WorkerActor's method ``xavier_facts``."""
    return await _facts_at(worker.address)


async def supervisor_facts(supervisor: Any) -> dict[str, Any]:
    """Becomes a SupervisorActor's method ``xavier_facts``."""
    workers = dict(supervisor._worker_address_to_worker)
    answers = await asyncio.gather(*map(_ask_worker, workers.values()))
    return {
        **await _facts_at(supervisor.address),
        "workers": dict(zip(workers, answers, strict=True)),
    }


async def _facts_at(address: str) -> dict[str, Any]:
    return {**process_info(), "address": address, "cancel_circles": await cancel_circles()}


async def cluster_facts(trackers: TrackerGateway) -> dict[str, Any]:
    supervisor = await _or_error(trackers.supervisor_facts(_SUPERVISOR_DEADLINE))
    models: dict[str, Any] = {}
    if "error" not in supervisor:
        uids = await trackers.models()
        models = dict(
            zip(uids, await asyncio.gather(*(_model(trackers, uid) for uid in uids)), strict=True)
        )
    return {
        "api": process_info(),
        "workers": supervisor.pop("workers", {}),
        "supervisor": supervisor,
        "models": models,
    }


async def _ask_worker(worker: Any) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:  # a missing method is noticed at once where it is near
        facts: dict[str, Any] = await worker.xavier_facts()
        return facts

    return await _or_error(within(_WORKER_DEADLINE, ask()))


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


async def _or_error(asking: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await asking
    except Exception as error:  # a process without this extension answers with whatever it likes
        return {"error": str(error) or type(error).__name__}
