"""What `doctor` finds in processes, without any; `test_doctor.py` has real ones."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.client.doctor import Finding, process_findings
from xinference_xavier.runtime.host import process_info


def found(**api: Any) -> list[Finding]:
    """In a cluster whose processes are all like this one."""
    info = process_info()
    cluster = {
        "api": {**info, **api},
        "supervisor": info,
        "workers": {"127.0.0.1:1": info},
        "models": {},
    }
    return [*process_findings(cluster)]


@pytest.fixture(autouse=True)
def byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.mark.parametrize("api", [{}, {"faults": {}}], ids=["of an earlier version", "whole"])
def test_nothing_in_healthy_processes(api: dict[str, Any]) -> None:
    assert found(**api) == []


@pytest.mark.parametrize("grave", [True, False])
def test_what_xinference_lacks(grave: bool) -> None:
    (finding,) = found(faults={"it has no ears: it does not hear": grave})
    assert finding.where == "API process"
    assert "it has no ears: it does not hear" in finding.problem
    assert finding.grave is grave
