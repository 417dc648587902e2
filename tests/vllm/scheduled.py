"""vLLM's own scheduler with our connector and a scripted agent, and no model: tests say what each step samples."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.vllm.internals import HOLDING_SCHEDULER
from engine.vllm.layout import VllmLayout
from engine.vllm.scheduler_side.errands import Granted
from engine.vllm.scheduler_side.scheduler import SchedulerSide
from engine.vllm.worker_side.worker import LoadResults
from tests.engine.vllm.builders import full, layout_of, pages_for
from tests.engine.vllm.scripted import ARENA, Agent

BLOCK = 16
BLOCKS = 64
V2 = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def second_runner(*, wanted: bool = True) -> Iterator[None]:
    """As on a GPU, where vLLM has its second model runner unless told otherwise."""
    before = os.environ.get(V2)
    os.environ[V2] = str(int(wanted))
    try:
        yield
    finally:
        os.environ.pop(V2)
        if before is not None:
            os.environ[V2] = before


@dataclass(frozen=True)
class Caches:
    """What a model caches: vLLM's groups, and how we see them. `state_mode`: of recurrent states."""

    groups: list[Any]
    layout: VllmLayout
    state_mode: str = "none"
    num_blocks: int = BLOCKS

    @property
    def block_size(self) -> int:
        """That the blocks of all groups fit into."""
        return math.lcm(*(group.kv_cache_spec.block_size for group in self.groups))

    @property
    def are_shared(self) -> bool:
        """Between prompts that begin alike."""
        return self.state_mode == "align" or len(self.groups) == 1


def dense() -> Caches:
    """One layer of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return Caches([KVCacheGroupSpec(["a"], spec)], layout_of(full("a", part_bytes=BLOCK * 8)))


class Scheduled:
    """A scheduler as EngineCore has it, whose steps compute nothing."""

    def __init__(
        self,
        model: Path,
        *,
        scheduler: str | None = HOLDING_SCHEDULER,
        asynchronous: bool = True,
        caches: Caches | None = None,
        agent: Agent | None = None,
        **options: Any,
    ) -> None:
        """`caches`: those of another model than a dense one. `options`: vLLM's."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig
        from vllm.v1.structured_output import StructuredOutputManager

        caches = caches or dense()

        transfer = KVTransferConfig(
            kv_connector="PrfaasConnector", kv_connector_module_path="engine.vllm.connector", kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )  # fmt: skip
        with second_runner(wanted=False):  # the CPU build has none, and would say so
            self.config = EngineArgs(
                model=str(model), dtype="float32", max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=8,
                block_size=BLOCK, enable_prefix_caching=caches.are_shared, kv_transfer_config=transfer, **options,
            ).create_engine_config()  # fmt: skip
        self.config.scheduler_config.async_scheduling = asynchronous
        self.config.scheduler_config.scheduler_cls = scheduler
        self.config.cache_config.num_gpu_blocks = caches.num_blocks
        self.config.cache_config.mamba_cache_mode = caches.state_mode
        self.config.cache_config.mamba_block_size = BLOCK
        self.scheduler: Any = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config, kv_cache_config=KVCacheConfig(caches.num_blocks, [], caches.groups), log_stats=False,
            block_size=caches.block_size, hash_block_size=BLOCK, structured_output_manager=StructuredOutputManager(self.config),
        )  # fmt: skip
        self.agent = agent or Agent()
        self.layout = caches.layout
        self.side = SchedulerSide(self.layout, self.agent, lambda: 0.0)
        self.scheduler.connector._scheduler = self.side
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._steps: list[Any] = []

    def arrive(self, request_id: str, num_tokens: int, params: dict[str, Any] | None, *, max_tokens: int = 1) -> Any:
        return self.ask(request_id, range(1, num_tokens + 1), params, max_tokens=max_tokens)

    def ask(self, request_id: str, prompt: Sequence[int], params: dict[str, Any] | None, *, max_tokens: int = 1) -> Any:
        """A request comes."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        request = Request(request_id, list(prompt), sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def grant(self, errand: int, num_tokens: int) -> None:
        self.agent.events.append(Granted(errand, pages_for(self.layout, num_tokens, job=f"j{errand}"), ARENA))

    def begin(self) -> dict[str, int]:
        """The next step, and what it computes; its tokens come with `end`."""
        return dict(self.schedule().num_scheduled_tokens)

    def schedule(self) -> Any:
        """The next step, as vLLM's workers get it."""
        step = self.scheduler.schedule()
        self._steps.append(step)
        return step

    def end(
        self, sampled: Mapping[str, Sequence[int]] | None = None, loads: LoadResults | None = None
    ) -> dict[str, Any]:
        """The oldest step is over: what it sampled, a token each that has computed all if nothing is said; which loads have
        ended. Returns what was answered, by request."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        step = self._steps.pop(0)
        ids = list(step.num_scheduled_tokens)
        tokens = [list((sampled or {}).get(each, [7])) for each in ids]
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={each: index for index, each in enumerate(ids)}, sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(finished_recving=loads.done, failed_recving=loads.failed) if loads else None,
        )  # fmt: skip
        answered = self.scheduler.update_from_output(step, output)
        return {each.request_id: each for outputs in answered.values() for each in outputs.outputs}
