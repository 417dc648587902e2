"""The name of a server's KVCache: servers of different names neither read each other's pages nor hand them over."""

from pathlib import Path
from typing import Any, Final

import msgspec

from engine.agent.identity import model_identity
from engine.errors import ModelError
from hybrid_cache.errors import LayoutError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings that KVCache does not depend on. All others count, those that a newer SGLang adds as well: servers that differ in one
# do not read each other's pages.
HARMLESS: Final = _names(
    """
    model_path revision tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init trust_remote_code context_length is_embedding mem_fraction_static max_running_requests
    max_queued_requests max_total_tokens chunked_prefill_size prefill_decode_interval enable_dynamic_chunking
    max_prefill_tokens prefill_max_requests schedule_policy page_size schedule_conservativeness radix_eviction_policy
    radix_eviction_policy_config stream_interval random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle
    nccl_port dist_timeout dist_init_addr gated_launch_port base_gpu_id gpu_id_step numa_node gc_threshold host port
    fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
    enable_ssl_refresh api_key admin_api_key served_model_name chat_template completion_template file_storage_path
    enable_cache_report return_input_ids return_output_ids reasoning_parser tool_call_parser sampling_defaults
    log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
    show_time_cost enable_metrics decode_log_interval kv_events_config enable_trace otlp_traces_endpoint
    grammar_backend sampling_backend disable_cuda_graph cuda_graph_config hicache_host_memory_mode hicache_ratio
    hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy
    hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
    hicache_storage_prefetch_retry_max_attempts disaggregation_mode disaggregation_transfer_backend
    disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_extra_slots
    disaggregation_decode_polling_interval num_reserved_decode_tokens optimistic_prefill_attempts load_balance_method
    disable_radix_cache disaggregation_decode_enable_radix_cache disaggregation_decode_retraction_backup
    disaggregation_decode_allocation_policy disaggregation_decode_host_receive_threshold
    """
)


def kv_identity(arguments: Any, version: str, revision: str = "") -> str:
    """The name of a server's KVCache: the bytes of its model, its settings, and SGLang's release. Raises LayoutError."""
    facts = {
        name: msgspec.json.encode(value, order="deterministic", enc_hook=repr).decode()
        for name, value in msgspec.structs.asdict(arguments).items()
        if name not in HARMLESS
    }
    directory = Path(arguments.model_path)
    if not directory.is_dir():
        raise LayoutError(f"cannot tell which weights {arguments.model_path!r} names: give a directory")
    try:
        return model_identity(directory, facts=facts | {"sglang": version}, revision=revision)
    except (ModelError, OSError) as exc:
        raise LayoutError(str(exc)) from exc
