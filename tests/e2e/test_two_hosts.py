"""`examples/two_hosts.sh` on two hosts whose firewalls admit only the ports that it names."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from examples import long_document_questions
from examples.local_cluster import START_TIMEOUT, STOP_TIMEOUT, Leftovers
from tests.e2e.conftest import ROOT
from tests.e2e.model import Model
from tests.harness.clusters import PROGRAMS, REST_PORT, SUPERVISOR, WORKER_PORT, HostCluster
from tests.harness.hosts import Admitted, Hosts

pytestmark = pytest.mark.long

SCRIPT = ROOT / "examples" / "two_hosts.sh"
FIRST, SECOND = SUPERVISOR, "second"
EPHEMERAL = (32768, 60999)


class ScriptCluster(HostCluster):
    """The script starts everything on each host."""

    def _start_servers(self, home: Path) -> None:
        first, second = (self._hosts.address(name) for name in (FIRST, SECOND))
        self._server = self._run(FIRST, SCRIPT, ["first", first])
        self._wait("the supervisor answers", START_TIMEOUT, self._answers)
        self._workers[SECOND] = self._run(SECOND, SCRIPT, ["second", second, first])
        self._wait_for_workers()

    def stop(self) -> Leftovers:
        """Stop the second machine first, because an xinference worker waits long for a lost
        supervisor."""
        for script in self._workers.values():
            script.terminate()
            with suppress(subprocess.TimeoutExpired):  # it then counts as a leftover
                script.wait(STOP_TIMEOUT)
        return super().stop()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(FIRST, SECOND) as hosts:
        first, second = hosts.address(FIRST), hosts.address(SECOND)
        people = [Admitted(hosts.our_address, REST_PORT, REST_PORT)]
        into_first = [Admitted(second, REST_PORT, WORKER_PORT), Admitted(second, *EPHEMERAL)]
        hosts.admit_only(FIRST, people + into_first)
        into_second = [(WORKER_PORT, WORKER_PORT), EPHEMERAL]
        hosts.admit_only(SECOND, [Admitted(first, *ports) for ports in into_second])
        yield hosts


@pytest.fixture
def model(hosts: Hosts, model_folder: Path) -> Iterator[Model]:
    # As on any machine: the programs are in PATH, and only the script names the extension.
    environment = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "XINFERENCE_EXTENSIONS": ""}
    log = ROOT / "build" / "test-two-hosts.log"
    workers = (FIRST, SECOND)
    with ScriptCluster(log, hosts, workers=workers, environment=environment) as cluster:
        cluster.register(model_folder, "small")
        model = Model(cluster, "two-hosts")
        model.launch(xavier_host=f"{hosts.address(FIRST)}/24")  # the network of both
        yield model


def test_a_document_that_one_has_read_the_other_copies(
    model: Model, hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {each["address"].rpartition(":")[0] for each in model.replicas().values()}
    assert found == {hosts.address(FIRST), hosts.address(SECOND)}
    words = f"--endpoint {model.endpoint} --model {model.uid} --max-tokens 4"
    long_document_questions.main(f"{words} --documents 1 --rows 40 --questions 2".split())
    shown = re.findall(r" s to the first token, .* ([\d,]+) remote, ", capsys.readouterr().out)
    computed, copied = (int(tokens.replace(",", "")) for tokens in shown)
    assert computed == 0
    assert copied > 1000
    doctor = [PROGRAMS / "xinference-xavier", "doctor", "--endpoint", model.endpoint]
    done = subprocess.run(doctor, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # it could look, whatever it found
