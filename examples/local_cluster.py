"""A private xinference on this machine, for the demo and for the end-to-end tests.

`LocalCluster` starts the `xinference-local` of its own Python environment, with our extension, in a
session and a home folder of its own. It launches models, asks them, and leaves nothing behind.
Several threads may ask; all else is for one thread at a time. Every wait has a deadline. Failures
raise `ClusterError`, which names the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import requests

from examples.processes import COMPILED, alive, answers, free_port, start, until

SHARED_MEMORY = Path("/dev/shm")
PYTHON_SEGMENT = re.compile(r"psm_\w+")
ENVIRONMENT = {
    "XINFERENCE_EXTENSIONS": "xinference_xavier:extension",
    "XINFERENCE_ENABLE_VIRTUAL_ENV": "0",
    "XINFERENCE_DISABLE_METRICS": "1",
    "XINFERENCE_SUBPOOL_LAUNCH_TIMEOUT": "400",  # for a busy machine; 60 s by default
    "XINFERENCE_MODEL_SRC": "huggingface",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHINDUCTOR_CACHE_DIR": COMPILED,
}
START_TIMEOUT = 300.0
LAUNCH_TIMEOUT = 600.0
REQUEST_TIMEOUT = 300.0
STOP_TIMEOUT = 60.0
USER, PASSWORD = "admin", "a long password"
SETUP_TOKEN = re.compile(r"Setup token: (\S+)")


class ClusterError(RuntimeError):
    """The cluster did not do what it was asked to; the message names its log."""


class Completion(NamedTuple):
    """An answer, its tokens as text, and the seconds that it took at the client."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    seconds: float

    @classmethod
    def from_json(cls, answer: dict[str, Any], seconds: float) -> Completion:
        """Read xinference's answer, which must have log-probabilities."""
        choice, usage = answer["choices"][0], answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            text=choice["text"],
            tokens=tuple(choice["logprobs"]["tokens"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens", 0),
            seconds=seconds,
        )


def greedy(max_tokens: int = 8, **more: object) -> dict[str, object]:
    """The parameters of a greedy answer that is always `max_tokens` long."""
    return {
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        **more,
    }


class Leftovers(NamedTuple):
    """What `stop` had to remove by force."""

    processes: tuple[str, ...]
    segments: tuple[str, ...]


class LocalCluster:
    """`with LocalCluster(log) as cluster:` starts the cluster and stops it.

    `environment` is added to that of the servers and their engines. `port` 0 means any free port.
    `python` is the interpreter of the environment that has xinference. With `accounts`, which is
    xinference's default, the server requires a login, and `USER` has the only account.
    """

    def __init__(
        self,
        log: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        accounts: bool = False,
        environment: dict[str, str] | None = None,
        python: Path = Path(sys.executable),
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.log = log
        self._python = python
        self._host = host
        self._port = port
        self._accounts = accounts
        self._added_environment = environment or {}
        self._say = say
        self._session = requests.Session()
        self._home: tempfile.TemporaryDirectory[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._workers: dict[str, subprocess.Popen[bytes]] = {}  # where they are separate
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        leftovers = self.stop()
        if kind is None and leftovers != Leftovers((), ()):
            raise self._error(f"had to be removed by force: {leftovers}")

    @property
    def endpoint(self) -> str:
        """The base URL of xinference's REST API."""
        return f"http://{self._host}:{self._port}"

    # Life

    def start(self) -> None:
        """Start the server and return when it answers."""
        self._port = self._port or free_port(self._host)
        self._home = tempfile.TemporaryDirectory(prefix="xavier-cluster-")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._start_servers(Path(self._home.name))
        if self._accounts:
            self._make_account()
            self._log_in()

    def stop(self) -> Leftovers:
        """Stop the servers and wait until nothing of them is left; use force if necessary."""
        if self._server is None or self._home is None:
            return Leftovers((), ())
        for worker in self._workers.values():
            worker.send_signal(signal.SIGINT)
        segments = self._segments()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._server.send_signal(number)
            if until(self._has_ended, STOP_TIMEOUT / 2, 0.25):
                break
        stubborn = self.processes()
        names = []
        for process in stubborn:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.pid} {process.name()}")
                process.kill()
        self._server.kill()
        self._server.wait()
        psutil.wait_procs(stubborn, timeout=STOP_TIMEOUT)
        for worker in self._workers.values():
            worker.wait()
        until(lambda: not any(map(Path.exists, segments)), STOP_TIMEOUT / 4)
        kept = tuple(segment.name for segment in segments if segment.exists())
        for segment in segments:
            segment.unlink(missing_ok=True)
        self._session.close()
        self._server = None
        self._home.cleanup()
        return Leftovers(tuple(names), kept)

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster, including those that have lost their parent."""
        for process in psutil.process_iter():
            try:
                if self._is_ours(process):
                    self._seen.update((process, *process.children(recursive=True)))
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
        self._seen = set(alive(self._seen))
        return sorted(self._seen, key=lambda process: process.pid)

    # Models

    def register(self, folder: Path, name: str) -> None:
        """Register the model in `folder` as `name`."""
        config = json.loads((folder / "config.json").read_text())
        definition = {
            "version": 2,
            "model_name": name,
            "model_lang": ["en"],
            "model_ability": ["generate", "chat"],
            "model_family": "qwen2.5-instruct",
            "architectures": config["architectures"],
            "context_length": config["max_position_embeddings"],
            "chat_template": _chat_template(folder),
            "stop_token_ids": _stop_tokens(config),
            "stop": [],
            "model_specs": [
                {
                    "model_format": "pytorch",
                    "model_size_in_billions": 1,
                    "quantization": "none",
                    "model_id": None,
                    "model_uri": folder.resolve().as_uri(),
                }
            ],
        }
        body = {"model": json.dumps(definition), "persist": False}
        self.call("POST", "/v1/model_registrations/LLM", body)
        self._link(folder.resolve(), f"{name}-pytorch-1b-none")

    def _link(self, folder: Path, name: str) -> None:
        """Link the model into the cache, as xinference does at its first launch. If two replicas
        did so at the same time, one would fail."""
        assert self._home is not None
        link = Path(self._home.name) / "cache" / "v2" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(folder, target_is_directory=True)

    def launch(self, name: str, model_uid: str, *, replica: int = 2, **arguments: object) -> None:
        """Launch a registered model; return when every replica is ready.

        Raises:
            ClusterError: the launch failed; the message has xinference's reason.
        """
        body: dict[str, object] = {
            "model_name": name,
            "model_uid": model_uid,
            "model_engine": "vLLM",
            "model_format": "pytorch",
            "quantization": "none",
            "model_size_in_billions": 1,
            "replica": replica,
            "n_gpu": None,
            "enforce_eager": True,
            "tensor_parallel_size": 1,
        }
        self.call("POST", "/v1/models", body | arguments, timeout=LAUNCH_TIMEOUT)
        self.wait_ready(model_uid, replica)

    def add_replica(self, model_uid: str) -> None:
        """Add one replica to a running model; return when it is ready."""
        count = len(self.replicas(model_uid))
        path = f"/v1/models/{model_uid}/replicas"
        self.call("POST", path, {"replica": 1}, timeout=LAUNCH_TIMEOUT)
        self.wait_ready(model_uid, count + 1)

    def remove_replica(self, model_uid: str, replica_id: int) -> None:
        self.call("DELETE", f"/v1/models/{model_uid}/replicas/{replica_id}")

    def terminate(self, model_uid: str) -> None:
        self.call("DELETE", f"/v1/models/{model_uid}")

    def replicas(self, model_uid: str) -> list[dict[str, Any]]:
        """What xinference reports of each replica: `replica_id`, `model_state` and so on."""
        found = self.call("GET", f"/v1/models/instances?model_uid={model_uid}")
        return [status for instance in found for status in instance["replica_statuses"]]

    def wait_ready(self, model_uid: str, count: int) -> None:
        """Return when `count` replicas are ready; raise as soon as one of them has failed."""

        def ready() -> bool:
            replicas = self.replicas(model_uid)
            for replica in replicas:
                if replica["status"] == "ERROR" or replica["model_state"] == "error":
                    raise self._error(
                        f"{replica['replica_model_uid']} failed: {replica['error_message']}"
                    )
            return [replica["model_state"] for replica in replicas] == ["ready"] * count

        self._wait(f"{count} replicas of {model_uid} are ready", LAUNCH_TIMEOUT, ready)

    # Requests

    def complete(
        self, model_uid: str, prompt: str, *, max_tokens: int = 8, **more: object
    ) -> Completion:
        """The greedy continuation of `prompt`, always `max_tokens` long. `more` goes into the
        request's body."""
        body = {"model": model_uid, "prompt": prompt, **greedy(max_tokens, **more)}
        begin = time.perf_counter()
        answer = self.call("POST", "/v1/completions", body)
        seconds = time.perf_counter() - begin
        return Completion.from_json(answer, seconds)

    def xavier(self, model_uid: str) -> dict[str, Any]:
        """What `GET /v1/xavier/{model_uid}` answers."""
        report: dict[str, Any] = self.call("GET", f"/v1/xavier/{model_uid}")
        return report

    def members(self, model_uid: str) -> dict[str, dict[str, Any]]:
        """What the tracker knows of each replica, by incarnation."""
        found = self.xavier(model_uid)["replicas"]
        return {replica["incarnation"]: replica for replica in found}

    def switch_sharing(self, model_uid: str, enabled: bool) -> None:
        self.call("PATCH", f"/v1/xavier/{model_uid}", {"enabled": enabled})

    def supervisor_address(self) -> str:
        """The supervisor's control address, at which its actors are."""
        return str(self.call("GET", "/v1/address"))

    def call(
        self, method: str, path: str, body: object = None, *, timeout: float = REQUEST_TIMEOUT
    ) -> Any:
        """Make one REST call and return the decoded answer.

        Raises:
            ClusterError: there is no answer, or it is an error, whose text is in the message.
        """
        try:
            url = f"{self.endpoint}{path}"
            answer = self._session.request(method, url, json=body, timeout=timeout)
        except requests.RequestException as error:
            raise self._error(f"{method} {path}: {error}") from error
        if not answer.ok:
            raise self._error(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    # Inside

    def _start_servers(self, home: Path) -> None:
        program = "from xinference.deploy.cmdline import local; local()"
        words = [str(self._python), "-c", program, "-H", self._host, "-p", str(self._port)]
        environment = self._environment(home)
        self._server = start(words, self.log, environment, start_new_session=True)
        self._wait("the server answers", START_TIMEOUT, self._answers)

    def _make_account(self) -> None:
        """Make the first account, by the token in the server's log."""
        told = SETUP_TOKEN.search(self.log.read_text())
        if told is None:
            raise self._error("the server has not logged its setup token")
        account = {"username": USER, "password": PASSWORD, "setup_token": told[1]}
        self.call("POST", "/v1/admin/setup", account)

    def _log_in(self) -> None:
        """Send a token with all calls from now on. It expires after half an hour."""
        account = {"username": USER, "password": PASSWORD}
        token = self.call("POST", "/token", account)["access_token"]
        self._session.headers["Authorization"] = f"Bearer {token}"

    def _environment(self, home: Path) -> dict[str, str]:
        """The environment of servers with this home, which they may fill."""
        environment = {**os.environ, **ENVIRONMENT, **self._added_environment}
        environment["XINFERENCE_AUTH_ADVANCED"] = str(self._accounts).lower()
        # Sockets and scratch files too: engines are killed at the end and leave them behind.
        scratch = home / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        environment |= {
            "XINFERENCE_HOME": str(home),
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop("PYTHONHASHSEED", None)  # replicas must find each other's chunks without it
        return environment

    def _answers(self) -> bool:
        assert self._server is not None
        if self._server.poll() is not None:
            raise self._error(f"xinference-local ended with {self._server.returncode}")
        public = "/v1/cluster/auth"  # nobody may list models before there is an account
        return answers(f"{self.endpoint}{public if self._accounts else '/v1/models'}")

    def _has_ended(self) -> bool:
        assert self._server is not None
        return self._server.poll() is not None and not self.processes()

    def _is_ours(self, process: psutil.Process) -> bool:
        """Some processes leave our session, others rewrite their environment: either will do."""
        assert self._server is not None
        assert self._home is not None
        return (
            os.getsid(process.pid) == self._server.pid
            or process.environ().get("XINFERENCE_HOME") == self._home.name
        )

    def _segments(self, name: re.Pattern[str] = PYTHON_SEGMENT) -> set[Path]:
        """Shared-memory segments that our processes have mapped, with names that match `name`."""
        found = set()
        for process in self.processes():
            try:
                mappings = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            for line in mappings.splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SHARED_MEMORY and name.fullmatch(path.name):
                    found.add(path)
        return found

    def _wait(self, what: str, timeout: float, condition: Callable[[], bool]) -> None:
        self._say(f"waiting until {what}")
        if not until(condition, timeout, interval=0.25):
            raise self._error(f"not within {timeout:.0f} s: {what}")

    def _error(self, message: str) -> ClusterError:
        return ClusterError(f"{message} (log: {self.log})")


def _chat_template(folder: Path) -> str:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    template = tokenizer.get("chat_template")
    return template if isinstance(template, str) else "{{ messages[-1]['content'] }}"


def _stop_tokens(config: dict[str, Any]) -> list[int]:
    end: int | Iterable[int] | None = config.get("eos_token_id")
    if end is None:
        return []
    return [end] if isinstance(end, int) else list(end)
