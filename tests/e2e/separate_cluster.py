"""xinference-supervisor and one xinference-worker as separate programs on this host.

The supervisor can be killed and started again while the worker and its models live on. xinference
4.1 supports this with a limitation: when a worker's supervisor does not answer, the worker asks the
REST endpoint that it was started with for the control address (`core/worker.py`,
`_refresh_supervisor_address`). So the control address may change, but the REST endpoint must not. A
worker registers its running replicas again with its next status report, every 15 s.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from examples.local_cluster import (
    START_TIMEOUT,
    ClusterError,
    Completion,
    Leftovers,
    LocalCluster,
    free_port,
)
from tests.e2e import model_actors
from tests.e2e.processes import wait_gone

_HOST = "127.0.0.1"


class SeparateCluster(LocalCluster):
    """`with SeparateCluster(log) as cluster:` starts both programs and stops them."""

    def __init__(self, log: Path, *, environment: dict[str, str] | None = None) -> None:
        super().__init__(log, host=_HOST, environment=environment)
        self.control_port = free_port(_HOST)
        self._worker: subprocess.Popen[bytes] | None = None
        self._worker_port = free_port(_HOST)
        self._variables: dict[str, str] = {}

    @property
    def worker_address(self) -> str:
        return f"{_HOST}:{self._worker_port}"

    @property
    def control_process(self) -> psutil.Process:
        """The process that owns the control address and, with it, the trackers."""
        assert self._server is not None
        return psutil.Process(self._server.pid)

    def start_supervisor(self, control_port: int) -> None:
        """Start it; return when REST answers. The endpoint is always the same."""
        self.control_port = control_port
        words = ["-H", _HOST, "-p", f"{self._port}", "--supervisor-port", f"{control_port}"]
        self._server = self._run("xinference-supervisor", words)
        self._wait("the supervisor answers", START_TIMEOUT, self._answers)

    def kill_supervisor(self) -> None:
        """Kill all of the supervisor's processes, as when its host loses power."""
        assert self._server is not None
        control = self.control_process
        doomed = [control, *control.children(recursive=True)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._server.wait()
        wait_gone(doomed)

    def ask(self, replica_model_uid: str, prompt: str) -> Completion:
        """Like `complete`, but ask that replica directly; needs no supervisor."""
        return model_actors.complete(self.worker_address, replica_model_uid, prompt)

    def stop(self) -> Leftovers:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGINT)
        leftovers = super().stop()
        if self._worker is not None:
            self._worker.wait()
        return leftovers

    # Inside

    def _start_servers(self, home: Path) -> None:
        self._variables = self._environment(home)
        self.log.write_bytes(b"")
        self.start_supervisor(self.control_port)
        words = ["-e", self.endpoint, "-H", _HOST, "--worker-port", f"{self._worker_port}"]
        self._worker = self._run("xinference-worker", words)
        self._wait("the worker has registered", START_TIMEOUT, self._has_worker)

    def _run(self, program: str, words: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(Path(sys.executable).parent / program), *words],
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _has_worker(self) -> bool:
        try:
            return bool(self.call("GET", "/v1/workers"))
        except ClusterError:  # the supervisor is not ready for it yet
            return False
