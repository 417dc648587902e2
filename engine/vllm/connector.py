"""The vLLM KV connector: a vLLM server with it is the engine of a PrfaaS node.

    --kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_connector_module_path": "engine.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"agent_socket": "/run/...", "http_url": "http://..."}}'

This module translates between vLLM's base class and our two sides, `engine.vllm.scheduler_side.scheduler` and
`engine.vllm.worker_side.worker`. The base class is called experimental there: `engine.vllm.version` says what was run. What is
beyond it is in `engine.vllm.internals` and `engine.vllm.cpu.cpu_build`.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from engine.agent.identity import default_memory
from engine.vllm import internals, specs
from engine.vllm.cpu import cpu_build
from engine.vllm.drafts import check_drafts, draft_facts, draft_layers
from engine.vllm.identity import kv_identity, with_forms
from engine.vllm.layout import CacheLayer, LayerKind, VllmLayout, vllm_layout
from engine.vllm.scheduler_side import media
from engine.vllm.scheduler_side.agent import VllmAgentThread, agent_socket
from engine.vllm.scheduler_side.scheduler import SchedulerSide
from engine.vllm.scheduler_side.steps import ForwardStep
from engine.vllm.server.leaving import leave_at_once
from engine.vllm.server.parent import end_with_parent
from engine.vllm.server.seats import OTHER_RANKS, settings_of_rank
from engine.vllm.server.stats import PrfaasPromMetrics, PrfaasStats, copy_stats, handover_stats
from engine.vllm.version import is_tested, release, untested
from engine.vllm.worker_side.accelerator import device_of
from engine.vllm.worker_side.worker import WorkerSide
from hybrid_cache.errors import LayoutError
from transport.control.last_words import CANNOT_SERVE

log = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A ForwardStep in vLLM's envelope."""

    step: ForwardStep


