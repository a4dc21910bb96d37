"""The installed vLLM offers what we use, in the shape in which we use it.

A new version that moves or renames something of this fails here, and not in somebody's engine.
What differs among the supported versions is in `engine/compat.py`.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace

import pytest
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1 import request as vllm_request
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from xinference_xavier.engine import compat
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.worker.cpu import HostWorker
from xinference_xavier.engine.worker.gpu import DeviceRegion
from xinference_xavier.pool.region import Region

OURS = [
    (XavierManager, base.OffloadingManager),
    (HostWorker, base.OffloadingWorker),
    (XavierSpec, base.OffloadingSpec),
    (XavierConnector, OffloadingConnector),
]
FROM_VLLM_033 = {"expedited"}
"""Parameters that we take although the installed version may not pass them."""


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def field_names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


@pytest.mark.parametrize(("own", "base_class"), OURS, ids=lambda kind: kind.__name__)
def test_nothing_abstract_is_left_open(own: type, base_class: type) -> None:
    assert not getattr(own, "__abstractmethods__", frozenset())


@pytest.mark.parametrize(("own", "base_class"), OURS, ids=lambda kind: kind.__name__)
def test_what_we_override_is_called_with_the_parameters_that_we_take(
    own: type, base_class: type
) -> None:
    for name, method in vars(own).items():
        inherited = getattr(base_class, name, None)
        if name == "__init__" or not inspect.isfunction(method) or inherited is None:
            continue
        taken = [p for p in parameters(method) if p not in FROM_VLLM_033]
        passed = [p for p in parameters(inherited) if p not in FROM_VLLM_033]
        assert taken == passed, f"{own.__name__}.{name}"
    if "expedited" in parameters(base.OffloadingWorker.submit_load):
        assert "expedited" in parameters(HostWorker.submit_load)


CALLS = {
    "lookup": 2, "on_new_request": 1, "on_request_finished": 1, "on_schedule_end": 1,
    "prepare_load": 2, "complete_load": 2, "prepare_store": 2, "complete_store": 2,
    "has_pending_work": 0, "reset_cache": 0, "get_stats": 0, "shutdown": 0,
    "touch": 2, "get_load_source": 2, "on_reset_flushed": 0,
}  # fmt: skip
"""Manager methods of ours that some version of vLLM calls, and with how many arguments."""

INHERITED = {"lock", "take_events", "config_info"}
"""What vLLM uses of a manager and we leave as it is."""


def test_vllm_calls_no_method_that_we_do_not_know() -> None:
    source = inspect.getsource(scheduler)
    called = set(re.findall(r"self\.manager\.(\w+)", source))
    assert called <= CALLS.keys() | INHERITED
    assert called >= {"lookup", "prepare_load", "prepare_store", "on_schedule_end", "reset_cache"}


@pytest.mark.parametrize("name", CALLS)
def test_each_takes_what_it_is_called_with(name: str) -> None:
    method = inspect.signature(getattr(XavierManager, name))
    required = [p for p in method.parameters.values() if p.default is inspect.Parameter.empty]
    assert len(required) == 1 + CALLS[name]


def test_a_request_has_the_headers_of_its_trace() -> None:
    assert "trace_headers" in parameters(vllm_request.Request.__init__)


def test_the_connector_is_made_of_what_vllm_passes() -> None:
    assert parameters(XavierConnector.__init__) == parameters(OffloadingConnector.__init__)
    assert parameters(XavierConnector.__init__)[1:] == ["vllm_config", "role", "kv_cache_config"]
    assert parameters(build_offloading_config) == ["vllm_config", "kv_cache_config"]
    assert "self.connector_scheduler" in inspect.getsource(OffloadingConnector.__init__)
    assert "self.manager" in inspect.getsource(scheduler.OffloadingConnectorScheduler.__init__)


def test_the_configuration_of_a_spec_has_the_fields_that_ours_reads() -> None:
    assert field_names(offload_config.OffloadingConfig) >= {
        "groups", "worker_kv_bytes_per_block", "extra_config", "engine_id", "parallel", "cache",
        "replicated_layout",
    }  # fmt: skip
    assert field_names(offload_config.OffloadingGroupConfig) >= {"tokens_per_block"}
    assert field_names(offload_config.OffloadingCacheConfig) >= {"blocks_per_chunk"}
    assert field_names(offload_config.OffloadingParallelConfig) >= {"rank", "world_size"}
    made = set(re.findall(r"self\.(\w+)", inspect.getsource(base.OffloadingSpec.__init__)))
    assert made >= {
        "config", "extra_config", "tokens_per_block", "blocks_per_chunk", "replicated_layout"
    }  # fmt: skip


def test_the_chunk_size_is_taken_from_the_entry_that_our_connector_writes() -> None:
    assert '.get("blocks_per_chunk")' in inspect.getsource(build_offloading_config)


def test_the_configuration_of_an_engine_has_what_the_namespace_reads() -> None:
    """Values are in the tests of `identity`; this names what is gone."""
    assert field_names(VllmConfig) >= {
        "model_config", "cache_config", "parallel_config", "speculative_config",
        "kv_transfer_config",
    }  # fmt: skip
    assert field_names(KVCacheConfig) >= {"kv_cache_groups"}


def test_caches_and_jobs_have_the_fields_that_our_worker_reads() -> None:
    assert field_names(base.CanonicalKVCaches) >= {"tensors", "group_data_refs"}
    assert field_names(base.CanonicalKVCacheTensor) >= {"tensor", "page_size_bytes"}
    assert field_names(base.CanonicalKVCacheRef) >= {"tensor_idx", "page_size_bytes"}
    result = base.TransferResult(1, True, 2, 3.0)
    assert (result.job_id, result.success) == (1, True)
    assert (result.transfer_size, result.transfer_time) == (2, 3.0)
    gpu = base.GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[5])
    assert (gpu.block_ids.tolist(), gpu.group_sizes, gpu.block_indices) == ([1, 2], [2], [5])
    assert isinstance(CPULoadStoreSpec([1]), base.BlockIDsLoadStoreSpec)


def test_a_failed_job_ends_the_engine() -> None:
    """Our worker counts on it: see `HostWorker`."""
    source = inspect.getsource(worker.OffloadingConnectorWorker.get_finished)
    assert "assert transfer_result.success" in source


def test_vllm_flushes_old_jobs_at_a_reset() -> None:
    """The manager counts on it: once a later job is complete, those from before are."""
    reset = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "self._current_batch_jobs_to_flush.update(self._jobs.keys())" in reset
    flush = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert "self.worker.wait(kv_connector_metadata.jobs_to_flush)" in flush


def test_the_keys_of_a_request_are_known_before_its_first_lookup() -> None:
    """If they were kept elsewhere, requests would ask for one chunk at a time."""
    context = base.ReqContext(req_id="r")
    groups = [[base.make_offload_key(bytes(32), group)] for group in range(2)]
    status = SimpleNamespace(
        req_context=context, group_states=[SimpleNamespace(offload_keys=keys) for keys in groups]
    )
    compat.record_keys(SimpleNamespace(_req_status={"r": status}), "r")  # type: ignore[arg-type]
    record = getattr(context, "set_offload_key_position", None)
    if record is not None:  # from 0.31 on by vLLM itself
        assert compat.known_keys(context) == []
        for (key,) in groups:
            record(key, 128)
    assert compat.known_keys(context) == [key for (key,) in groups]
    assert base.make_offload_key(b"hash", 7)[-4:] == (7).to_bytes(4, "big")


def test_where_the_keys_of_a_request_are_kept() -> None:
    made = inspect.getsource(scheduler.RequestOffloadState)
    assert {"req_context", "group_states"} <= set(re.findall(r"(?:self\.)?(\w+)[:=]? ", made))
    assert "offload_keys" in inspect.getsource(scheduler.RequestGroupState)
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens)
    assert "self._req_status[request.request_id]" in source


def test_vllm_asks_for_events_once_for_each_step() -> None:
    """That ends the step: see `XavierConnector.take_events`."""
    update = inspect.getsource(Scheduler.update_from_output)
    (asks,) = re.findall(
        r"\n(\s+)if self\.connector is not None:\n\s+\w+ = self\.connector\.take_events\(\)", update
    )
    assert asks == 8 * " ", "unconditionally"
    assert "self.connector.take_events()" not in inspect.getsource(Scheduler.schedule)


@pytest.mark.process
def test_the_first_hash_of_a_chain_is_the_same_in_every_process() -> None:
    program = (
        "import os\n"
        "os.environ.pop('PYTHONHASHSEED', None)\n"
        "from vllm.utils.hashing import get_hash_fn_by_name\n"
        "from vllm.v1.core import kv_cache_utils\n"
        "from xinference_xavier.engine import compat\n"
        "compat.hash_seed('sha256')\n"
        "kv_cache_utils.init_none_hash(get_hash_fn_by_name('sha256'))\n"
        "print('first', kv_cache_utils.NONE_HASH.hex())\n"
    )
    firsts = set()
    for _ in range(2):
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        firsts.update(re.findall(r"^first (\w+)$", told.stdout, re.MULTILINE))
    assert len(firsts) == 1


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_hash_that_can_collide_keeps_its_secret_beginning(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert compat.hash_seed(algorithm) is None


def test_what_a_version_lacks_is_told_apart() -> None:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert not compat.keeps_cache_in_host_memory(cache)
    assert compat.cache_layout(CacheConfig()) is None
    group = SimpleNamespace(tokens_per_block=16)
    assert compat.group_number(group, 3) == 3  # type: ignore[arg-type]
    group.group_id = 5
    assert compat.group_number(group, 3) == 5  # type: ignore[arg-type]


def test_statistics_count_up() -> None:
    stats = OffloadingConnectorStats()
    assert stats.is_empty()
    stats.increase_counter("vllm:xavier_remote_tokens", 3)
    assert not stats.is_empty()


def test_the_worker_for_devices_takes_our_region_and_reads_nothing_that_it_lacks() -> None:
    taken = parameters(gpu_worker.CPUOffloadingWorker.__init__)
    assert {"kv_caches", "blocks_per_chunk", "mmap_region"} <= set(taken)
    assert len({"num_cpu_chunks", "num_cpu_blocks"} & set(taken)) == 1
    read = set(re.findall(r"region\.(\w+)", inspect.getsource(gpu_worker)))
    read.discard("create_next_canonical_view")  # of a layout that our spec never asks for
    region = DeviceRegion(Region.create(1, 4096), 0, 4096)
    assert read >= {"is_pinned", "cleanup", "rank"}
    assert read & {"create_next_worker_view", "create_next_view"}
    assert {name for name in read if not hasattr(region, name)} == set()
    region.cleanup()
