"""Adds sharing to xinference's launch: wraps and adds methods of its supervisor and worker."""

from collections.abc import Callable
from typing import Any

from xinference_xavier.runtime.net import patch_cancels
from xinference_xavier.serving import seam
from xinference_xavier.serving.gateway import supervisor_process_info, worker_process_info
from xinference_xavier.serving.launch import Method
from xinference_xavier.serving.launch.drain import draining_removal
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
from xinference_xavier.serving.seam import Feature

_WRAPPED = "_xavier_wrapped"


def install() -> None:
    """Wrap xinference's supervisor and worker in this process, and mend the actor pool they are in.

    A second call changes nothing.
    """
    patch_cancels()
    if (supervisor := seam.supervisor_actor()) is not None:
        wrap_supervisor(supervisor)
    if (worker := seam.worker_actor()) is not None:
        wrap_worker(worker)


def wrap_supervisor(supervisor: type[Any]) -> None:
    _wrap_once(supervisor, seam.launch_method(supervisor), sharing_launch, Feature.SHARING)
    _wrap_once(supervisor, "terminate_model", notifying_terminate, Feature.ROLLBACKS)
    _wrap_once(supervisor, "cancel_launch_builtin_model", thorough_cancel, Feature.CANCELS)
    _wrap_once(supervisor, "terminate_model_replica", draining_removal, Feature.REMOVALS)
    _wrap_once(supervisor, "get_model", finding_replicas, Feature.FINDING)
    supervisor.xavier_tracker_address = xavier_tracker_address
    supervisor.xavier_models = xavier_models
    supervisor.xavier_process_info = supervisor_process_info


def wrap_worker(worker: type[Any]) -> None:
    _wrap_once(worker, "launch_builtin_model", localizing_launch, Feature.SHARING)
    _wrap_once(worker, "wait_for_load", explaining_load, Feature.CAUSES)
    _wrap_once(worker, "_update_model_state", serving_when_ready, Feature.READINESS)
    worker.xavier_process_info = worker_process_info


def _wrap_once(
    owner: type[Any], name: str, wrap: Callable[[Method], Method], feature: Feature
) -> None:
    if not seam.works(feature):
        return
    original = getattr(owner, name)
    if not hasattr(original, _WRAPPED):
        wrapped = wrap(original)
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)
