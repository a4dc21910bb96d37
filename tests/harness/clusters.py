"""Clusters of xinference whose supervisor and workers are separate programs, on this host or on
several, and requests to a replica that bypass the supervisor.

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

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import xoscar

from examples.local_cluster import START_TIMEOUT, ClusterError, Completion, LocalCluster, greedy
from examples.processes import free_port, start
from tests.harness.hosts import Admitted, Hosts
from tests.harness.processes import wait_gone

PROGRAMS = Path(sys.executable).parent
SUPERVISOR = "supervisor"
REST_PORT, SUPERVISOR_PORT, WORKER_PORT = 9997, 9998, 9999
ANSWER_TIMEOUT = 120.0
_LOOPBACK = "127.0.0.1"
_LEFT_BY_KILLED = re.compile(r"psm_\w+|sem\.mp-\w+")
_HOST_SOCKET = "XINFERENCE_WORKER_HOST_SOCKET"


def ask_replica(
    worker_address: str, replica_model_uid: str, prompt: str, **more: Any
) -> Completion:
    """The replica's greedy continuation, asked directly. `more` are parameters of the generation.
    Raises what the worker or the model raises."""
    options = greedy(**more)

    async def ask() -> Completion:
        worker = await xoscar.actor_ref(worker_address, "worker")
        model = await worker.get_model(replica_model_uid)
        begin = time.perf_counter()
        answer = json.loads(await model.generate(prompt, options, raw_params=dict(options)))
        return Completion.from_json(answer, time.perf_counter() - begin)

    return asyncio.run(asyncio.wait_for(ask(), ANSWER_TIMEOUT))


class SeparateCluster(LocalCluster):
    """`with SeparateCluster(log) as cluster:` starts xinference-supervisor and one
    xinference-worker on this host, and stops them."""

    def __init__(self, log: Path, *, environment: dict[str, str] | None = None) -> None:
        super().__init__(log, host=_LOOPBACK, environment=environment)
        self.control_port = free_port(_LOOPBACK)
        self.worker_address = f"{_LOOPBACK}:{free_port(_LOOPBACK)}"
        self._variables: dict[str, str] = {}

    @property
    def control_process(self) -> psutil.Process:
        """The process that owns the control address and, with it, the trackers."""
        assert self._server is not None
        return psutil.Process(self._server.pid)

    def start_supervisor(self, control_port: int) -> None:
        """Start it; return when REST answers. The endpoint is always the same."""
        self.control_port = control_port
        words = ["-H", _LOOPBACK, "-p", f"{self._port}", "--supervisor-port", f"{control_port}"]
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
        return ask_replica(self.worker_address, replica_model_uid, prompt)

    # Inside

    def _start_servers(self, home: Path) -> None:
        self._variables = self._environment(home)
        self.log.write_bytes(b"")
        self.start_supervisor(self.control_port)
        port = self.worker_address.rpartition(":")[2]
        words = ["-e", self.endpoint, "-H", _LOOPBACK, "--worker-port", port]
        self._workers["worker"] = self._run("xinference-worker", words)
        self._wait("the worker has registered", START_TIMEOUT, lambda: _workers(self) == 1)

    def _run(self, program: str, words: list[str]) -> subprocess.Popen[bytes]:
        return start(
            [PROGRAMS / program, *words],
            self.log,
            self._variables,
            append=True,
            start_new_session=True,
        )


def _workers(cluster: LocalCluster) -> int:
    """How many have registered."""
    try:
        return len(cluster.call("GET", "/v1/workers"))
    except ClusterError:  # the supervisor is not ready for it yet
        return 0


def allow_only_what_is_needed(hosts: Hosts, workers: tuple[str, ...], replicas: range) -> None:
    """Give every host a firewall that admits `replicas`, the ports of `xavier_port_range`, and
    xinference's ports.

    Workers reach each other only on `xavier_port_range` and, for Gloo, the ephemeral ports. In
    addition, xinference 4.1 needs:
    - from workers to the supervisor's host: its REST port (at start, and after the supervisor was
      lost) and its actor port, which the trackers share;
    - from the supervisor to a worker's host: the worker's port, `xavier_port_range`, on which the
      tracker asks replicas for figures, and each model process's, which is any ephemeral port.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [hosts.our_address, *(hosts.address(worker) for worker in workers)]
    hosts.admit_only(
        SUPERVISOR, [Admitted(source, REST_PORT, SUPERVISOR_PORT) for source in outside]
    )
    for worker in workers:
        peers = [hosts.address(peer) for peer in workers if peer != worker]
        # The tests ask model processes too, like the supervisor's REST process.
        askers = [hosts.address(SUPERVISOR), hosts.our_address]
        hosts.admit_only(
            worker,
            [
                *(Admitted(asker, WORKER_PORT, WORKER_PORT) for asker in askers),
                *(Admitted(each, low, high) for each in peers + askers),
                *(Admitted(each, replicas[0], replicas[-1]) for each in peers + askers),
            ],
        )


