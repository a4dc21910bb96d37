"""Debian's Prometheus, as a process of its own for each test."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from examples.processes import answers, end, free_port, start
from tests.harness.replicas import DEADLINE, wait_until
from tests.monitor.files import ALERTS, PROMETHEUS


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    assert found is not None, "promtool is missing: `make system` installs it"
    return subprocess.run(
        [found, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE
    )


class Prometheus:
    """Uses our configuration, except for the target and the intervals."""

    def __init__(self, folder: Path, target: str, metrics_path: str) -> None:
        config = yaml.safe_load(PROMETHEUS.read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(ALERTS)]
        (job,) = config["scrape_configs"]
        job |= {"metrics_path": metrics_path, "static_configs": [{"targets": [target]}]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        executable = shutil.which("prometheus")
        assert executable is not None, "prometheus is missing: `make system` installs it"
        port = free_port("127.0.0.1")
        words = [
            executable,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._process = start(words, self._log)
        self._url = f"http://127.0.0.1:{port}"
        wait_until(self._is_ready, "Prometheus is ready", interval=0.1)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return answers(f"{self._url}/-/ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        answer = self._get("query", query=expression)
        results: list[dict[str, Any]] = answer["result"]
        return results

    def query_range(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        now = time.time()
        span = {"start": str(now - seconds), "end": str(now), "step": "1"}
        results: list[dict[str, Any]] = self._get("query_range", query=expression, **span)["result"]
        return results

    def target(self) -> dict[str, Any]:
        (target,) = self._get("targets")["activeTargets"]
        described: dict[str, Any] = target
        return described

    def rules(self) -> list[dict[str, Any]]:
        (group,) = self._get("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    def _get(self, what: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{what}", params=parameters, timeout=DEADLINE).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def complaints(self) -> list[str]:
        """Its warnings and errors."""
        lines = self._log.read_text().splitlines()
        return [line for line in lines if "level=warn" in line or "level=error" in line]

    def stop(self) -> None:
        end(self._process, DEADLINE)
