"""`xinference-xavier launches` over xinference's own launch history."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient
from xinference.api.routers import launch_history
from xinference.core.launch_history_store import LaunchHistoryStore

from xinference_xavier.cli.commands import main

ANONYMOUS = ""
VLLM = {"model_engine": "vLLM", "replica": 2}
SAVED: dict[str, dict[str, Any]] = {
    "plain": VLLM,
    "off": {**VLLM, "enable_xavier": False},
    "text": {**VLLM, "enable_xavier": "false"},
    "dash": {**VLLM, "enable-xavier": True, "xavier_backend": None},
    "ours": {**VLLM, "enable_xavier": True},
    "sized": {**VLLM, "enable-xavier": "true", "xavier-pool-bytes": "4GiB"},
    "theirs": {**VLLM, "enable_xavier": True, "xavier_cache_bytes": 1},
    "chosen": {**VLLM, "enable_xavier": True, "xavier_backend": "builtin"},
    "sglang": {"model_engine": "SGLang", "enable_xavier": True},
    "roles": {**VLLM, "enable_xavier": True, "replica_config": [{"role": "prefill"}]},
    "confused": {"model_engine": "SGLang", "enable_xavier": True, "xavier_queue": 3},
    "wrong": {**VLLM, "enable_xavier": True, "xavier_queue": "many"},
}


SUPERVISOR: dict[str, Any] = {}
"""What it says of itself."""


class Saving:
    """An API that has only the routes of launch histories."""

    _auth_service = None

    def __init__(self, folder: Path) -> None:
        self._launch_history_store = LaunchHistoryStore(str(folder / "history.db"))
        self._router = APIRouter()
        for name, arguments in SAVED.items():
            self.save(name, arguments)
        launch_history.register_routes(self)

    def is_authenticated(self) -> bool:
        return False

    def save(self, name: str, arguments: dict[str, Any], account: str = ANONYMOUS) -> None:
        self._launch_history_store.upsert("qwen", name, dict(arguments), account)

    def saved(self) -> dict[str, dict[str, Any]]:
        rows = self._launch_history_store.list()
        return {row["model_uid"]: row["data"] for row in rows}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saving:
    api = Saving(tmp_path)
    app = FastAPI()
    app.state.api = api
    app.include_router(api._router)
    app.add_api_route("/v1/cluster/xavier", lambda: {"supervisor": SUPERVISOR})
    monkeypatch.setenv("XINFERENCE_HOME", str(tmp_path))
    SUPERVISOR.clear()
    SUPERVISOR["environment"] = {}
    monkeypatch.setenv("XINFERENCE_XAVIER_BACKEND", "builtin")  # this process is not asked
    monkeypatch.setattr(httpx, "Client", lambda **settings: TestClient(app))
    return api


def lines(*words: str) -> dict[str, str]:
    """What is printed of each launch, by its uid."""
    shown = CliRunner().invoke(main, ["launches", *words], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    rows = [line.split(maxsplit=2) for line in shown.output.splitlines()]
    return {row[1]: " ".join(row[2].split()) for row in rows if len(row) == 3}


@pytest.mark.usefixtures("api")
def test_each_launch_with_options_is_listed_with_both_meanings() -> None:
    shown = lines()
    shown.pop("uid")
    confused, wrong = shown.pop("confused"), shown.pop("wrong")
    assert "refused: model_engine='SGLang' cannot share its cache" in confused
    assert "refused: xavier_queue='many' is not a whole number" in wrong
    assert "fails: nobody knows xavier_queue" in wrong
    assert shown == {
        "off": "enable_xavier=False nothing nothing",
        "text": "enable_xavier=false nothing the built-in Xavier",
        "dash": "enable-xavier=True, xavier_backend=None this extension "
        "fails: nobody knows enable-xavier, xavier_backend",
        "ours": "enable_xavier=True this extension the built-in Xavier",
        "sized": "enable-xavier=true, xavier-pool-bytes=4GiB this extension "
        "fails: nobody knows enable-xavier, xavier-pool-bytes",
        "theirs": "enable_xavier=True, xavier_cache_bytes=1 the built-in Xavier "
        "the built-in Xavier",
        "chosen": "enable_xavier=True, xavier_backend=builtin the built-in Xavier "
        "fails: nobody knows xavier_backend",
        "sglang": "enable_xavier=True the built-in Xavier the built-in Xavier",
        "roles": "enable_xavier=True the built-in Xavier the built-in Xavier",
    }


@pytest.mark.usefixtures("api")
def test_the_cluster_s_default_is_the_supervisor_s() -> None:
    SUPERVISOR["environment"] = {"XINFERENCE_XAVIER_BACKEND": "builtin"}
    assert lines()["ours"] == "enable_xavier=True the built-in Xavier the built-in Xavier"
    del SUPERVISOR["environment"]
    SUPERVISOR["error"] = "it is silent"
    shown = CliRunner().invoke(main, ["launches"])
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert shown.stderr == "Error: the supervisor does not say what it runs: it is silent\n"


def test_before_a_removal_they_are_taken_out(api: Saving) -> None:
    """Another account's launches stay: xinference hides their options."""
    api.save("another's", SAVED["sized"], account="somebody")
    shown = CliRunner().invoke(main, ["launches", "--strip"])
    assert shown.output == "11 saved launches no longer have options of a Xavier\n"
    saved = api.saved()
    assert saved.pop("another's") == SAVED["sized"]
    assert not [name for arguments in saved.values() for name in arguments if "xavier" in name]
    assert saved["ours"] == saved["plain"] == VLLM
    shown = CliRunner().invoke(main, ["launches"])
    assert "No saved launch has options of a Xavier" in shown.output
