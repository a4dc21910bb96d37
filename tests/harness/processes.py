"""The processes of a replica, found by the tracker's or xinference's name for it, and signals to
them.

    model (xinference's "Model: <replica>") → engine core → worker(s)
                                                          → transfer process

Everything is read from the process table; the processes themselves may be stopped or dying. Look a
replica up before harming it: its children lose their parent.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from examples.processes import alive, until
from xinference_xavier.runtime.addresses import split_address

GONE_TIMEOUT = 30.0
"""Seconds for a killed replica's other processes to notice and end."""
_REGION = "memfd:xavier-region"


class ReplicaProcesses(NamedTuple):
    """One replica's processes; `transfer` is None while it has none."""

    model: psutil.Process
    engine: psutil.Process
    workers: tuple[psutil.Process, ...]
    transfer: psutil.Process | None

    def all(self) -> tuple[psutil.Process, ...]:
        """All of them, the model process first."""
        transfer = () if self.transfer is None else (self.transfer,)
        return (self.model, self.engine, *self.workers, *transfer)


def of_member(member: Mapping[str, Any]) -> ReplicaProcesses:
    """The processes of a replica as `GET /v1/xavier/{uid}` lists it; its engine listens at its
    address."""
    _, port = split_address(member["address"])
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if listens and connection.laddr and connection.laddr.port == port:
            return _around(psutil.Process(connection.pid))
    raise LookupError(f"no process listens at {member['address']}, the address of a replica")


def of_replica(replica_model_uid: str) -> ReplicaProcesses:
    """The processes of a replica by xinference's name for it, such as `small-rep0`."""
    model = model_process(replica_model_uid)
    engines = [child for child in model.children() if _is(child, "VLLM::EngineCore")]
    if len(engines) != 1:
        raise LookupError(f"{replica_model_uid} has {len(engines)} engines")
    return _around(engines[0])


def model_process(replica_model_uid: str) -> psutil.Process:
    """xinference's process for the replica, even before it has an engine."""
    title = f"Model: {replica_model_uid}"
    found = [process for process in psutil.process_iter() if _is(process, title)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} processes are called {title!r}")
    return found[0]


def running(pid: int | None) -> psutil.Process | None:
    """The process, or None if it has ended."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def kill(*doomed: psutil.Process) -> None:
    """Kill the processes with SIGKILL; return when they are gone."""
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_gone(doomed)


def wait_gone(processes: Iterable[psutil.Process], timeout: float = GONE_TIMEOUT) -> None:
    """Return when none is running any more. Raises TimeoutError that names those left.

    A zombie counts as gone: its parent may be too busy or stopped to reap it.
    """
    doomed = list(processes)
    if not until(lambda: not alive(doomed), timeout):
        still = ", ".join(f"{process.pid} {process.name()}" for process in alive(doomed))
        raise TimeoutError(f"still running after {timeout:g} s: {still}")


@contextlib.contextmanager
def frozen(processes: Iterable[psutil.Process]) -> Iterator[Callable[[], bool]]:
    """Suspend the processes with SIGSTOP, and at the end resume those that still exist. Yields a
    function that says whether they stand still."""
    stopped = []
    try:
        for process in processes:
            process.suspend()
            stopped.append(process)
        yield lambda: all(each.status() == psutil.STATUS_STOPPED for each in stopped)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def is_transfer(process: psutil.Process) -> bool:
    """Whether it is a replica's transfer process, and has not ended."""
    return "xinference_xavier.transfer" in _words(process)


def mapped_regions(processes: Iterable[psutil.Process]) -> dict[int, int]:
    """The pools' memory that these processes map: bytes by inode."""
    found = {}
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        for line in lines:
            if _REGION in line:
                addresses, _, _, _, inode, *_ = line.split()
                start, end = (int(address, 16) for address in addresses.split("-"))
                found[int(inode)] = end - start
    return found


def _around(engine: psutil.Process) -> ReplicaProcesses:
    model = engine.parent()
    if model is None:
        raise LookupError(f"engine {engine.pid} has no parent any more")
    children = engine.children(recursive=True)
    workers = tuple(child for child in children if _is(child, "VLLM::Worker"))
    transfers = [child for child in children if is_transfer(child)]
    return ReplicaProcesses(model, engine, workers, transfers[0] if transfers else None)


def _is(process: psutil.Process, title: str) -> bool:
    # Titles are written over the arguments and padded.
    return " ".join(_words(process)).strip() == title


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


@contextlib.contextmanager
def vllms_own_segments_removed() -> Iterator[None]:
    """Remove the shared memory through which two CPU workers talk: vLLM 0.32 sometimes leaves
    it."""

    def segments() -> set[Path]:
        return set(Path("/dev/shm").glob("vllm_dist_*-cpushm_*"))

    before = segments()
    yield
    for segment in segments() - before:
        segment.unlink()
