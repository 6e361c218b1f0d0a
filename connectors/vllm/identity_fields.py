"""Every field of vLLM 0.32's configuration: what it changes in a block, if anything.

One table per section. `content`: the value itself goes into the namespace. `elsewhere`: content
too, but another part of the namespace (or the key) holds its effective value; the table says which.
`instance`: of the process, never of a block; it may differ between engines that share blocks.
What only changes the order in which a kernel adds up numbers counts as instance: so does the batch
that a prompt happens to be in. A test fails for a field that is in no list, or in a list only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Fields:
    """The fields of one section, by what they are."""

    content: tuple[str, ...]
    elsewhere: dict[str, str]  # by field: the part that covers it
    instance: tuple[str, ...]


def _section(content: str = "", *, instance: str = "", **elsewhere: str) -> Fields:
    """`elsewhere`: by part, the names of the fields that it covers."""
    covered = {name: part for part, names in elsewhere.items() for name in names.split()}
    return Fields(tuple(content.split()), covered, tuple(instance.split()))


# Environment variables of vLLM that change stored bytes or what is multiplied.
CONTENT_ENVIRONMENT = (
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
)

SECTIONS: dict[str, Fields] = {
    "VllmConfig": _section(
        "additional_config",  # a platform's own settings: nobody here knows what they do
        sections="""model_config cache_config parallel_config load_config attention_config
            kernel_config lora_config speculative_config diffusion_config kv_transfer_config""",
        model="quant_config",
        refused_groups="mamba_config",
        # Scheduling, sampling, graphs, placement, reporting.
        instance="""scheduler_config device_config offload_config aux_output_config engram_config
            watermark_config structured_outputs_config observability_config logging_config
            compilation_config profiler_config kv_events_config ec_transfer_config
            ec_manager_config reasoning_config instance_id optimization_level performance_mode
            weight_transfer_config shutdown_timeout""",
    ),
    "ModelConfig": _section(
        """dtype quantization quantization_config code_revision disable_sliding_window
            model_class_overrides model_impl""",
        weights="model model_weights revision seed",
        model="""hf_config hf_text_config hf_config_path hf_overrides config_format max_model_len
            runner convert generation_config override_generation_config multimodal_config""",
        key="""tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init
            enable_prompt_embeds""",
        # Rights, names, sampling, output, memory, graphs, and what comes behind the last layer.
        instance="""trust_remote_code is_submodel_config word_embeddings_untied_by_checkpoint
            allowed_local_media_path allowed_media_domains spec_target_max_model_len
            allow_deprecated_quantization enforce_eager return_sampling_mask max_logprobs
            logprobs_mode use_fp64_gumbel enable_trace_replay disable_cascade_attn
            served_model_name hf_token enable_sleep_mode sleep_preserve_parameter_names
            sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
            enable_cumem_allocator logits_processors io_processor_plugin renderer_num_workers
            pooler_config""",
    ),
    "CacheConfig": _section(
        kv_dtype="cache_dtype kv_cache_dtype_skip_layers",
        layers="block_size sliding_window swa_bounded_replay",
        layout="kv_cache_layout prefix_match_unit hash_block_size cache_hit_alignment_tokens",
        hash_algorithm="prefix_caching_hash_algo",
        refused_groups="""mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
            use_kda_recoverssm""",
        # Pool sizes, padding (no part of a record), which blocks stay, which tokens are skipped.
        instance="""user_specified_block_size gpu_memory_utilization is_attention_free
            num_gpu_blocks_override enable_prefix_caching prefix_cache_retention_interval
            mamba_page_size_padded skip_page_size_padded num_gpu_blocks num_cpu_blocks
            effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency
            kv_sharing_fast_prefill kv_cache_memory_bytes kv_offloading_size
            kv_offloading_backend _block_size_resolved""",
    ),
    "ParallelConfig": _section(
        tensor_parallel="tensor_parallel_size",
        pipeline_parallel="pipeline_parallel_size",
        refused="""prefill_context_parallel_size decode_context_parallel_size
            dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate
            cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size""",
        # Replicas, addresses, experts' places, executors, time limits.
        instance="""data_parallel_size data_parallel_size_local data_parallel_rank
            data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port
            dp_sync_interval data_parallel_master_port data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_hc_sp
            enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter
            enable_eplb eplb_config expert_placement_strategy all2all_backend
            max_parallel_loading_workers disable_custom_all_reduce enable_shm_tensor_arena
            enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size
            dbo_decode_token_threshold dbo_prefill_token_threshold
            disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env
            placement_group distributed_executor_backend worker_cls worker_extension_cls
            master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
            assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds
            world_size rank _data_parallel_master_port_list _coord_store_port data_parallel_index
            _api_process_count _api_process_rank enable_fault_tolerance
            fault_tolerance_config""",
    ),
    "LoadConfig": _section(
        "ignore_patterns",
        model="load_format model_loader_extra_config safetensors_load_strategy",
        instance="""download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size
            device use_tqdm_on_load pt_load_map_location""",
    ),
    "SpeculativeConfig": _section(  # only for drafters with layers of their own
        """method quantization kv_cache_dtype code_revision index_share_for_mtp_iteration
            parallel_drafting""",
        weights="model revision draft_load_config",
        model="draft_model_config target_model_config",
        layout="draft_tensor_parallel_size",
        attention_isa="attention_backend",
        # How many tokens are drafted and which are taken: the blocks hold taken tokens only.
        instance="""enforce_eager num_speculative_tokens tensor_parallel_size moe_backend
            max_model_len disable_padded_drafter_batch disable_eagle_block_drop
            use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min
            target_parallel_config num_speculative_tokens_per_batch_size draft_parallel_config
            suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
            suffix_decoding_max_spec_factor suffix_decoding_min_token_prob
            rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length
            enable_adaptive_verification draft_sample_method dspark_draft_topk""",
    ),
    "LoRAConfig": _section(  # which adapter: its name and path are in the key
        """lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras""",
        key="default_mm_loras",
        instance="""max_lora_rank max_loras fully_sharded_loras max_cpu_loras
            specialize_active_lora max_lora_cls_labels""",
    ),
    "AttentionConfig": _section(
        """use_trtllm_attention disable_flashinfer_q_quantization use_prefill_query_quantization
            indexer_kv_dtype use_non_causal""",
        attention_isa="backend backend_per_kind",
        # Kernels and their tiles; HiSparse decides where blocks wait, not what they hold.
        instance="""minimax_m3_msa_decode_backend flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph mla_prefill_backend indexer_sparse_logits
            hisparse_config sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
            flex_attn_kv_block_size""",
    ),
    "KernelConfig": _section(  # some multiply quantised activations, some do not
        "moe_backend linear_backend linear_backend_per_quant",
        instance="""ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend""",
    ),
    "QuantizationConfigArgs": _section("linear moe ignore targets"),
    "DiffusionConfig": _section("canvas_length", instance="max_denoising_steps"),
    "MultiModalConfig": _section(
        """media_io_kwargs mm_processor_kwargs mm_encoder_attn_dtype video_pruning_rate
            video_pruning_method""",
        model="mm_encoder_fp8_scale_path",
        key="interleave_mm_strings mm_hasher_algorithm",
        # What a request may hold, caches, transport, kernels of the encoder.
        instance="""language_model_only limit_per_prompt enable_mm_embeds mm_device_do_normalize
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling
            mm_tensor_ipc allow_missing_mm_embeddings mm_ipc_gpu_memory_gb""",
    ),
    "KVTransferConfig": _section(
        instance="""kv_connector engine_id kv_buffer_device kv_role kv_port
            kv_connector_extra_config kv_connector_module_path enable_permute_local_kv
            kv_load_failure_policy""",
    ),
}


def content_of(section: str, config: Any) -> dict[str, Any] | None:
    """The content fields of a section's object, by name, as `plain`; None for no object.

    A field that this vLLM does not have counts as None.
    """
    if config is None:
        return None
    return {name: plain(getattr(config, name, None)) for name in SECTIONS[section].content}


def plain(value: Any) -> Any:
    """The same value for JSON, equal in every process: no addresses, no order of a set."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(one) for one in value), key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain(value.to_dict())
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text.removeprefix("torch.")
