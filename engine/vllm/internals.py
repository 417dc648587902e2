"""Every reach into vLLM beyond its connector's base class and its configuration's public face, in one place; media have their own
(`engine.vllm.scheduler_side.media`), and so has what its CPU build lacks (`engine.vllm.cpu.cpu_build`).

What is read or changed here is no interface of vLLM's: `tests/vllm/test_contract.py` says of each that it is still there.
Requests are vLLM's own objects and are known by their attributes alone, so most of this runs without vLLM; what has to be
imported is imported where it is needed.
"""

import asyncio
import dataclasses
import functools
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.vllm import specs
from engine.vllm.identity import text_of
from engine.vllm.scheduler_side.media import is_named, name_media, stop_of
from engine.vllm.scheduler_side.steps import StateOffer
from engine.vllm.server.continuation import going_on
from engine.vllm.server.harmless import HARMLESS
from engine.vllm.server.seats import OTHER_RANKS

if TYPE_CHECKING:
    from engine.vllm.worker_side.accelerator import DirectCopies

T = TypeVar("T")

HELD_STEP: Final = 1 << 62  # a scheduler step that never comes
HOLDING_SCHEDULER: Final = "engine.vllm.internals.holding_scheduler"  # as vLLM's --scheduler-cls

# Requests (vllm.v1.request.Request)


def unsuited(request: Any, namespace_is_known: Callable[[str], bool]) -> str:
    """Why a request's KVCache is not that of its tokens and namespace alone, or of no use to it; empty if neither is so.

    `namespace_is_known`: whether what we name its blocks by is of the `cache_salt` that vLLM keeps them apart by.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if not all(is_named(feature) for feature in request.mm_features):
        return "multimodal"
    if request.lora_request is not None:
        return "lora"
    if request.skip_reading_prefix_cache:  # prompt logprobs: vLLM computes it all, whatever can be loaded
        return "prompt_logprobs"
    return "cache_salt" if request.cache_salt and not namespace_is_known(request.cache_salt) else ""


def stop_before_last(request: Any) -> None:
    """Cuts the last token off a prompt, and leaves room for the token that a held request samples at its end."""
    _cut(request, request.num_prompt_tokens - 1)
    request.max_tokens = 2
    if request.sampling_params is not None:
        # A stop token among the two would end the request before its delivery. The front end keeps the original.
        request.sampling_params = request.sampling_params.clone()
        request.sampling_params._eos_token_id = None
        request.sampling_params.stop_token_ids = []
        request.sampling_params.repetition_detection = None


def shrink(request: Any) -> None:
    """Leaves one token of a prompt that is not worth computing, and one to sample."""
    _cut(request, 1)
    sample_one(request)


def sample_one(request: Any) -> None:
    """The request ends with the next token that it samples."""
    request.max_tokens = 1


def hold(request: Any) -> None:
    """The request is not scheduled any more, until it is let go."""
    if not is_held(request):
        request.next_decode_eligible_step += HELD_STEP


def is_held(request: Any) -> bool:
    """Whether the request waits to be let go."""
    held: bool = request.next_decode_eligible_step >= HELD_STEP
    return held


def let_go(request: Any) -> None:
    """The request may be scheduled again, from the step on that vLLM has said."""
    if is_held(request):
        request.next_decode_eligible_step -= HELD_STEP


def state_offers(block_state: Any) -> dict[str, list[StateOffer]]:
    """States that a step leaves behind inside of it, by request: a last chunk of Mamba 2 does not stop at the last border of
    blocks, but exports what it had there (`KVConnectorBlockState`)."""
    offered = getattr(block_state, "boundary_state_offloads", None) or {}
    return {
        request_id: [StateOffer(table, block, length) for table, block, length in offers]
        for request_id, offers in offered.items()
    }


def _cut(request: Any, num_tokens: int) -> None:
    if not 0 < num_tokens < request.num_prompt_tokens or request.prompt_token_ids is None:
        return
    request.prompt_token_ids = request.prompt_token_ids[:num_tokens]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    # A medium beyond the end would have no place: models that count positions by their media look for it there.
    request.mm_features = [feature for feature in request.mm_features if stop_of(feature) <= num_tokens]
    # Hashes cover whole blocks: one that reached beyond the cut would name what follows by other tokens.
    request.block_hashes.clear()
    request.update_block_hashes()


# The engine (vllm.v1.engine.core)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineAround:
    """What no interface of vLLM's gives a connector of the engine that makes it.

    `has_input`: whether the engine has been sent something that it has not read. `has_output`: whether it has said something
    that has not been sent. `end` ends a request that runs, and has its client answered with these `kv_transfer_params`; false
    where that cannot be done. `in_lockstep`: other engines wait for each step of this one (data parallel ranks of a mixture of
    experts).
    """

    has_input: Callable[[], bool] = lambda: True
    has_output: Callable[[], bool] = lambda: False
    end: Callable[[Any, Mapping[str, Any] | None], bool] = lambda request, params: False
    in_lockstep: bool = False


NO_ENGINE: Final = EngineAround()


def engine_around() -> EngineAround:
    """The engine is looked for on the stack. One that is not found (in process, without queues) is taken to have input
    always, so that nothing waits for long, and to end nothing.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        engine: Any = frame.f_locals.get("self")
        if isinstance(engine, EngineCoreProc):
            return EngineAround(
                has_input=functools.partial(_holds_some, engine.input_queue),
                has_output=functools.partial(_holds_some, engine.output_queue),
                end=functools.partial(_end, engine),
                in_lockstep=isinstance(engine, DPEngineCoreProc),
            )
        frame = frame.f_back
    return NO_ENGINE


