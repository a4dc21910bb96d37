"""Engines of several processes, several models, and the networks between them."""

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.processes import vllms_own_segments_removed
from tests.harness.remote import RemoteError
from tests.harness.replicas import DEADLINE, TrackerProcess, replicas, stored
from tests.models.architectures import make
from tests.models.sharing import (
    FIRST,
    PLAIN,
    SECOND,
    TOLERANCE,
    Engines,
    difference,
    kind,
    whole_chunks,
)
from xinference_xavier.runtime.addresses import split_address

pytestmark = pytest.mark.process

PROMPT = 1000
TWO_WORKERS = kind(
    {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with vllms_own_segments_removed():
        yield


def test_tensor_parallel_engines_share_with_their_like_only(llama: Path) -> None:
    """The third engine has one worker, whose pages hold twice as many heads."""
    kinds = {FIRST: TWO_WORKERS, SECOND: TWO_WORKERS, "alone": kind()}
    with Engines(kinds, model=llama) as engines:
        prompt = engines.prompts.fresh(PROMPT)
        first = engines.ask(FIRST, prompt)
        engines.settle()
        second = engines.ask(SECOND, prompt)
        cold = engines.ask("alone", prompt)
        assert second[0].cached == engines.hits(SECOND)["remote"] == whole_chunks(PROMPT)
        assert (cold[0].cached, engines.hits("alone")["remote"]) == (0, 0)
        assert max(difference(cold, answer) for answer in (first, second)) < TOLERANCE
        namespaces = {name: each["namespace"] for name, each in engines.replicas().items()}
        assert namespaces[FIRST] == namespaces[SECOND] != namespaces["alone"]


class Ranks(Engines):
    """Engines with two data-parallel ranks each, which join under names of their own."""

    def _have_joined(self) -> bool:
        joined = [each["stats"].get("transfer_pid") for each in self.replicas().values()]
        return len(joined) == 2 and all(joined)


def test_data_parallel_ranks_share_with_each_other(llama: Path) -> None:
    options = {"pool_bytes": 16 << 20}
    like = kind({"data_parallel_size": 2}, options, environment={"XINFERENCE_MODEL_UID": "rep0"})
    with Ranks({"engine": like}, model=llama) as engines:
        assert set(engines.replicas()) == {"engine_dp0", "engine_dp1"}
        names = {replica["replica"] for replica in engines.replicas().values()}
        assert names == {"rep0_dp0", "rep0_dp1"}
        for name in engines.replicas():
            pool = engines.stats(name)["pool"]
            assert pool["rows"] * pool["row_bytes"] <= options["pool_bytes"]
        prompt = engines.prompts.fresh(PROMPT)
        first = engines.ask("engine", prompt, rank=0)
        engines.settle()
        second = engines.ask("engine", prompt, rank=1)
        assert second[0].cached == engines.hits("engine_dp1")["remote"] == whole_chunks(PROMPT)
        assert difference(first, second) < TOLERANCE


@pytest.mark.long
def test_vllm_itself_fails_with_pipeline_parallelism(llama: Path) -> None:
    """It fails on the CPU platform without this package. Once this test fails, support it."""
    arguments = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    like = kind(arguments, environment=TWO_WORKERS.environment)._replace(transport=None)
    with pytest.raises(RemoteError), Engines({PLAIN: like}, model=llama) as engines:
        engines.ask(PLAIN, engines.prompts.fresh(PROMPT))


@pytest.mark.long
def test_two_models_at_once(llama: Path, tmp_path: Path) -> None:
    """Both have one tracker and the same prompt."""
    other = make("tied", tmp_path / "tied")
    kinds = {FIRST: kind(), SECOND: kind()}
    kinds |= {f"other {name}": kind({"model": str(other)}) for name in (FIRST, SECOND)}
    with Engines(kinds, model=llama) as engines:
        prompt = engines.prompts.fresh(PROMPT)
        answers = {}
        for name in kinds:
            answers[name] = engines.ask(name, prompt)
            engines.settle()
        remote = {name: engines.hits(name)["remote"] for name in kinds}
        whole = whole_chunks(PROMPT)
        assert remote == {FIRST: 0, SECOND: whole, "other first": 0, "other second": whole}
        assert difference(answers[FIRST], answers[SECOND]) < TOLERANCE
        assert difference(answers["other first"], answers["other second"]) < TOLERANCE
        assert difference(answers[FIRST], answers["other first"]) > 100 * TOLERANCE


def test_engines_that_meet_over_ipv6(llama: Path) -> None:
    like = kind(transport="gloo")
    with Engines({FIRST: like, SECOND: like}, model=llama, host="::1") as engines:
        prompt = engines.prompts.fresh(PROMPT)
        engines.ask(FIRST, prompt)
        engines.settle()
        assert engines.ask(SECOND, prompt)[0].cached == whole_chunks(PROMPT)
        addresses = [replica["address"] for replica in engines.replicas().values()]
        assert {split_address(address)[0] for address in addresses} == {"::1"}


def interfaces() -> list[tuple[str, str]]:
    """The addresses of all interfaces, each with a network that contains only it."""
    return [
        (address.address, f"{address.address}/{32 if address.family is socket.AF_INET else 128}")
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]


def test_a_host_with_several_interfaces_uses_the_one_in_the_network(
    tracker_process: TrackerProcess,
) -> None:
    found = interfaces()
    assert len(found) > 1
    for address, network in found:
        both = {f"donor at {address}": "gloo", f"consumer at {address}": "gloo"}
        with replicas(tracker_process.address, both, host=network) as (donor, consumer):
            keys = stored(consumer, donor, count=4)
            assert split_address(consumer.address(donor.name))[0] == address
            assert consumer.fetch(donor.name, keys, DEADLINE).committed == len(keys)
            assert consumer.wrong_rows() == []
