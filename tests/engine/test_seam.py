"""The installed vLLM has everything that we use, in the form in which we use it.

A new version that moves or renames any of it fails here, and not in a user's engine. Differences
among the supported versions are in `engine/compat.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers.attention import kv_transfer_utils
from vllm.v1 import request as vllm_request
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
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
def test_all_abstract_methods_are_implemented(own: type, base_class: type) -> None:
    assert not getattr(own, "__abstractmethods__", frozenset())


@pytest.mark.parametrize(("own", "base_class"), OURS, ids=lambda kind: kind.__name__)
def test_our_methods_have_the_parameters_of_those_they_override(
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
    "get_load_source": 2, "on_reset_flushed": 0,
}  # fmt: skip
"""Our manager methods that some version of vLLM calls, and the number of their arguments."""

INHERITED = {"lock", "take_events", "config_info"}
"""Attributes of a manager that vLLM uses and we inherit."""


def test_we_know_every_method_that_vllm_calls() -> None:
    source = inspect.getsource(scheduler)
    called = set(re.findall(r"self\.manager\.(\w+)", source))
    assert called <= CALLS.keys() | INHERITED
    assert called >= {"lookup", "prepare_load", "prepare_store", "on_schedule_end", "reset_cache"}


@pytest.mark.parametrize("name", CALLS)
def test_each_method_takes_the_arguments_it_gets(name: str) -> None:
    method = inspect.signature(getattr(XavierManager, name))
    required = [p for p in method.parameters.values() if p.default is inspect.Parameter.empty]
    assert len(required) == 1 + CALLS[name]


def test_a_request_has_the_headers_of_its_trace() -> None:
    assert "trace_headers" in parameters(vllm_request.Request.__init__)


def test_the_connector_takes_the_arguments_that_vllm_passes() -> None:
    assert parameters(XavierConnector.__init__) == parameters(OffloadingConnector.__init__)
    assert parameters(XavierConnector.__init__)[1:] == ["vllm_config", "role", "kv_cache_config"]
    assert parameters(build_offloading_config) == ["vllm_config", "kv_cache_config"]
    assert "self.connector_scheduler" in inspect.getsource(OffloadingConnector.__init__)
    assert "self.manager" in inspect.getsource(scheduler.OffloadingConnectorScheduler.__init__)


def test_the_configuration_of_a_spec_has_the_fields_we_read() -> None:
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


def test_vllm_reads_the_chunk_size_that_our_connector_writes() -> None:
    assert '.get("blocks_per_chunk")' in inspect.getsource(build_offloading_config)


def test_the_configuration_of_an_engine_has_the_fields_we_read() -> None:
    """`test_namespace.py` checks their values; this test names a field that is gone."""
    assert field_names(VllmConfig) >= {
        "model_config", "cache_config", "parallel_config", "speculative_config",
        "kv_transfer_config",
    }  # fmt: skip
    assert field_names(KVCacheConfig) >= {"kv_cache_groups"}


def test_caches_and_jobs_have_the_fields_we_read() -> None:
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
    """`HostWorker` relies on it."""
    source = inspect.getsource(worker.OffloadingConnectorWorker.get_finished)
    assert "assert transfer_result.success" in source


def test_vllm_flushes_old_jobs_at_a_reset() -> None:
    """`Jobs` relies on it: once a later job has ended, those from before have."""
    reset = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "self._current_batch_jobs_to_flush.update(self._jobs.keys())" in reset
    flush = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert "self.worker.wait(kv_connector_metadata.jobs_to_flush)" in flush


def test_a_request_s_keys_are_known_before_its_first_lookup() -> None:
    """Otherwise requests would fetch one chunk at a time."""
    context = base.ReqContext(req_id="r")
    assert not compat.key_positions(context)
    keys = [base.make_offload_key(bytes(32), group) for group in range(2)]
    for key in keys:
        context.set_offload_key_position(key, 128)
    assert compat.key_positions(context) == dict.fromkeys(keys, 128)
    assert keys[1][-4:] == (1).to_bytes(4, "big")
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens)
    assert source.index("update_offload_keys") < source.index("_lookup(")


def test_vllm_takes_events_once_per_step() -> None:
    """`XavierConnector.take_events` ends the step."""
    update = inspect.getsource(Scheduler.update_from_output)
    (asks,) = re.findall(
        r"\n(\s+)if self\.connector is not None:\n\s+\w+ = self\.connector\.take_events\(\)", update
    )
    assert asks == 8 * " ", "unconditionally"
    assert "self.connector.take_events()" not in inspect.getsource(Scheduler.schedule)


def test_what_the_connector_leaves_out_does_nothing() -> None:
    """See `XavierConnector.update_connector_output`, `take_events` and `has_connector_metadata`."""
    output = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "assert meta is None\n            meta = OffloadingWorkerMetadata()" in output
    nothing = OffloadingWorkerMetadata()
    assert nothing.transfer_stats.is_empty()
    assert not nothing.completed_jobs
    assert XavierManager.take_events is base.OffloadingManager.take_events
    assert "return ()" in inspect.getsource(base.OffloadingManager.take_events)
    layer = inspect.getsource(kv_transfer_utils.maybe_transfer_kv_layer)
    assert "not connector.has_connector_metadata():\n            return func(" in layer
    for name in ("wait_for_layer_load", "save_kv_layer"):
        assert inspect.getsource(getattr(OffloadingConnector, name)).rstrip().endswith("pass")


def test_a_worker_s_connector_sees_the_jobs_of_each_step_before_vllm_takes_any() -> None:
    """`WorkerSide` counts them in `handle_preemptions`, which both model runners call first."""
    first = {
        "gpu_model_runner": r"\n {8}if has_kv_transfer_group\(\):\n"
        r" {12}kv_connector_metadata = .*\n {12}assert .*\n"
        r" {12}get_kv_transfer_group\(\)\.handle_preemptions\(kv_connector_metadata\)\n",
        "gpu.kv_connector": r"\n {8}self\.kv_connector\."
        r"handle_preemptions\(kv_connector_metadata\)\n"
        r" {8}self\.kv_connector\.bind_connector_metadata\(kv_connector_metadata\)\n",
    }
    for name, calls in first.items():
        spec = importlib.util.find_spec(f"vllm.v1.worker.{name}")
        assert spec is not None
        assert spec.origin is not None
        assert re.search(calls, Path(spec.origin).read_text()), name
    begun = inspect.getsource(worker.OffloadingConnectorWorker.handle_preemptions)
    assert "in self._unsubmitted_store_jobs:" in begun, "also those of the step before"


def test_an_engine_s_process_receives_requests_where_we_look_for_them() -> None:
    """Its thread fills the queue, which is there before connectors are."""
    made = inspect.getsource(EngineCoreProc.__init__)
    queue = made.index("self.input_queue = queue.Queue[")
    assert queue < made.index("super().__init__(")
    receive = inspect.getsource(EngineCoreProc.process_input_sockets)
    assert "self.input_queue.put_nowait((request_type, request))" in receive
    assert "self.connector.on_new_request(request)" in inspect.getsource(Scheduler.add_request)


def test_vllm_s_counters_can_be_increased() -> None:
    stats = OffloadingConnectorStats()
    assert stats.is_empty()
    stats.increase_counter("vllm:xavier_remote_tokens", 3)
    assert not stats.is_empty()


def test_our_region_has_every_attribute_that_vllm_s_worker_reads() -> None:
    taken = parameters(gpu_worker.CPUOffloadingWorker.__init__)
    assert {"kv_caches", "blocks_per_chunk", "num_cpu_chunks", "mmap_region"} <= set(taken)
    read = set(re.findall(r"region\.(\w+)", inspect.getsource(gpu_worker)))
    read.discard("create_next_canonical_view")  # for a layout that our spec never uses
    region = DeviceRegion(Region.create(1, 4096), 0, [4096])
    assert read >= {"is_pinned", "cleanup", "rank", "create_next_worker_view"}
    assert {name for name in read if not hasattr(region, name)} == set()
    region.cleanup()
