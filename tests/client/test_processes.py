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


@pytest.mark.parametrize("api", [{}, {"routes": True}], ids=["of an earlier version", "routes"])
def test_nothing_in_healthy_processes(api: dict[str, Any]) -> None:
    assert found(**api) == []


def test_an_api_that_gives_requests_to_replicas_in_turn() -> None:
    """Sharing works all the same."""
    (finding,) = found(routes=False)
    assert finding.where == "API process"
    assert "no require_model" in finding.problem
    assert not finding.grave
