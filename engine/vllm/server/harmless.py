"""Settings of vLLM's (vllm.config, as of 0.32) that are known not to change KVCache: nodes may differ in them.

Whatever is not named here counts, so what a newer release adds does until it is known to be harmless.
"""

from collections.abc import Mapping
from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS: Final[Mapping[str, frozenset[str]]] = {
    # Weights have an identity of their own, configurations count as they are in effect, tokens are compared by themselves.
    # Then what is asked of requests and made of logits; then how it is run, which rounds differently at most.
    "model_config": _names("""
        model model_weights revision hf_config hf_text_config hf_config_path config_format hf_token trust_remote_code
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds
        seed max_model_len spec_target_max_model_len max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask
        enable_trace_replay generation_config override_generation_config logits_processors served_model_name
        io_processor_plugin pooler_config renderer_num_workers multimodal_config allowed_local_media_path
        allowed_media_domains allow_deprecated_quantization
        enforce_eager disable_cascade_attn enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
        sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator
    """),
    # The layout has block sizes and forms of states. Then how much there is, and how it is looked up.
    "cache_config": _names("""
        block_size user_specified_block_size mamba_block_size mamba_cache_mode mamba_page_size_padded
        skip_page_size_padded kv_cache_layout
        prefix_match_unit gpu_memory_utilization is_attention_free num_gpu_blocks_override enable_prefix_caching
        prefix_caching_hash_algo prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint num_gpu_blocks
        num_cpu_blocks effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size
        cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size kv_offloading_backend
    """),
    "load_config": _names("""
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device
        use_tqdm_on_load pt_load_map_location
    """),
    "attention_config": _names("""
        flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        sparse_mla_prefill_workspace_factor
    """),
    "mamba_config": _names(""),
    "lora_config": _names("max_loras max_cpu_loras"),
}