def is_process_of_vllms() -> bool:
    """Whether vLLM's own `main` of an EngineCore or a worker is what this process runs, and nothing else."""
    mains = {"run_engine_core", "worker_main"}  # of EngineCoreProc, of WorkerProc
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in mains and frame.f_globals.get("__name__", "").startswith("vllm."):
            return True
        frame = frame.f_back
    return False


def _holds_some(queue: Any) -> bool:
    return not queue.empty()


def _end(engine: Any, request: Any, params: Mapping[str, Any] | None) -> bool:
    """As when a client leaves, which the engine sees between its steps; but this client is there, and gets its answer first."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT, kv_transfer_params=params)
    answer = EngineCoreOutputs(finished_requests={request.request_id}, outputs=[output])
    engine.output_queue.put_nowait((request.client_index, answer))
    engine.aborts_queue.put_nowait([request.request_id])
    return True


def mend_event_endpoints(folder: Path | None) -> None:
    """vLLM gives each data parallel rank an endpoint of its own, but dies of one that is a path. Such a one stays as it is; in
    a server of several nodes it lies in the `folder` of each one's agent. In the engine's process, before its scheduler opens
    it.
    """
    from vllm.distributed.kv_events import ZmqEventPublisher

    offset: Any = ZmqEventPublisher.offset_endpoint_port
    if hasattr(offset, "__wrapped__"):
        return

    @functools.wraps(offset)
    def offset_unless_path(endpoint: str | None, data_parallel_rank: int) -> str | None:
        if endpoint is not None and endpoint.startswith("ipc://"):
            return endpoint if folder is None else f"ipc://{folder / Path(endpoint).name}"
        found: str | None = offset(endpoint, data_parallel_rank)
        return found

    ZmqEventPublisher.offset_endpoint_port = staticmethod(offset_unless_path)


def holding_scheduler(*, vllm_config: Any, **others: Any) -> Any:
    """vLLM's scheduler, as `--scheduler-cls` has it made once vLLM knows whether it schedules asynchronously.

    With the second model runner AsyncScheduler says after each step when its requests decode next. That overwrites what
    the connector has said during the step, so here it is said once more.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class HoldingScheduler(AsyncScheduler):  # type: ignore[misc]
        def _update_after_schedule(self, scheduler_output: Any) -> None:
            computed = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
            held = [request for request in computed if is_held(request)]
            super()._update_after_schedule(scheduler_output)
            for request in held:
                hold(request)

    kind = HoldingScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return kind(vllm_config=vllm_config, **others)


