"""The installed xinference has everything that we use; a name that is missing costs its feature.

A new version that moves or renames any of it fails here, and not in a user's cluster.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from xinference.api import restful_api
from xinference.api.oauth2.advanced.auth_service import AdvancedAuthService
from xinference.core.supervisor import SupervisorActor
from xinference.core.worker import WorkerActor

from tests.serving.launch.launching import ARGUMENTS, supervisor_class
from tests.serving.supervisors import api_context
from tests.serving.text_api import WRAPPED
from xinference_xavier.serving import seam
from xinference_xavier.serving.answers import model_access
from xinference_xavier.serving.launch.supervisor import xavier_models
from xinference_xavier.serving.routing import add_routing
from xinference_xavier.serving.seam import Feature


@pytest.fixture(autouse=True)
def a_process_that_has_not_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_missing_of", {})


def test_the_installed_xinference_has_what_we_use() -> None:
    assert seam.faults() == []


def test_an_api_that_is_made_again_has_the_latest_wrapper_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """xinference 4.0 does so if its port is taken."""
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
        return f"SupervisorActor._gen_model_uid is gone: {Feature.SHARING}"

    def renames_an_attribute(self, monkeypatch: pytest.MonkeyPatch) -> str:
        def init(self: Any) -> None:
            self._launches = self._supervisor_address = self._model_uid_to_model = {}

        monkeypatch.setattr(WorkerActor, "__init__", init)
        return f"WorkerActor._model_uid_to_launch_args is gone: {Feature.CAUSES}"

    def takes_another_argument(self, monkeypatch: pytest.MonkeyPatch) -> str:
        async def update(self: Any, model_uid: str, status: str) -> None: ...

        monkeypatch.setattr(WorkerActor, "_update_model_state", update)
        return f"WorkerActor._update_model_state takes no state: {Feature.READINESS}"

    def makes_a_property_of_a_method(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr(SupervisorActor, "get_model", property(lambda self: None))
        return f"SupervisorActor.get_model takes no model_uid: {Feature.FINDING}"

    def moves_a_module(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setitem(sys.modules, "xinference.core.rpc_context", None)
        return f"xinference.core.rpc_context is gone: {Feature.LOGS}"

    def moves_a_class(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.delattr(restful_api, "RESTfulAPI")
        return f"xinference.api.restful_api.RESTfulAPI is gone: {Feature.ENDPOINTS}"

    def changes_a_text(self, monkeypatch: pytest.MonkeyPatch) -> str:
        needs = {"xinference.core.model": ("'At its limit'",)}
        monkeypatch.setitem(seam.NEEDS, Feature.LIMITS, needs)
        return f"xinference.core.model lacks 'At its limit': {Feature.LIMITS}"


@pytest.mark.parametrize("change", [name for name in vars(Changes) if not name.startswith("_")])
def test_a_change_is_found(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    assert getattr(Changes(), change)(monkeypatch) in seam.faults()


def test_what_4_0_lacks_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seam.NEEDS, Feature.SALTS, {"xinference.extensions": ("salts",)})
    for version, faults in (("4.0.1", 0), ("4.1.0", 1)):
        monkeypatch.setattr("importlib.metadata.version", lambda package, version=version: version)
        assert len(seam.faults([Feature.SALTS])) == faults


def test_without_a_name_its_feature_is_off_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(SupervisorActor, "cancel_launch_builtin_model")
    for _ in range(2):
        supervisor = supervisor_class()
        assert not hasattr(supervisor.cancel_launch_builtin_model, "__wrapped__")
        for name in ("_launch_builtin_model", "terminate_model", "get_model"):
            assert hasattr(getattr(supervisor, name), "__wrapped__")
    (record,) = caplog.records
    assert f"cancel_launch_builtin_model is gone: {Feature.CANCELS}" in record.message


async def test_without_sharing_launches_are_xinference_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SupervisorActor, "_gen_model_uid")
    supervisor = supervisor_class()("127.0.0.1:1")
    del supervisor._xavier_cache_mapping
    assert await supervisor._launch_builtin_model(**ARGUMENTS) == "m"
    assert supervisor.calls[0]["enable_xavier"] == "true"
    assert await xavier_models(supervisor) == {}


def test_without_xinference_s_check_nobody_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(AdvancedAuthService, "validate_model_access")
    request: Any = SimpleNamespace(state=SimpleNamespace(), headers={})
    model_access(api_context())(request, "m")
    with pytest.raises(HTTPException, match="403"):
        model_access(api_context(object()))(request, "m")
