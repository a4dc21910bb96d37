"""What `XINFERENCE_EXTENSIONS=xinference_xavier:extension` loads.

xinference calls the factory once in the API process, in the supervisor and in every worker, before
they serve anything. There, `install` adds sharing to xinference's launch. Then xinference calls the
hooks, which must be synchronous and fast.

Where xinference lacks anything that we use, the extension is off in that process: it refuses
launches that ask for it, and `doctor` says what is missing.
"""

import logging
from collections.abc import Callable
from typing import Any

from xinference_xavier._version import __version__
from xinference_xavier.runtime.net import patch_cancels
from xinference_xavier.serving import seam
from xinference_xavier.serving.gateway import supervisor_process_info, worker_process_info
from xinference_xavier.serving.launch import Method
from xinference_xavier.serving.launch.drain import draining_removal
from xinference_xavier.serving.launch.supervisor import (
    finding_replicas,
    refusing_launch,
    sharing_launch,
    thorough_cancel,
    xavier_models,
    xavier_tracker_address,
)
from xinference_xavier.serving.launch.worker import (
    explaining_load,
    localizing_launch,
    refusing_replica,
    serving_when_ready,
)

logger = logging.getLogger(__name__)


class XavierExtension:
    """Implements version 1 of xinference's extension interface."""

    name = "xinference_xavier"
    api_version = 1

    def configure_api(self, context: Any) -> None:
        """Add our routes, metrics and pages; `context` is xinference's APIExtensionContext."""
        from xinference_xavier.serving.api import add_cluster, add_routes
        from xinference_xavier.serving.gateway import TrackerGateway
        from xinference_xavier.serving.metrics import add_metrics
        from xinference_xavier.serving.prefix_routes import Prefixes, add_prefix_routes
        from xinference_xavier.serving.routing import add_routing
        from xinference_xavier.serving.ui.routes import add_pages

        trackers = TrackerGateway(context.get_supervisor_ref)
        if seam.missing():
            add_cluster(context, trackers)
            return
        add_routing(context, trackers.routers, Prefixes(trackers).content_of)
        add_routes(context, trackers)
        add_prefix_routes(context, trackers)
        add_metrics(context, trackers)
        add_pages(context)

    def worker_metadata(self) -> dict[str, str]:
        return {"version": __version__}

    def filter_worker_resources(
        self, worker: dict[str, Any], workers: list[dict[str, Any]]
    ) -> list[int]:
        """Every device stays visible: sharing does not depend on placement."""
        return list(worker["gpu_devices"])


_WRAPPED = "_xavier_wrapped"


def install() -> None:
    """Wrap xinference's supervisor and worker in this process, and mend the actor pool they are in.

    A second call changes nothing.
    """
    if missing := seam.look():
        logger.error(
            "xinference-xavier is off: this xinference lacks what it uses (%s); install xinference "
            "4.1 here",
            "; ".join(missing),
        )
    else:
        patch_cancels()
    if (supervisor := seam.supervisor_actor()) is not None:
        wrap_supervisor(supervisor)
    if (worker := seam.worker_actor()) is not None:
        wrap_worker(worker)


def wrap_supervisor(supervisor: type[Any]) -> None:
    supervisor.xavier_process_info = supervisor_process_info
    if seam.missing():
        _refuse_launches(supervisor, refusing_launch)
        return
    _wrap_once(supervisor, "_launch_builtin_model", sharing_launch)
    _wrap_once(supervisor, "cancel_launch_builtin_model", thorough_cancel)
    _wrap_once(supervisor, "terminate_model_replica", draining_removal)
    _wrap_once(supervisor, "get_model", finding_replicas)
    supervisor.xavier_tracker_address = xavier_tracker_address
    supervisor.xavier_models = xavier_models


def wrap_worker(worker: type[Any]) -> None:
    worker.xavier_process_info = worker_process_info
    if seam.missing():
        _refuse_launches(worker, refusing_replica)
        return
    _wrap_once(worker, "launch_builtin_model", localizing_launch)
    _wrap_once(worker, "wait_for_load", explaining_load)
    _wrap_once(worker, "_update_model_state", serving_when_ready)


def _refuse_launches(owner: type[Any], wrap: Callable[[Method], Method]) -> None:
    if (name := seam.launch_method(owner)) is not None:
        _wrap_once(owner, name, wrap)


def _wrap_once(owner: type[Any], name: str, wrap: Callable[[Method], Method]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _WRAPPED):
        wrapped = wrap(original)
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)
