"""One safeguard at a time is switched off: the harness must notice and name the damage.

Each run is rich in the faults that the safeguard is for, and ends as soon as something is wrong.
"""

import pytest

from tests.chaos.mutations import Mutation
from tests.chaos.near import AUTO
from tests.chaos.run import run

pytestmark = pytest.mark.long

SEED = 1
SECONDS = 30.0
POOLS = {"n0": 48, "n1": 96, "n2": 48}
"""Fewer and smaller replicas than usual, so that rows come and go quickly."""

CASES = {
    Mutation.CHECKSUM: (["damaged row", "swapped rows"], "wrong bytes"),
    Mutation.QUARANTINE: (["late bytes"], "wrong bytes"),
    Mutation.PIN: (["donor is slow"], "rows arrived damaged"),
    Mutation.CANARY: (["rows of other weights"], "wrong"),
    Mutation.FIRM: (["donor is slow"], "chunks of hard names were evicted"),
    Mutation.LOAN: (["replica reset while it borrows"], "wrong bytes"),
}


@pytest.mark.parametrize("mutation", list(Mutation))
def test_a_run_without_the_safeguard_fails_and_names_the_damage(mutation: Mutation) -> None:
    kinds, said = CASES[mutation]
    transport = AUTO if mutation is Mutation.LOAN else "gloo"
    report = run(SEED, SECONDS, only=kinds, mutation=mutation, pools=POOLS, transport=transport)
    assert any(said in failure for failure in report.failures()), report.failures()