class HostCluster(LocalCluster):
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
        super().__init__(
            log, host=hosts.address(SUPERVISOR), port=REST_PORT, environment=environment
        )
        self._hosts = hosts
        self._names = workers

    def _start_servers(self, home: Path) -> None:
        host = self._hosts.address(SUPERVISOR)
        words = ["-H", host, "-p", f"{REST_PORT}", "--supervisor-port", f"{SUPERVISOR_PORT}"]
        self._server = self._run(home, SUPERVISOR, "xinference-supervisor", words)
        self._wait("the supervisor answers", START_TIMEOUT, self._answers)
        for name in self._names:
            words = ["-e", self.endpoint, "-H", self._hosts.address(name)]
            words += ["--worker-port", f"{WORKER_PORT}"]
            self._workers[name] = self._run(home, name, "xinference-worker", words)
        self._wait(
            "the workers have registered",
            START_TIMEOUT,
            lambda: _workers(self) == len(self._names),
        )

    def lose(self, name: str) -> None:
        """Cut that host's link and kill everything on it."""
        self._hosts.lose(name)
        doomed = [p for p in self.processes() if self._hosts.host_of(p.pid) == name]
        segments = self._segments(_LEFT_BY_KILLED)
        # xinference's process host keeps a socket outside its home.
        sockets = {process.environ().get(_HOST_SOCKET, "") for process in doomed} - {""}
        for process in doomed:
            process.kill()
        self._workers[name].wait()
        wait_gone(doomed)
        for segment in segments - self._segments(_LEFT_BY_KILLED):
            segment.unlink(missing_ok=True)
        for path in sockets:
            shutil.rmtree(Path(path).parent)

    def complete_at(self, name: str, model_uid: str, prompt: str, **more: Any) -> Completion:
        """Like `complete`, but ask the replica on that worker directly, without the supervisor."""
        (replica,) = (
            status["replica_model_uid"]
            for status in self.replicas(model_uid)
            if status["worker_address"] == self._worker_address(name)
        )
        return ask_replica(self._worker_address(name), replica, prompt, **more)

    # Inside

    def _run(
        self, home: Path, name: str, program: str, words: list[str]
    ) -> subprocess.Popen[bytes]:
        environment = self._environment(home / name)
        # Processes of one xoscar pool talk over sockets in this folder, named by numbers.
        environment["XOSCAR_DIR"] = environment["XINFERENCE_HOME"]
        return start(
            [str(PROGRAMS / program), *words],
            self.log.with_stem(f"{self.log.stem}-{name}"),
            environment,
            by=partial(self._hosts.run, name),
            start_new_session=True,
        )

    def _worker_address(self, name: str) -> str:
        return f"{self._hosts.address(name)}:{WORKER_PORT}"

    def _is_ours(self, process: psutil.Process) -> bool:
        return self._hosts.host_of(process.pid) is not None
