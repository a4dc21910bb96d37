"""The installed xinference has everything that we use; where anything is missing, we are off.

A new version that moves or renames any of it fails here, and not in a user's cluster.
"""

import inspect
import sys
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute
from xinference.api import restful_api
from xinference.api.protocols.anthropic import parse_anthropic_request
from xinference.core.model import request_limit
from xinference.core.supervisor import SupervisorActor
from xinference.core.worker import WorkerActor

from tests.serving.launch.launching import ARGUMENTS, supervisor_class
from tests.serving.supervisors import api_context, gateway_to
from tests.world.world import WRAPPED
from xinference_xavier.client.doctor import Finding, process_findings
from xinference_xavier.config import XavierConfig, kv_transfer_config
from xinference_xavier.errors import ConfigError
from xinference_xavier.serving import extension, seam
from xinference_xavier.serving.extension import XavierExtension
from xinference_xavier.serving.gateway import (
    cluster_info,
    supervisor_process_info,
    worker_process_info,
)
from xinference_xavier.serving.routing import add_routing


@pytest.fixture(autouse=True)
def a_process_that_has_not_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_missing", ())


def test_the_installed_xinference_has_what_we_use() -> None:
    assert seam.look() == ()


async def test_its_refusal_at_the_limit_is_recognized() -> None:
    class Model:
        _serve_count = _request_limits = 1
        _metrics_labels = MappingProxyType({"model": "m-0"})

        def model_uid(self) -> str:
            return "m-0"

        async def record_metrics(self, *_: Any) -> None: ...

        @request_limit
        async def chat(self) -> None: ...

    with pytest.raises(RuntimeError) as refusal:
        await Model().chat()
    assert seam.is_full(refusal.value)
    assert not seam.is_full(RuntimeError("Model not ready"))


def test_what_cache_control_marks_is_found() -> None:
    marked = {"type": "text", "text": "a guide", "cache_control": {"type": "ephemeral"}}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [marked]}]}
    assert seam.anthropic_marks(parse_anthropic_request(body).to_openai_body())
    body["messages"][0]["content"] = "a guide"  # type: ignore[index]
    assert not seam.anthropic_marks(parse_anthropic_request(body).to_openai_body())


def test_an_api_that_is_made_again_has_the_latest_wrapper_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """xinference does so if its default port is taken."""
    originals = {name: inspect.unwrap(getattr(restful_api, name)) for name in WRAPPED}
    for name, original in originals.items():
        monkeypatch.setattr(restful_api, name, original)
    nothing: Any = None
    for _ in range(2):
        add_routing(api_context(), nothing, nothing)
    assert {name: getattr(restful_api, name).__wrapped__ for name in WRAPPED} == originals


class Changes:
    """What a later xinference may do."""

    def renames_a_method(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.delattr(SupervisorActor, "_gen_model_uid")
        return "SupervisorActor._gen_model_uid is gone"

    def renames_an_attribute(self, monkeypatch: pytest.MonkeyPatch) -> str:
        def init(self: Any) -> None:
            self._launches = self._supervisor_address = self._model_uid_to_model = {}

        monkeypatch.setattr(WorkerActor, "__init__", init)
        return "WorkerActor._model_uid_to_launch_args is gone"

    def takes_another_argument(self, monkeypatch: pytest.MonkeyPatch) -> str:
        async def update(self: Any, model_uid: str, status: str) -> None: ...

        monkeypatch.setattr(WorkerActor, "_update_model_state", update)
        return "WorkerActor._update_model_state takes no state"

    def makes_a_property_of_a_method(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(SupervisorActor, "get_model", property(lambda self: None))
        return "SupervisorActor.get_model takes no model_uid"

    def moves_a_module(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(sys.modules, "xinference.core.rpc_context", None)
        return "xinference.core.rpc_context is gone"

    def moves_a_class(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.delattr(restful_api, "RESTfulAPI")
        return "xinference.api.restful_api.RESTfulAPI is gone"


@pytest.mark.parametrize("change", [name for name in vars(Changes) if not name.startswith("_")])
def test_a_change_is_found(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    found = getattr(Changes(), change)(monkeypatch)
    assert seam.look() == (found,)
    assert seam.missing() == (found,)


# -- off ---------------------------------------------------------------------------------------

MISSING = "SupervisorActor.launches is gone"


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that we use, but that nothing here calls, is missing."""
    monkeypatch.setitem(seam.USED, "xinference.core.supervisor:SupervisorActor", ("launches",))
    assert seam.look() == (MISSING,)


def test_the_log_says_what_is_missing(
    off: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for find in ("supervisor_actor", "worker_actor"):  # the real ones stay as they are
        monkeypatch.setattr(seam, find, lambda: None)
    extension.install()
    (record,) = caplog.records
    assert f"xinference-xavier is off: this xinference lacks what it uses ({MISSING})" in (
        record.message
    )


def test_a_supervisor_keeps_its_methods(off: None) -> None:
    supervisor = supervisor_class()
    for name in ("cancel_launch_builtin_model", "terminate_model_replica", "get_model"):
        assert not hasattr(getattr(supervisor, name), "__wrapped__")


async def test_before_4_1_the_outer_method_refuses(off: None) -> None:
    class Supervisor:
        async def launch_builtin_model(self, model_uid: str | None, **kwargs: Any) -> str | None:
            return model_uid

    extension.wrap_supervisor(Supervisor)
    with pytest.raises(ConfigError, match=r"install xinference 4\.1"):
        await Supervisor().launch_builtin_model(**ARGUMENTS)


async def test_a_worker_refuses_what_another_process_launches(off: None) -> None:
    class Worker:
        async def launch_builtin_model(self, model_uid: str, **kwargs: Any) -> str:
            return model_uid

    extension.wrap_worker(Worker)
    config = kv_transfer_config(XavierConfig("m", "127.0.0.1:1"))
    with pytest.raises(ConfigError, match=MISSING):
        await Worker().launch_builtin_model("m-0", kv_transfer_config=config)
    assert await Worker().launch_builtin_model("m-0") == "m-0"


def test_an_api_has_only_the_route_of_doctor(off: None) -> None:
    before, api = restful_api.require_model, api_context()
    XavierExtension().configure_api(api)
    assert restful_api.require_model is before
    assert not api.app.user_middleware
    assert [each.path for each in api.router.routes if isinstance(each, APIRoute)] == [
        "/v1/cluster/xavier"
    ]


async def test_doctor_says_what_is_missing_in_each_process(off: None) -> None:
    worker = SimpleNamespace(address="127.0.0.1:2")
    worker.xavier_process_info = lambda: worker_process_info(worker)
    supervisor = SimpleNamespace(address="127.0.0.1:1")  # it may know no workers
    supervisor.xavier_process_info = lambda: supervisor_process_info(supervisor)
    findings = [*process_findings(await cluster_info(gateway_to(supervisor)))]
    assert [*map(known, findings)] == [("supervisor", MISSING, True), ("API", MISSING, True)]


def known(finding: Finding) -> tuple[str, str, bool]:
    return finding.where, finding.problem.partition("what it uses: ")[2], finding.grave
