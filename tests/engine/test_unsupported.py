"""An engine that sharing cannot serve is refused by name when it starts."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import vllm.config

from tests.engine.vllm_scheduler import engine_config
from xinference_xavier.engine.unsupported import NEEDS_MORE_THAN_ROWS, refuse_unsupported
from xinference_xavier.errors import ConfigError


def test_one_replica_over_several_hosts(model_folder: Path) -> None:
    config = engine_config(model_folder)
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match=r"nnodes=2 .* use one host per replica"):
        refuse_unsupported(config)


def test_keys_that_no_other_process_computes(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = engine_config(model_folder)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ConfigError, match=r"'xxhash' has a random seed .* use sha256, or set"):
        refuse_unsupported(config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    refuse_unsupported(config)


@pytest.mark.parametrize("path", NEEDS_MORE_THAN_ROWS)
def test_a_feature_with_a_state_of_its_own_for_each_block(model_folder: Path, path: str) -> None:
    config = engine_config(model_folder)
    part, _, name = path.rpartition(".")
    object.__setattr__(attrgetter(part)(config), name, True)  # this machine cannot have all
    with pytest.raises(ConfigError, match=f"{name}=True .* leave it out"):
        refuse_unsupported(config)


NO_STATE_FOR_EACH_BLOCK = """
AttentionConfig: disable_flashinfer_q_quantization indexer_sparse_logits minimax_m3_indexer_cp
    sparse_mla_force_mqa use_non_causal use_prefill_query_quantization use_trtllm_attention
CacheConfig: _block_size_resolved enable_mamba_shared_prefix_checkpoint enable_prefix_caching
    is_attention_free kv_sharing_fast_prefill swa_bounded_replay use_kda_recoverssm use_replayssm
    user_specified_block_size user_specified_mamba_block_size
EngramConfig: cpu_offload dp_shared_memory embedding_across_dp use_thp
HiSparseConfig: eager_host_mirror
KVEventsConfig: enable_kv_cache_events
KVTransferConfig: enable_permute_local_kv
LoRAConfig: enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
    fully_sharded_loras specialize_active_lora
MambaConfig: enable_stochastic_rounding
ModelConfig: allow_deprecated_quantization disable_cascade_attn disable_sliding_window
    enable_cumem_allocator enable_mm_embeds enable_nccl_comm_suspend enable_prompt_embeds
    enable_sleep_mode enable_trace_replay enforce_eager hf_token is_submodel_config
    multimodal_config pooler_config quantization_config return_sampling_mask skip_tokenizer_init
    sleep_mode_offload_cudagraph trust_remote_code use_fp64_gumbel
    word_embeddings_untied_by_checkpoint
MultiModalConfig: allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings
    language_model_only mm_device_do_normalize mm_encoder_only skip_mm_profiling
ParallelConfig: _allow_auto_resolve_cp_interleave_size data_parallel_external_lb
    data_parallel_hybrid_lb dcp_q_replicate disable_custom_all_reduce
    disable_nccl_for_dp_synchronization enable_batch_sharded_sampling enable_dbo enable_elastic_ep
    enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance enable_hc_sp
    enable_shm_tensor_arena is_moe_model numa_bind ray_workers_use_nsight
PoolerConfig: enable_chunked_processing enable_flash_late_interaction use_activation
ReasoningConfig: _enabled
SchedulerConfig: async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
    enable_chunked_prefill is_encoder_decoder is_multimodal_model
    long_prefill_token_threshold_adaptive scheduler_reserve_full_isl
SpeculativeConfig: disable_eagle_block_drop disable_lookahead_block_hashes
    disable_padded_drafter_batch draft_load_config draft_model_config draft_parallel_config
    enable_adaptive_verification enforce_eager index_share_for_mtp_iteration parallel_drafting
    target_model_config target_parallel_config use_heterogeneous_vocab use_local_argmax_reduction
VllmConfig: diffusion_config ec_transfer_config engram_config kv_events_config kv_transfer_config
    lora_config quant_config reasoning_config speculative_config watermark_config
    weight_transfer_config
"""
NOT_ABOUT_THE_CACHE = """
CompilationConfig DeviceConfig DiffusionConfig DynamicShapesConfig ECTransferConfig EPLBConfig
KernelConfig LoadConfig LoggingConfig ModelArchitectureConfig ObservabilityConfig OffloadConfig
PassConfig PrefetchOffloadConfig ProfilerConfig StructuredOutputsConfig UVAOffloadConfig
WatchdogConfig WatermarkConfig WeightTransferConfig
"""


def switches() -> Iterator[tuple[str, str]]:
    """Each class of vLLM's configuration with the names of what can be on or off: truth values, and
    parts that are None without a feature."""
    for module in pkgutil.iter_modules(vllm.config.__path__):
        for part in vars(importlib.import_module(f"vllm.config.{module.name}")).values():
            if not (isinstance(part, type) and dataclasses.is_dataclass(part)):
                continue
            if not part.__name__.endswith("Config"):
                continue
            hints = typing.get_type_hints(part)
            for field in dataclasses.fields(part):
                kinds = {hints[field.name], *typing.get_args(hints[field.name])}
                parts = any(map(dataclasses.is_dataclass, kinds)) and type(None) in kinds
                if bool in kinds or parts:
                    yield part.__name__, field.name


def test_every_switch_of_vllm_is_known() -> None:
    """Think about a new one: if its feature needs more for a block than the KV cache, it must be
    refused."""
    parts = (part.split(":") for part in NO_STATE_FOR_EACH_BLOCK.replace("\n    ", " ").split("\n"))
    known = {(part, name) for part, *names in parts for name in " ".join(names).split()}
    refused = {path.rpartition(".")[2] for path in NEEDS_MORE_THAN_ROWS}
    new = {
        f"{part}.{name}"
        for part, name in switches()
        if part not in NOT_ABOUT_THE_CACHE.split()
        and name not in refused
        and (part, name) not in known
    }
    assert new == set()
