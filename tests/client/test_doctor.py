"""`doctor` in real clusters; `test_findings.py` has each kind of problem."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from tests.harness.api import ApiProcess, Pair
from tests.harness.replicas import MODEL, ReplicaProcess, wait_until
from xinference_xavier import __version__
from xinference_xavier.cli.commands import main
from xinference_xavier.client import XavierClient
from xinference_xavier.client.doctor import Finding
from xinference_xavier.runtime.net import local_host_towards

pytestmark = pytest.mark.process

REFUSING = "tests.transfer.no_transport:NoTransport"
INGREDIENTS = {"dtype": "float32", "weights": "the same"}


class Result(NamedTuple):
    exit_code: int
    findings: list[Finding]
    output: str

    def finds(self, where: str, problem: str, remedy: str, *, grave: bool = True) -> None:
        """Exactly one finding matches."""
        found = [each for each in self.findings if problem in each.problem and where in each.where]
        assert len(found) == 1, f"{len(found)} findings of {problem!r} at {where!r} in {self}"
        assert remedy in found[0].remedy
        assert found[0].grave is grave
        assert self.exit_code == 1


def diagnose(endpoint: str) -> Result:
    answer = CliRunner().invoke(main, ["doctor", "-e", endpoint, "--json"])
    assert answer.exit_code in (0, 1), answer.output
    return Result(
        answer.exit_code, [Finding(**each) for each in json.loads(answer.output)], answer.output
    )


def test_nothing_is_wrong_with_a_healthy_pair(pair: Pair) -> None:
    """The second look comes after the self-checks of the first."""
    for _ in range(2):
        # Only the small pools of the test replicas are remarked on.
        assert [each for each in diagnose(pair.api.endpoint).findings if each.grave] == []
    with XavierClient(pair.api.endpoint) as client:
        facts = client.cluster()
    self_checks = facts["models"][MODEL]["self_checks"]
    assert self_checks["first"]["peers"] == {"second": None}
    assert self_checks["first"]["linked_to"] == {"second": "gloo"}, "as they were told"
    assert self_checks["first"]["obstacles"] == {"second": {}}
    assert facts["supervisor"]["versions"]["xinference-xavier"] == __version__
    wait_until(lambda: pair.second.transfer_stats()["links"] == 2, "the links it tried stay open")


# -- replicas: one cluster, each replica with problems of its own ----------------------------


@pytest.fixture(scope="module")
def planted() -> Iterator[Result]:
    """
    well       has a small pool, and an address that other hosts can reach
    mute       its transport makes no links, in either direction
    foreign    has another dtype
    crippled   its transfer process does not start
    """
    with ApiProcess() as api, ExitStack() as stack:

        def start(name: str, transport: str = "gloo", **options: object) -> ReplicaProcess:
            options = {"fingerprint_fields": INGREDIENTS, **options}
            replica = ReplicaProcess(name, api.address, transport=transport, **options)
            return stack.enter_context(replica)

        own = local_host_towards("192.0.2.1:1")
        assert own != "127.0.0.1", "this machine has only the loopback address"
        started = [
            start("well", host=own, rows=16),
            start("mute", REFUSING, rows=64),
            start("crippled", "nowhere:Transport", rows=64),
        ]
        foreign = start(
            "foreign",
            rows=64,
            namespace="another",
            fingerprint_fields={**INGREDIENTS, "dtype": "bfloat16"},
        )
        for replica in (started[0], started[1], foreign):
            wait_until(replica.is_up, f"{replica.name} is up")
        wait_until(lambda: started[2].stats()["transfer_restarts"] > 0, "a restart was tried")
        yield diagnose(api.endpoint)


@pytest.mark.parametrize(
    ("replica", "problem", "remedy", "grave"),
    [
        ("foreign", "other hosts cannot reach its address", "xinference-worker -H", True),
        ("mute", "other hosts cannot reach its address", "xinference-worker -H", True),
        ("mute", "cannot fetch from well: no link", "iptables", True),
        ("crippled", "other hosts cannot reach its address", "xinference-worker -H", True),
        ("crippled", "has no transfer process after", "--xavier_transport", True),
        ("well", "cannot fetch from mute: no link", "--xavier_port_range", True),
        ("well", "cannot fetch from crippled: it has no transfer", "", True),
        ("well", "its pool holds only 16 chunks", "--xavier_pool_bytes", False),
    ],
)
def test_each_problem_of_a_replica_is_found(
    planted: Result, replica: str, problem: str, remedy: str, grave: bool
) -> None:
    planted.finds(f"replica {replica}", problem, remedy, grave=grave)


def test_replicas_in_two_namespaces_and_the_field_that_differs(planted: Result) -> None:
    found = [each for each in planted.findings if "they differ in dtype (" in each.problem]
    assert len(found) == 1
    assert "weights" not in found[0].problem
    assert "launch all replicas with the same arguments" in found[0].remedy
