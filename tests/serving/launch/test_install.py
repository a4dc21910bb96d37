"""xinference's supervisor and worker are wrapped once."""

import inspect
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.launch.launching import supervisor_class
from xinference_xavier.serving import extension
from xinference_xavier.serving.launch.drain import draining_removal
from xinference_xavier.serving.launch.supervisor import (
    finding_replicas,
    thorough_cancel,
)
from xinference_xavier.serving.launch.worker import (
    explaining_load,
    localizing_launch,
    serving_when_ready,
)
from xinference_xavier.serving.routing import routing_require

nothing: Any = None


def test_wrapping_twice_changes_nothing_and_the_signature_stays() -> None:
    supervisor = supervisor_class()
    once = supervisor._launch_builtin_model
    extension.wrap_supervisor(supervisor)
    assert supervisor._launch_builtin_model is once
    assert "replica_config" in inspect.signature(once).parameters
    assert once.__doc__ == "Launches."


@pytest.mark.parametrize(
    "wrap",
    [
        explaining_load,
        serving_when_ready,
        localizing_launch,
        thorough_cancel,
        draining_removal,
        finding_replicas,
        partial(routing_require, routers=nothing, content_of=nothing),
    ],
)
async def test_a_wrapper_passes_on_what_a_later_xinference_passes(wrap: Any) -> None:
    """Models that share nothing notice none of it."""

    async def original(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    owner = SimpleNamespace(
        address="127.0.0.1:1",
        control_address="127.0.0.1:1",
        _xavier_cache_mapping={},
        _model_uid_to_replica_info={},
        _model_uid_to_launch_args={},
    )
    passed = await wrap(original)(owner, "m", "ready", later=True)
    assert passed == (("m", "ready"), {"later": True})


@pytest.mark.process
def test_install_fits_the_installed_xinference() -> None:
    """In a process of its own, because it changes xinference's classes for good. `test_seam.py` has
    what they need."""
    script = """
import inspect
from xinference.core.supervisor import SupervisorActor
from xinference.core.worker import WorkerActor
from xinference_xavier import extension
from xinference_xavier.serving.extension import install

before = inspect.signature(SupervisorActor.launch_builtin_model)
extension()
once = SupervisorActor.__dict__.copy(), WorkerActor.__dict__.copy()
install()
assert once == (SupervisorActor.__dict__.copy(), WorkerActor.__dict__.copy())
assert inspect.signature(SupervisorActor.launch_builtin_model) == before
for method in (SupervisorActor._launch_builtin_model, WorkerActor.launch_builtin_model):
    wrapper = inspect.unwrap(method, stop=lambda f: True)
    assert "serving/launch/" in wrapper.__code__.co_filename
for name in ("xavier_tracker_address", "xavier_models", "xavier_process_info"):
    assert hasattr(SupervisorActor, name), name
assert hasattr(WorkerActor, "xavier_process_info")
print("fits")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.endswith("fits\n"), done.stderr
