"""Free memory is the least that the host and every cgroup above us still give."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from xinference_xavier.runtime.host import free_memory_bytes

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


def test_a_limit_counts_and_droppable_cache_is_free(tmp_path: Path) -> None:
    write_v2(tmp_path, str(64 * MiB), used=40 * MiB, inactive_file=10 * MiB)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, "0::/")) == 34 * MiB


def test_the_tightest_group_above_us_decides(tmp_path: Path) -> None:
    write_v2(tmp_path / "job", str(32 * MiB), used=20 * MiB)
    write_v2(tmp_path / "job" / "step", str(64 * MiB), used=1 * MiB)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, "0::/job/step")) == 12 * MiB


def test_a_path_outside_our_mount_leaves_the_mount_itself(tmp_path: Path) -> None:
    write_v2(tmp_path, str(64 * MiB), used=60 * MiB)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, "0::/docker/abc")) == 4 * MiB


def test_version_1(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(64 * MiB))
    (group / "memory.usage_in_bytes").write_text(str(60 * MiB))
    (group / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {2 * MiB}\n")
    membership = member_of(tmp_path, "5:cpu,cpuacct:/", "4:memory:/")
    assert free_memory_bytes(tmp_path, membership) == 6 * MiB


def test_an_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    write_v2(tmp_path, str(64 * MiB), used=70 * MiB)
    assert free_memory_bytes(tmp_path, member_of(tmp_path, "0::/")) == 0


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_without_a_real_limit_the_host_decides(tmp_path: Path, limit: str) -> None:
    write_v2(tmp_path, limit, used=0)
    free = free_memory_bytes(tmp_path, member_of(tmp_path, "0::/"))
    assert MiB < free <= psutil.virtual_memory().total


def test_without_cgroups_the_host_decides(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path / "none", tmp_path / "nothing") > MiB
