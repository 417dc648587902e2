"""The vLLM KV connector: a vLLM server with it is the engine of a PrfaaS node.

    --kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_connector_module_path": "engine.vllm_connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"agent_socket": "/run/...", "http_url": "http://..."}}'

This module translates between vLLM's base class and our two sides, `vllm_scheduler` and `vllm_worker`; it is the only
one, with `vllm_stats`, that imports vLLM. The base class is called experimental there: `vllm_version` says what was run.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import vllm
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engine.errors import ModelError
from engine.model_identity import model_identity
from engine.vllm_agent import AgentThread, agent_socket
from engine.vllm_layout import CacheLayer, Kind, VllmLayout, vllm_layout
from engine.vllm_parent import end_with_parent
from engine.vllm_scheduler import SchedulerSide
from engine.vllm_stats import PrfaasPromMetrics, PrfaasStats, copy_stats, handover_stats
from engine.vllm_steps import Step
from engine.vllm_version import is_tested, untested
from engine.vllm_worker import WorkerSide
from hybrid_cache.errors import LayoutError

log = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A Step in vLLM's envelope."""

    step: Step


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill as a service for vLLM: pushes and receives KVCache through its node's agent."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version(vllm.__version__)
        check_scheduling(vllm_config)
        layout = layout_of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._agent: AgentThread | None = None
        if role is KVConnectorRole.SCHEDULER:
            end_with_parent()
            self._agent = _agent(vllm_config, layout)
            self._agent.start()
            local_tier = bool(self._kv_transfer_config.get_from_extra_config("local_tier", True))
            self._scheduler = SchedulerSide(
                layout, self._agent, time.monotonic, local_tier=local_tier, has_input=_engine_has_input()
            )
        else:
            self._worker = WorkerSide(layout, get_tensor_model_parallel_rank())

    @property
    def requires_kv_delivery(self) -> bool:
        """What a preempted request has saved lies in pages of the agent, which no preemption frees."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outermost in a block: then a rank's part of a slab is one piece. MLA has one head anyway."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved from Python code between them, which a whole graph would leave out."""
        return True

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduling.num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load fills every group: pages hold the request's own blocks, not hashes of some."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        state = scheduler_output.kv_connector_block_state
        return StepMetadata(self._scheduling.build_step(scheduler_output.num_scheduled_tokens, state.resolve_block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.loads_ended(
            set(connector_output.finished_recving or ()), set(connector_output.failed_recving or ())
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks can be freed at once: a step ends only when what it saves has been copied."""
        return False, self._scheduling.request_finished(request)

    def reset_cache(self) -> bool | None:
        """False: the agent's pages stay. Whoever loads other weights has to start the node anew."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._working.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._working.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are scheduled once all of their load is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._working.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._working.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._working.take_results()
        return KVConnectorTransferResults(finished_recving=results.done, failed_recving=results.failed)

    # Either

    def get_kv_connector_stats(self) -> PrfaasStats | None:
        if self._worker is not None:
            stats = copy_stats(self._worker.take_counts())
        else:
            stats = handover_stats(self._scheduling.take_counts())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrfaasStats:
        return PrfaasStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrfaasPromMetrics:
        return PrfaasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._agent is not None:
            self._agent.close()

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker


def check_version(version: str) -> None:
    """Warns when this vLLM is not one that the connector was tested with."""
    if not is_tested(version):
        log.warning("%s", untested(version))


def check_scheduling(vllm_config: Any) -> None:
    """Raises ValueError for a scheduler that would not hold a prefill leg until its KVCache has been delivered.

    With the second model runner, AsyncScheduler says itself in which step a request decodes next, after our word.
    """
    if vllm_config.scheduler_config.async_scheduling and vllm_config.use_v2_model_runner:
        raise ValueError("the connector needs VLLM_USE_V2_MODEL_RUNNER=0 or --no-async-scheduling")
    if vllm_config.speculative_config is not None:
        raise ValueError("the connector does not work with speculative decoding: remove --speculative-config")
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise ValueError("the connector knows one engine per node: start a node for each data parallel rank")


def layout_of(vllm_config: Any, kv_cache_config: Any) -> VllmLayout:
    """The canonical layout of a model as vLLM caches it. Raises LayoutError for what cannot be transferred."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"{name} = {getattr(parallel, name)}: the connector knows tensor parallelism only")
    model, ranks = vllm_config.model_config, parallel.tensor_parallel_size
    heads = model.get_total_num_kv_heads()
    layers = [
        _cache_layer(name, table, _layer_spec(group.kv_cache_spec, name), ranks, heads)
        for table, group in enumerate(kv_cache_config.kv_cache_groups)
        if group.enable_kv_transfer
        for name in group.layer_names
    ]
    block_tokens = {layer.block_tokens for layer in layers if layer.kind is not Kind.STATE}
    if not block_tokens:
        raise LayoutError("a model without any attention layer has no blocks that a prompt could be cut into")
    try:
        identity = model_identity(Path(model.model))
    except ModelError:  # not a directory: the name that vLLM downloads it by
        identity = str(model.model)
    cache_dtype = vllm_config.cache_config.cache_dtype
    dtype = str(model.dtype).removeprefix("torch.") if cache_dtype == "auto" else str(cache_dtype)
    model_name = "/".join([identity, "vllm", *_state_forms(kv_cache_config)])
    return vllm_layout(layers, model=model_name, dtype=dtype, block_tokens=max(block_tokens), ranks=ranks)


def _state_forms(kv_cache_config: Any) -> list[str]:
    """What recurrent states consist of: states of one size may differ in that, and must not be mistaken."""
    specs = [_layer_spec(g.kv_cache_spec, n) for g in kv_cache_config.kv_cache_groups for n in g.layer_names]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    return sorted({f"{tuple(map(tuple, spec.shapes))}{spec.dtypes}".replace("torch.", "") for spec in states})


def _engine_has_input() -> Callable[[], bool]:
    """Whether the engine that is making this connector has been sent something that it has not read.

    No interface tells, so the engine is looked for on the stack. One that is not found is taken to have input
    always: then nothing waits for long.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        engine: Any = frame.f_locals.get("self")
        if type(engine) is EngineCoreProc:
            inbox = engine.input_queue
            return lambda: not inbox.empty()
        frame = frame.f_back
    return lambda: True


def _layer_spec(spec: Any, name: str) -> Any:
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _cache_layer(name: str, table: int, spec: Any, ranks: int, heads: int) -> CacheLayer:
    if isinstance(spec, MambaSpec):
        parts = 1 if spec.tp_replicated else ranks
        return CacheLayer(
            name=name,
            table=table,
            kind=Kind.STATE,
            block_tokens=spec.block_size,
            part_bytes=spec.state_content_size_bytes,
            parts=parts,
        )
    known = isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and not isinstance(spec, ChunkedLocalAttentionSpec)
    if not isinstance(spec, AttentionSpec) or not known:
        raise LayoutError(f"{name}: KVCache of kind {type(spec).__name__} cannot be transferred")
    if spec.tokens_per_state != 1:
        raise LayoutError(f"{name}: {spec.tokens_per_state} tokens per cache entry cannot be transferred")
    is_window = isinstance(spec, SlidingWindowSpec)
    if is_window and spec.extra_retained_tokens:
        raise LayoutError(f"{name}: a window with {spec.extra_retained_tokens} extra tokens cannot be transferred")
    return CacheLayer(
        name=name,
        table=table,
        kind=Kind.WINDOW if is_window else Kind.FULL,
        block_tokens=spec.block_size,
        part_bytes=spec.unpadded_page_size_bytes,
        parts=min(ranks, spec.max_tp_shards or heads),
        window=spec.sliding_window if is_window else 0,
    )


def _agent(vllm_config: Any, layout: VllmLayout) -> AgentThread:
    settings = vllm_config.kv_transfer_config
    model = vllm_config.model_config
    names = model.served_model_name
    return AgentThread(
        agent_socket(settings.get_from_extra_config("agent_socket", None)),
        layout,
        model_id=str(names[0] if isinstance(names, list) else names or model.model),
        max_model_len=model.max_model_len,
        http_url=str(settings.get_from_extra_config("http_url", "")),
        notice="" if is_tested(vllm.__version__) else untested(vllm.__version__),
    )