@dataclass(frozen=True)
class Cached(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The KVCache of a pipeline stage, or of all: layers, parts of states, packing of keys.

    `facts` (`internals.kv_facts`) are a rank's as well: models complete their configuration as they are loaded, which
    reaches the scheduler only where both are one process.
    """

    layers: tuple[CacheLayer, ...]
    forms: tuple[str, ...]
    packings: tuple[str, ...]
    facts: dict[str, str]


@contextmanager
def _saying_why() -> Iterator[None]:
    """Prints the reason for a refusal where the node looks: tracebacks of several processes follow."""
    try:
        yield
    except (LayoutError, ValueError) as error:
        print(f"{CANNOT_SERVE}{error}", file=sys.stderr, flush=True)
        raise


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill as a service for vLLM: pushes and receives KVCache through its node's agent."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_version(vllm.__version__)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._agent: VllmAgentThread | None = None
        self._engine = internals.NO_ENGINE
        if role is KVConnectorRole.SCHEDULER:
            end_with_parent()
            is_shared = bool(self._kv_transfer_config.get_from_extra_config(OTHER_RANKS, []))
            internals.mend_event_endpoints(_agent_socket(vllm_config).parent if is_shared else None)
            if media.takes_media(vllm_config):
                media.keep_media()
        self._cached: Cached | None = None
        with _saying_why():
            internals.check_scheduling(vllm_config)
            if role is KVConnectorRole.WORKER:
                self._cached = cached(vllm_config, kv_cache_config)
                # A rank is not asked for its model's name, and reading all weights for it would take long.
                layout = layout_of(vllm_config, self._cached, "")
                if layout.stages > 1:
                    cpu_build.mend_eager_stages()
                cpu_build.mend_seeded_chunks()
                cpu_build.mend_state_checkpoints()
                if vllm_config.speculative_config is not None:
                    cpu_build.mend_drafted_states()
                cpu_build.mend_exchanges()
                cpu_build.unlink_shared_memory()
                check_drafts(vllm_config, self._cached.layers, columns_first=internals.keeps_columns_first())
                own = specs.layer_names(kv_cache_config)
                in_microbatches = bool(vllm_config.parallel_config.use_ubatching)
                rank = internals.rank_of_worker()
                devices = partial(device_of, direct=internals.direct_copies())
                drafts = draft_layers(vllm_config, own)
                self._worker = WorkerSide(
                    layout, rank, own=own, drafts=drafts, in_microbatches=in_microbatches, devices=devices
                )

    def _begin_scheduling(self, everything: Cached) -> None:
        with _saying_why():
            layout = layout_of(self._vllm_config, everything, identity(self._vllm_config, everything))
        self._agent = _agent(self._vllm_config, layout)
        self._agent.start()
        local_tier = bool(self._kv_transfer_config.get_from_extra_config("local_tier", True))
        self._engine = internals.engine_around()
        self._scheduler = SchedulerSide(layout, self._agent, time.monotonic, local_tier=local_tier, engine=self._engine)

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
        """A whole graph leaves out the Python code between layers that says which are final: they are saved at its end."""
        return False

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Before any request: of a pipeline's layers vLLM tells the scheduler's side those of the first stage alone."""
        everything = metadata[0, 0]
        assert isinstance(everything, Cached)
        self._begin_scheduling(everything)

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
        offers = internals.state_offers(state)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return StepMetadata(
            self._scheduling.build_step(scheduler_output.num_scheduled_tokens, state.resolve_block_ids, offers, drafts)
        )

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
        """False: the agent's pages stay. After loading other weights, restart the node."""
        return False

    # Worker

    def get_handshake_metadata(self) -> Cached | None:
        """What all stages have: each rank knows it."""
        return self._cached

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
        if internals.is_process_of_vllms():
            leave_at_once(self._engine.has_output)

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


def cached(vllm_config: Any, kv_cache_config: Any) -> Cached:
    """On a rank: what all stages keep. Raises LayoutError for what cannot be transferred, and what else any stage's error is."""
    mine: Cached | Exception
    try:
        mine = Cached(
            layers=tuple(specs.cache_layers(vllm_config, kv_cache_config)),
            forms=tuple(specs.state_forms(kv_cache_config)),
            packings=tuple(internals.packings(vllm_config, kv_cache_config)),
            facts=internals.kv_facts(vllm_config),
        )
    except LayoutError as error:  # said to the others: they would wait for this stage
        mine = error
    except Exception as error:
        log.exception("what this stage keeps cannot be told")
        mine = RuntimeError(f"{type(error).__name__}: {error}")  # which another process can read, whatever it was
    return all_cached(internals.of_all_stages(mine))


def all_cached(stages: Sequence[Cached | Exception]) -> Cached:
    """What all stages keep. Raises the error of one that cannot say."""
    known = []
    for stage in stages:
        if isinstance(stage, Exception):
            raise stage
        known.append(stage)
    return Cached(
        layers=tuple(layer for stage in known for layer in stage.layers),
        forms=tuple(sorted({form for stage in known for form in stage.forms})),
        packings=tuple(sorted({packing for stage in known for packing in stage.packings})),
        facts=known[0].facts,
    )


def identity(vllm_config: Any, everything: Cached) -> str:
    """The name of this server's KVCache. Raises LayoutError where weights cannot be told apart."""
    memory = default_memory()
    facts = everything.facts | {"vllm": release(vllm.__version__), "packings": ", ".join(everything.packings)}
    facts |= draft_facts(vllm_config, memory)
    source, commit = internals.model_source(vllm_config)
    revision = str(vllm_config.kv_transfer_config.get_from_extra_config("model_revision", ""))
    name = kv_identity(source, commit, facts, revision=revision, memory=memory)
    return with_forms(name, everything.forms)


def layout_of(vllm_config: Any, everything: Cached, model: str) -> VllmLayout:
    """The canonical layout of a model as vLLM caches it. Raises LayoutError for what cannot be transferred."""
    block_tokens = {layer.block_tokens for layer in everything.layers if layer.kind is not LayerKind.STATE}
    if not block_tokens:
        raise LayoutError("a model without any attention layer has no blocks of KVCache")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    parallel = vllm_config.parallel_config
    return vllm_layout(
        everything.layers,
        model=model,
        dtype=dtype,
        block_tokens=max(block_tokens),
        ranks=parallel.tensor_parallel_size,
        stages=parallel.pipeline_parallel_size,
    )


def _settings(vllm_config: Any) -> Mapping[str, Any]:
    """What the connector is told of this engine's own node."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return settings_of_rank(extra, vllm_config.parallel_config.data_parallel_index)


def _agent_socket(vllm_config: Any) -> Path:
    return agent_socket(_settings(vllm_config).get("agent_socket"))


def _agent(vllm_config: Any, layout: VllmLayout) -> VllmAgentThread:
    model = vllm_config.model_config
    names = model.served_model_name
    return VllmAgentThread(
        _agent_socket(vllm_config),
        layout,
        model_id=str(names[0] if isinstance(names, list) else names or model.model),
        max_model_len=model.max_model_len,
        http_url=str(_settings(vllm_config).get("http_url", "")),
        notice="" if is_tested(vllm.__version__) else untested(vllm.__version__),
        takes_media=media.takes_media(vllm_config),
    )