def check_scheduling(vllm_config: Any) -> None:
    """Raises ValueError for a scheduler that would not hold a prefill leg until its KVCache has been delivered.

    With the second model runner, AsyncScheduler says itself in which step a request decodes next, after our word: ours
    has the last one.
    """
    scheduling = vllm_config.scheduler_config
    if (
        scheduling.async_scheduling
        and vllm_config.use_v2_model_runner
        and scheduling.scheduler_cls != HOLDING_SCHEDULER
    ):
        raise ValueError(
            f"the connector needs --scheduler-cls {HOLDING_SCHEDULER}, --no-async-scheduling or VLLM_USE_V2_MODEL_RUNNER=0"
        )
    parallel = vllm_config.parallel_config
    # An engine of several of a dense model is told that it is the only one, and keeps its number alone.
    is_one_of_several = parallel.data_parallel_size > 1 or parallel.data_parallel_index > 0
    nodes = 1 + len(vllm_config.kv_transfer_config.get_from_extra_config(OTHER_RANKS, []))
    is_for_each = parallel.data_parallel_size in (1, nodes) and parallel.data_parallel_index < nodes
    if is_one_of_several and not parallel.data_parallel_external_lb and not is_for_each:
        raise ValueError(
            f"this server has an engine for each data parallel rank, and is that of {nodes} "
            f"{'nodes' if nodes > 1 else 'node'}: `prfaas node ... -- --data-parallel-size N` starts one for each rank, and "
            "so does `prfaas node --ranks N`, with a server of its own"
        )


# The front end (vllm.v1.engine.async_llm, its detokenizer)


RECOMPUTED: Final[ContextVar[list[str] | None]] = ContextVar("RECOMPUTED", default=None)
"""A list of what answers a request: why its landing could not be used is in it before the last words are said."""
ASKED_RANK: Final[ContextVar[int | None]] = ContextVar("ASKED_RANK", default=None)
"""The data parallel rank that computes a request, whatever the request says; None: vLLM's to choose."""
LISTENING_S: Final = 0.02


def prepare_front_end() -> None:
    """All that we change in the process that clients speak to."""
    continue_answers()
    name_media()


def continue_answers() -> None:
    """From now on this process's engine goes on with answers of other servers, and tells of landings that could not be used
    (`engine.vllm.server.answers`). Requests that are neither cost one look at their parameters. Doing it again changes nothing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    begins: Any = AsyncLLM.generate
    if hasattr(begins, "__wrapped__"):
        return

    @functools.wraps(begins)
    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if (rank := ASKED_RANK.get()) is not None:
            kwargs["data_parallel_rank"] = rank
        asked = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
        answered: list[int] = asked.get("answered") or []
        if not answered:
            return _noted(begins(self, prompt, sampling_params, *args, **kwargs))
        so_far = _longer(prompt, answered)
        if asked.get("do_remote_decode"):
            return begins(self, so_far, sampling_params, *args, **kwargs)
        spelling = _spelling(self.get_tokenizer(), prompt["prompt_token_ids"], sampling_params)
        rest = _noted(begins(self, so_far, _of_the_rest(sampling_params, len(answered)), *args, **kwargs))
        return going_on(rest, prompt["prompt_token_ids"], answered, spelling)

    AsyncLLM.generate = generate


async def listen_also(app: Any, listeners: Sequence[socket.socket]) -> None:
    """Has the API server of this app take requests at these sockets, too, from when it listens at its own until it ends."""
    server, loop = app.state.server, asyncio.get_running_loop()
    while not server.started:  # noqa: ASYNC110 uvicorn has no event for it
        await asyncio.sleep(LISTENING_S)
    config = server.config

    def protocol() -> Any:
        return config.http_protocol_class(
            config=config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )

    for listener in listeners:
        server.servers.append(await loop.create_server(protocol, sock=listener, ssl=config.ssl, backlog=config.backlog))


def _noted(said: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """What vLLM says, as it is; why a landing could not be used is in the list that waits for it."""
    told = RECOMPUTED.get()
    return said if told is None else _noting(said, told)


async def _noting(said: AsyncGenerator[Any, None], told: list[str]) -> AsyncGenerator[Any, None]:
    async with aclosing(said):
        async for each in said:
            if each.finished and (each.kv_transfer_params or {}).get("recomputed"):
                told.append(str(each.kv_transfer_params.get("reason")))
            yield each


def _longer(prompt: Any, answered: list[int]) -> Any:
    if not isinstance(prompt, Mapping) or prompt.get("type") != "token":
        raise _unfit("an answer to images or other media cannot be continued")
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *answered]}


def _of_the_rest(sampling_params: Any, answered: int) -> Any:
    """What is left to sample, and nothing to spell."""
    params = sampling_params.clone()
    if params.max_tokens is not None:
        if params.max_tokens <= answered:
            raise _unfit(f"the answer is complete: {params.max_tokens} tokens were asked for")
        params.max_tokens -= answered
    params.min_tokens = max(0, params.min_tokens - answered)
    params.detokenize, params.stop = False, []
    return params


def _spelling(tokenizer: Any, prompt: list[int], sampling_params: Any) -> Any:
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=sampling_params
    )
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def _unfit(message: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(message, parameter="kv_transfer_params.answered")
    return error


# Ranks and platforms


def of_all_stages(mine: T) -> list[T]:
    """What every pipeline stage has said, in order; all of them must call this. Picklable values, of a few kB."""
    import torch.distributed
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    said: list[Any] = [None] * group.world_size
    if group.world_size == 1:
        return [mine]
    torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    return said


def direct_copies() -> "DirectCopies | None":
    """How this platform copies between its blocks and host memory without a buffer; None where it does not."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return None
    from vllm._custom_ops import swap_blocks_batch
    from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

    from engine.vllm.worker_side.accelerator import DirectCopies

    return DirectCopies(swap_blocks_batch, host_register, host_unregister)


