"""Adds sharing to xinference's launch: wraps and adds methods of its supervisor and worker."""

from collections.abc import Callable
from typing import Any

from xinference_xavier.runtime.cancels import patch_cancels
from xinference_xavier.serving.gateway import supervisor_process_info, worker_process_info
from xinference_xavier.serving.launch import Method
from xinference_xavier.serving.launch.supervisor import (
    finding_replicas,
    notifying_terminate,
    sharing_launch,
    thorough_cancel,
    xavier_models,
    xavier_tracker_address,
)
from xinference_xavier.serving.launch.worker import (
    explaining_load,
    localizing_launch,
    serving_when_ready,
)

_WRAPPED = "_xavier_wrapped"


def install() -> None:
    """Wrap xinference's supervisor and worker in this process, and mend the actor pool they are in.

    A second call changes nothing. The imports are here because these very modules load the
    extension.
    """
    from xinference.core.supervisor import SupervisorActor
    from xinference.core.worker import WorkerActor

    patch_cancels()
    wrap_supervisor(SupervisorActor)
    wrap_worker(WorkerActor)


def wrap_supervisor(supervisor: type[Any]) -> None:
    # 4.1 has an inner method for REST, versioned launch and autostart; 4.0 has only the outer one.
    inner = "_launch_builtin_model"
    name = inner if hasattr(supervisor, inner) else "launch_builtin_model"
    _wrap_once(supervisor, name, sharing_launch)
    _wrap_once(supervisor, "terminate_model", notifying_terminate)
    if hasattr(supervisor, "cancel_launch_builtin_model"):  # from 4.1 on
        _wrap_once(supervisor, "cancel_launch_builtin_model", thorough_cancel)
    _wrap_once(supervisor, "get_model", finding_replicas)
    supervisor.xavier_tracker_address = xavier_tracker_address
    supervisor.xavier_models = xavier_models
    supervisor.xavier_process_info = supervisor_process_info


def wrap_worker(worker: type[Any]) -> None:
    _wrap_once(worker, "launch_builtin_model", localizing_launch)
    _wrap_once(worker, "wait_for_load", explaining_load)
    _wrap_once(worker, "_update_model_state", serving_when_ready)
    worker.xavier_process_info = worker_process_info


def _wrap_once(owner: type[Any], name: str, wrap: Callable[[Method], Method]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _WRAPPED):
        wrapped = wrap(original)
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)
