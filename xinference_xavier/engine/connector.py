"""vLLM's offloading connector, which passes on what a manager cannot see.

vLLM makes one in the scheduler's process, before its KV cache manager, and one in each worker,
before its KV caches. vLLM's own class would make a spec from nothing but a summary of its two
configurations. Ours is made from `EngineFacts`, and a worker's also from its KV caches. A manager
does not see how many of a request's tokens vLLM's own prefix cache served.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ScheduleEndContext
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from xinference_xavier import vllm_versions
from xinference_xavier.engine import compat
from xinference_xavier.engine.facts import EngineFacts, xavier_config
from xinference_xavier.engine.guard import SchedulerErrors, guarded, nothing
from xinference_xavier.engine.keys import stores_whole_chunks
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.process import log_like_vllm
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.unsupported import refuse_unsupported
from xinference_xavier.engine.worker_side import WorkerSide
from xinference_xavier.engine.workload import drop_unchanged_requests, is_steady_decode, step_of

logger = logging.getLogger(__name__)

_NO_CHANGES = ScheduleEndContext([], ())


class XavierConnector(WorkerSide):
    errors: SchedulerErrors

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        log_like_vllm()
        config = xavier_config(vllm_config)
        vllm_versions.check(vllm.__version__, config.untested_vllm)
        refuse_unsupported(vllm_config)
        self._facts = EngineFacts.read(config, vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked = False  # vLLM's scheduler, since it built metadata
        self._is_reset = False  # and nothing was scheduled since
        self._reset_is_due = False  # of vLLM's own prefix cache, which it refused
        self._unflushed_steps: int | None = None
        """Steps that have to end until no job from before the latest reset is under way."""
        self._counted = False  # something, since the latest stats
        self._closing = ExitStack()
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = OffloadingConnectorScheduler(
                self._spec(), vllm_config, kv_cache_config
            )
            manager = self.connector_scheduler.manager
            assert isinstance(manager, XavierManager)
            self._manager, self._steps, self._workload = manager, manager.steps, manager.workload
            self.errors = manager.errors
            compat.watch_engine(
                add_lora=manager.adapters.load,
                collective_rpc=self._call_workers,
                set_weight_version=self._name_weights,
            )
            if vllm_versions.is_newer(vllm.__version__):
                logger.warning("sharing was never tested with this vLLM: vllm=%s", vllm.__version__)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        # vLLM does not tell its connector, unless it is asked to. But who resets the prefix cache
        # has perhaps changed the weights, and our rows are of the old ones.
        kv_cache_manager.reset_prefix_cache = self._reset_both  # type: ignore[method-assign]

    @property
    def _cache(self) -> KVCacheManager:
        """vLLM makes it after the connector, and binds it before the first request."""
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager

    def _reset_own(self) -> bool:
        done = KVCacheManager.reset_prefix_cache(self._cache)
        self._reset_is_due = not done
        self._manager.on_prefix_cache_reset(done)
        return done

    def _reset_both(self) -> bool:
        done = self._reset_own()
        self.reset_cache()
        return done

    def _call_workers(
        self, call: Callable[..., Any], method: object, *args: Any, **kwargs: Any
    ) -> Any:
        """The workers may get other weights while vLLM keeps its cache, as some want it to."""
        if str(method) not in compat.READING_CALLS:
            self._leave_weights(f"collective_rpc of {getattr(method, '__name__', method)}")
        return call(method, *args, **kwargs)

    def _name_weights(self, call: Callable[[str], None], weight_version: str) -> None:
        """Whoever names the weights has perhaps changed them unseen."""
        self._leave_weights(f"set_weight_version to {weight_version}")
        call(weight_version)
        self._manager.rejoin(weight_version)

    def _leave_weights(self, cause: str) -> None:
        if not self._is_reset:  # else it is one more call of many for one change
            logger.info("weights may have changed, so the pool is emptied: cause=%s", cause)
        self._manager.on_weights_changed()
        self.reset_cache()

    def _spec(self, layers: Mapping[str, torch.Tensor] = {}) -> XavierSpec:
        """The spec of one side: `layers` are a worker's KV caches."""
        kind = OffloadingSpecFactory.get_spec_cls(self._facts.offloading.extra_config)
        assert issubclass(kind, XavierSpec)
        spec = kind(self._facts, layers)
        self._closing.callback(spec.close)
        return spec

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM calls this once, before a worker's first step."""
        self.connector_worker = OffloadingConnectorWorker(
            self._spec(kv_caches), self._vllm_config, self._kv_cache_config
        )
        super().register_kv_caches(kv_caches)

    def shutdown(self) -> None:
        super().shutdown()
        self._closing.close()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._asked = True
        begun = self._manager.begin_lookups(
            request.request_id,
            num_computed_tokens,
            request.lora_request,
            request.cache_salt,
            # vLLM's keys do not say which positions of a mixed prompt are embeddings.
            ambiguous=request.prompt_is_token_ids is not None,
            reuses_parts=self._cache.coordinator.enable_partial_hash_hits,
        )
        self._found(request, num_computed_tokens)
        if not begun:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    @guarded(nothing)
    def _found(self, request: Request, num_computed_tokens: int) -> None:
        self._workload.found(request.request_id, request.num_tokens, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._asked = True
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        only_tokens = (
            request.lora_request is None
            and request.prompt_embeds is None
            and not request.mm_features
        )
        self._manager.count_prompt(
            request.request_id,
            request.num_prompt_tokens,
            num_external_tokens,
            request.prompt_token_ids if only_tokens else None,
        )
        self._scheduled(request)

    @guarded(nothing)
    def _scheduled(self, request: Request) -> None:
        own = self._manager.requests[request.request_id]
        self._manager.first_tokens.scheduled(request, own)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._is_reset = False
        asked, self._asked = self._asked, False
        if asked or not is_steady_decode(scheduler_output):
            self._counted = True
            metadata = super().build_connector_meta(drop_unchanged_requests(scheduler_output))
            assert isinstance(metadata, OffloadingConnectorMetadata)
            for job_id, job in metadata.store_jobs.items():
                self._check_store(job_id, job)
        else:
            metadata = OffloadingConnectorMetadata({}, {})
            if self._manager.pass_end_is_due:
                self._manager.on_schedule_end(_NO_CHANGES)
        self._begin_step(scheduler_output)
        if self._reset_is_due and not self._manager.requests:
            # vLLM refused it while blocks were in use.
            self._reset_own()
        if not scheduler_output.total_num_scheduled_tokens:
            self._manager.wait_if_idle()
        return metadata

    @guarded(nothing)
    def _begin_step(self, scheduler_output: SchedulerOutput) -> None:
        step = step_of(scheduler_output, time.monotonic())
        self._steps.begin(step)
        self._workload.retention.wrote(step.tokens)

    def _check_store(self, job_id: int, job: TransferJob) -> None:
        """Void a store of chunks that miss blocks, in which the blocks behind them move up.

        vLLM leaves out blocks behind a sliding window that it has given to other requests.
        """
        assert self.connector_scheduler is not None
        assert isinstance(job.src_spec, GPULoadStoreSpec)
        keys = self.connector_scheduler._jobs[job_id].keys
        specs = {number: group.kv_cache_spec for number, group in self._facts.groups.items()}
        if not stores_whole_chunks(job.src_spec, keys, specs, self._facts.blocks_per_chunk):
            self._manager.void_store(job.req_id, keys)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._finished(request)
        return super().request_finished_all_groups(request, block_ids)

    @guarded(nothing)
    def _finished(self, request: Request) -> None:
        """An answer that ends with a text counts as aborted: only vLLM's API process sees it."""
        if request.get_finished_reason() not in (FinishReason.ABORT, FinishReason.ERROR):
            self._workload.answered(request.request_id, request.num_output_tokens)

    def reset_cache(self) -> bool | None:
        if self._is_reset:  # vLLM has nothing new to forget; but rows may have come from peers
            self._manager.reset_cache()
            return True
        self._asked = self._is_reset = True
        self._unflushed_steps = len(self._steps) + 1
        return super().reset_cache()

    @guarded(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """End the step: vLLM calls this once per step, when it has the step's output. It has events
        of its own blocks; the pool has none."""
        free_blocks = self._cache.block_pool.get_num_free_blocks()
        self._workload.blocks_freed(free_blocks * self._facts.block_tokens)
        ended = self._steps.end(time.monotonic())
        if self._unflushed_steps is not None and ended is not None:
            self._unflushed_steps -= 1
            # A step begins with the flush. One that computes has begun on all workers.
            if self._unflushed_steps <= 0 and ended[0].tokens:
                self._unflushed_steps = None
                self._manager.on_reset_flushed()
        self._manager.first_tokens.step_ended()
        return ()

    # -- where nothing is to be done, vLLM's own methods take their time to find that out ----------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            self._counted = True
            super().update_connector_output(connector_output)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counted, self._counted = self._counted, False
        return super().get_kv_connector_stats() if counted else None