def keeps_columns_first() -> bool:
    """Whether the states of convolutions lie column by column: the first ones are in one piece then."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return not is_conv_state_dim_first()


def rank_of_worker() -> int:
    """Of all ranks of this engine: those of a stage follow each other."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank: int = get_pp_group().rank_in_group * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()
    return rank


def packings(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """How attention keeps what is inside a block, where the layout does not say it: on CPUs by their instruction set; of
    what is quantised or an index, by backend and platform.
    """
    from vllm.platforms import current_platform

    layers = vllm_config.compilation_config.static_forward_context
    ranks, fp8 = vllm_config.parallel_config.tensor_parallel_size, str(current_platform.fp8_dtype())
    platform = str(current_platform.device_type)
    if current_platform.is_rocm():
        platform = "rocm"  # whose device type is CUDA's, and whose data types and backends are not
    found = {
        f"{platform} {packed} {_kernel(layers.get(name), spec)}"
        for name, spec in specs.attention_of(kv_cache_config)
        if (packed := specs.packing(spec, ranks, fp8))
    }
    if not current_platform.is_cpu():
        return sorted({platform, *found})
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isas = {
        _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
        for _, spec in specs.attention_of(kv_cache_config)
    }
    return sorted({*(f"{platform} {isa}" for isa in isas), *found})


def _kernel(layer: Any, spec: Any) -> str:
    """Who reads and writes a layer's blocks, and in pieces of how many tokens."""
    from vllm.v1.worker.utils import select_common_block_size

    if layer is None:
        return "unknown backend"
    backend = layer.get_attn_backend()
    return f"{backend.get_name()}/{select_common_block_size(spec.block_size, [backend], [spec])}"


# The configuration (vllm.config): everything but what is known not to change KVCache, so that what a new version adds counts.


def model_source(vllm_config: Any) -> tuple[str, str]:
    """The source of the weights: a path or a name, and the commit of a name's repository, if that is known."""
    model = vllm_config.model_config
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    return str(model.model_weights or model.model), str(commit)


def kv_facts(vllm_config: Any) -> dict[str, str]:
    """Every setting but the weights that KVCache may depend on, by name."""
    model = vllm_config.model_config
    facts = {
        f"{part}.{field.name}": text_of(getattr(config, field.name))
        for part, harmless in HARMLESS.items()
        if (config := getattr(vllm_config, part)) is not None
        for field in dataclasses.fields(config)
        if field.name not in harmless and not field.name.startswith("_") and hasattr(config, field.name)
    }
    facts["hf_config"] = text_of(model.hf_config)
    facts["additional_config"] = text_of(vllm_config.additional_config)
    if vllm_config.load_config.load_format == "dummy":
        facts["seed"] = str(model.seed)
    if (original := _find(model.hf_config, "original_max_position_embeddings")) is not None:
        facts["long_rope"] = str(model.max_model_len > original)  # Phi3LongRoPEScaledRotaryEmbedding chooses by it
    return facts


def _find(config: Any, name: str) -> Any:
    for place in (config, getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        found = place.get(name) if isinstance(place, Mapping) else getattr(place, name, None)
        if found is not None:
            return found
    return None
