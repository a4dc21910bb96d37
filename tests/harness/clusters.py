"""Clusters of xinference whose supervisor and workers are separate programs, on this host or on
several.

xinference 4.1 shapes both:

- On several hosts, every part gets its own host's address instead of the default, `0.0.0.0`,
  because an address is passed on as it was given: a worker on another host would look for the
  supervisor at `0.0.0.0` (`GET /v1/address`), which is its own host, and so would the supervisor
  for a worker.
- A supervisor can be killed and started again while workers and models live on. A worker whose
  supervisor does not answer asks the REST endpoint that it was started with for the control address
  (`core/worker.py`, `_refresh_supervisor_address`). So the control address may change, but the REST
  endpoint must not. A worker registers its running replicas again with its next status report,
  every 15 s.
"""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil

from examples.local_cluster import START_TIMEOUT, ClusterError, LocalCluster
from examples.processes import free_port, start
from tests.harness.hosts import Hosts
from tests.harness.processes import kill

PROGRAMS = Path(sys.executable).parent
SUPERVISOR = "supervisor"
REST_PORT, SUPERVISOR_PORT, WORKER_PORT = 9997, 9998, 9999
_LOOPBACK = "127.0.0.1"
_LEFT_BY_KILLED = re.compile(r"psm_\w+|sem\.mp-\w+")
_HOST_SOCKET = "XINFERENCE_WORKER_HOST_SOCKET"


class SeparateCluster(LocalCluster):
    """`with SeparateCluster(log) as cluster:` starts xinference-supervisor and one
    xinference-worker on this host, and stops them."""

    def __init__(
        self,
        log: Path,
        *,
        host: str = _LOOPBACK,
        port: int = 0,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(log, host=host, port=port, environment=environment)
        self.control_port = free_port(_LOOPBACK)
        self.workers = {"worker": f"{_LOOPBACK}:{free_port(_LOOPBACK)}"}
        """Their addresses by name."""

    @property
    def control_process(self) -> psutil.Process:
        """The process that owns the control address and, with it, the trackers."""
        assert self._server is not None
        return psutil.Process(self._server.pid)

    def start_supervisor(self, control_port: int) -> None:
        """Start it; return when REST answers. The endpoint is always the same."""
        self.control_port = control_port
        words = ["-H", self._host, "-p", f"{self._port}", "--supervisor-port", f"{control_port}"]
        self._server = self._run(SUPERVISOR, PROGRAMS / "xinference-supervisor", words)
        self._wait("the supervisor answers", START_TIMEOUT, self._answers)

    def kill_supervisor(self) -> None:
        """Kill all of the supervisor's processes, as when its host loses power."""
        assert self._server is not None
        kill(self.control_process, *self.control_process.children(recursive=True))
        self._server.wait()

    # Inside

    def _start_servers(self, home: Path) -> None:
        self.log.write_bytes(b"")
        self.start_supervisor(self.control_port)
        for name, address in self.workers.items():
            host, _, port = address.rpartition(":")
            words = ["-e", self.endpoint, "-H", host, "--worker-port", port]
            self._workers[name] = self._run(name, PROGRAMS / "xinference-worker", words)
        self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        def registered() -> bool:
            try:
                return len(self.call("GET", "/v1/workers")) == len(self.workers)
            except ClusterError:  # the supervisor is not ready for it yet
                return False

        self._wait("the workers have registered", START_TIMEOUT, registered)

    def _run(self, name: str, program: Path, words: list[str]) -> subprocess.Popen[bytes]:
        """Start the part of this name."""
        assert self._home is not None
        environment = self._environment(Path(self._home.name))
        return start([program, *words], self.log, environment, append=True, start_new_session=True)


class HostCluster(SeparateCluster):
    """`with HostCluster(log, hosts, workers=("first", "second")) as cluster:`

    The supervisor is on the host `SUPERVISOR`. Each host has a home folder of its own and a log
    beside `log`. Nothing of a host outlives `stop`.
    """

    def __init__(
        self,
        log: Path,
        hosts: Hosts,
        *,
        workers: tuple[str, ...],
        environment: dict[str, str] | None = None,
    ) -> None:
        host = hosts.address(SUPERVISOR)
        super().__init__(log, host=host, port=REST_PORT, environment=environment)
        self.control_port = SUPERVISOR_PORT
        self.workers = {name: f"{hosts.address(name)}:{WORKER_PORT}" for name in workers}
        self._hosts = hosts

    def lose(self, name: str) -> None:
        """Cut that host's link and kill everything on it."""
        self._hosts.lose(name)
        doomed = [p for p in self.processes() if self._hosts.host_of(p.pid) == name]
        segments = self._segments(_LEFT_BY_KILLED)
        # xinference's process host keeps a socket outside its home.
        sockets = {process.environ().get(_HOST_SOCKET, "") for process in doomed} - {""}
        kill(*doomed)
        self._workers[name].wait()
        for segment in segments - self._segments(_LEFT_BY_KILLED):
            segment.unlink(missing_ok=True)
        for path in sockets:
            shutil.rmtree(Path(path).parent)

    # Inside

    def _run(self, name: str, program: Path, words: list[str]) -> subprocess.Popen[bytes]:
        assert self._home is not None
        environment = self._environment(Path(self._home.name) / name)
        # Processes of one xoscar pool talk over sockets in this folder, named by numbers.
        environment["XOSCAR_DIR"] = environment["XINFERENCE_HOME"]
        return start(
            [str(program), *words],
            self.log.with_stem(f"{self.log.stem}-{name}"),
            environment,
            by=partial(self._hosts.run, name),
            start_new_session=True,
        )

    def _is_ours(self, process: psutil.Process) -> bool:
        return self._hosts.host_of(process.pid) is not None
