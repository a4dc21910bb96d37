"""xinference over several hosts: a supervisor on one, a worker on each of the others.

Every part gets its own host's address instead of xinference's default, `0.0.0.0`, because 4.1
passes an address on as it was given: a worker on another host would look for the supervisor at
`0.0.0.0` (`GET /v1/address`), which is its own host, and so would the supervisor for a worker.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import xoscar

from examples.local_cluster import START_TIMEOUT, Completion, Leftovers, LocalCluster
from tests.e2e.hosts import Admitted, Hosts
from tests.e2e.processes import wait_gone

SUPERVISOR = "supervisor"
REST_PORT, SUPERVISOR_PORT, WORKER_PORT = 9997, 9998, 9999
ANSWER_TIMEOUT = 120.0
_LEFT_BY_KILLED = re.compile(r"psm_\w+|sem\.mp-\w+")
_HOST_SOCKET = "XINFERENCE_WORKER_HOST_SOCKET"


def allow_only_what_is_needed(hosts: Hosts, workers: tuple[str, ...], replicas: range) -> None:
    """Give every host a firewall that admits `replicas`, the ports of `xavier_port_range`, and
    xinference's ports.

    Workers reach each other only on `xavier_port_range`. In addition, xinference 4.1 needs:
    - from workers to the supervisor's host: its REST port (at start, and after the supervisor was
      lost) and its actor port, which the trackers share;
    - from the supervisor to a worker's host: the worker's port, and each model process's, which is
      any ephemeral port. These include `xavier_port_range`, on which the tracker asks replicas for
      figures.
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
                *(Admitted(peer, replicas[0], replicas[-1]) for peer in peers),
                *(Admitted(asker, WORKER_PORT, WORKER_PORT) for asker in askers),
                *(Admitted(asker, low, high) for asker in askers),
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
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def _start_servers(self, home: Path) -> None:
        host = self._hosts.address(SUPERVISOR)
        words = ["-H", host, "-p", f"{REST_PORT}", "--supervisor-port", f"{SUPERVISOR_PORT}"]
        self._server = self._run(home, SUPERVISOR, "xinference-supervisor", words)
        self._wait("the supervisor answers", START_TIMEOUT, self._answers)
        for name in self._names:
            words = ["-e", self.endpoint, "-H", self._hosts.address(name)]
            words += ["--worker-port", f"{WORKER_PORT}"]
            self._workers[name] = self._run(home, name, "xinference-worker", words)
        self._wait("the workers have registered", START_TIMEOUT, self._all_registered)

    def stop(self) -> Leftovers:
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.send_signal(signal.SIGINT)
        leftovers = super().stop()
        for worker in self._workers.values():
            worker.wait()
        return leftovers

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

    def complete_at(
        self,
        name: str,
        model_uid: str,
        prompt: str,
        *,
        max_tokens: int = 8,
        cache_salt: str | None = None,
    ) -> Completion:
        """Like `complete`, but ask the replica on that worker directly, without the supervisor."""
        (replica,) = (
            status["replica_model_uid"]
            for status in self.replicas(model_uid)
            if status["worker_address"] == self._worker_address(name)
        )
        options: dict[str, object] = {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 1}
        options["ignore_eos"] = True
        if cache_salt is not None:
            options["cache_salt"] = cache_salt

        async def ask() -> Completion:
            worker = await xoscar.actor_ref(self._worker_address(name), "worker")
            model = await worker.get_model(replica)
            begin = time.perf_counter()
            answer = json.loads(await model.generate(prompt, options, raw_params=dict(options)))
            return Completion.of(answer, time.perf_counter() - begin)

        async def ask_in_time() -> Completion:
            return await asyncio.wait_for(ask(), ANSWER_TIMEOUT)

        return asyncio.run(ask_in_time())

    # Inside

    def _run(
        self, home: Path, name: str, program: str, words: list[str]
    ) -> subprocess.Popen[bytes]:
        environment = self._environment(home / name)
        # Processes of one xoscar pool talk over sockets in this folder, named by numbers.
        environment["XOSCAR_DIR"] = environment["XINFERENCE_HOME"]
        with self.log.with_stem(f"{self.log.stem}-{name}").open("wb") as log:
            return self._hosts.run(
                name,
                [str(Path(sys.executable).parent / program), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _all_registered(self) -> bool:
        return len(self.call("GET", "/v1/workers")) == len(self._names)

    def _worker_address(self, name: str) -> str:
        return f"{self._hosts.address(name)}:{WORKER_PORT}"

    def _is_ours(self, process: psutil.Process) -> bool:
        return self._hosts.host_of(process.pid) is not None
