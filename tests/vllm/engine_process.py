"""One vLLM engine in a process of its own, forked from a server that has imported vLLM once (an import takes 15 to 20 s)."""

import logging
import multiprocessing
import os
import sys
import traceback
import typing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Before vLLM is imported; the scheduler and the worker run in the forked process itself.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

import vllm
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.models import registry
from vllm.v1.engine import utils as engine_utils
from vllm.v1.executor import multiproc_executor

from engine.vllm.cpu.cpu_build import mend_drafted_states
from engine.vllm.cpu.drafted_states import delta_rule
from engine.vllm.layout import LayerKind

# They would import vLLM once more, for every architecture, engine and rank.
registry._run_in_subprocess = lambda look: look()
for starter in (engine_utils, multiproc_executor):
    starter.get_mp_context = lambda: multiprocessing.get_context("fork")

CONNECTOR = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "engine.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


def serve(
    pipe: Connection, log_path: str, options: dict[str, Any], role: str, connector: dict[str, Any] | None
) -> None:
    """Answers submissions with outputs until told to stop. `connector`: its extra configuration, None for none at all."""
    _redirect(log_path)
    try:
        _serve(pipe, options, role, connector)
    except Exception:
        traceback.print_exc()
        pipe.send(("died", traceback.format_exc()))
    finally:
        sys.stderr.flush()
        os._exit(0)


def _serve(pipe: Connection, options: dict[str, Any], role: str, connector: dict[str, Any] | None) -> None:
    if connector is not None:
        options["kv_transfer_config"] = KVTransferConfig(kv_role=role, kv_connector_extra_config=connector, **CONNECTOR)
    if options.pop("in_float32", False):
        _compute_delta_nets_in_float32()
    are_foretold = options.pop("foretold", False)
    if options.get("speculative_config") is not None:
        mend_drafted_states()  # the connector does, but one server alone has none
    if "kv_events_config" in options:
        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    llm = vllm.LLM(disable_hybrid_kv_cache_manager=False, enforce_eager=True, disable_log_stats=True, **options)
    foretold = _foretold() if are_foretold else []
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    if connector is None:
        _split_before_last(scheduler)
    overlapping, preempted, drafted = _note_overlaps(core), _note_preemptions(scheduler), _note_drafts(scheduler)
    inspected: dict[str, str] = {}
    silenced: list[SilencedLayer] = []
    pipe.send(("ready", None))
    while True:
        while pipe.poll(0 if scheduler.has_requests() else None):
            command, value = pipe.recv()
            if command == "stop":
                return
            if command == "abort":
                engine.abort_request([value])
            elif command == "reset":
                pipe.send(("was_reset", llm.reset_prefix_cache()))
            elif command == "silence":
                silenced.append(SilencedLayer(**value))
            elif command == "unsilence":
                pipe.send(("unsilenced", silenced.pop().end()))
            elif command == "inspect":
                inspected |= [value]
            elif command == "foretell":
                foretold.append(value)
            elif command == "submit":
                _submit(engine, *value)
        for output in engine.step():
            if output.finished:
                request_id, tokens = output.request_id, list(output.outputs[0].token_ids)
                overlaps = any(each.startswith(f"{request_id}-") for each in overlapping)
                preemptions = sum(each.startswith(f"{request_id}-") for each in preempted)
                drafts = [draft for each, draft in drafted if each.startswith(f"{request_id}-")]
                told = (output.kv_transfer_params, output.num_cached_tokens, overlaps, preemptions, drafts)
                pipe.send(("done", (request_id, tokens, *told)))
            else:
                if (layers := inspected.pop(output.request_id, None)) is not None:
                    pipe.send(("kept", _kept(core, output.request_id, layers)))
                pipe.send(("token", (output.request_id, len(output.outputs[0].token_ids))))


def _compute_delta_nets_in_float32() -> None:
    """vLLM's kernel for a CPU wants bfloat16, in which a token depends on what is computed beside it."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        context, name = get_forward_context(), gdn_attention._resolve_layer_name(layer_name)
        if context.attn_metadata is not None:
            layer = context.no_compile_layers[name]
            columns, weight = gdn_attention._conv_buffer_view(layer), gdn_attention._unpacked_conv_weight(layer)
            delta_rule(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out, columns, weight)

    core.__annotations__ = typing.get_type_hints(gdn_attention.cpu_gdn_attention_core) | {"return": None}
    gdn_attention.cpu_gdn_attention_core = core


class SilencedLayer:
    """A layer of attention that does not say that its KVCache is final, as those of vLLM's ops that have no hook."""

    def __init__(self, number: int, *, never_saved: bool) -> None:
        """`never_saved`: nor is it saved at the end of a step, as if no hook and no end of a step were there."""
        self._connector = get_kv_transfer_group()
        self._worker = self._connector._working
        attention = [name for name, each in self._worker._places.items() if each.layer.kind is not LayerKind.STATE]
        self._name, self._dropped = attention[number], 0
        self._connector.save_kv_layer = self._save_unless_silenced
        if never_saved:
            self._worker._submit_attention = self._submit_unless_silenced

    def end(self) -> int:
        """It speaks again; returns how often it has tried."""
        del self._connector.save_kv_layer
        self._worker.__dict__.pop("_submit_attention", None)
        return self._dropped

    def _save_unless_silenced(self, layer_name: str, *rest: Any, **options: Any) -> None:
        if layer_name == self._name:
            self._dropped += 1
        else:
            type(self._connector).save_kv_layer(self._connector, layer_name, *rest, **options)

    def _submit_unless_silenced(self, place: Any) -> None:
        if place.layer.name != self._name:
            type(self._worker)._submit_attention(self._worker, place)


def serve_apart(pipe: Connection, log_path: str, options: dict[str, Any], connector: dict[str, Any]) -> None:
    """An engine in processes of its own, as a server's is. Says which, and waits to be killed."""
    _redirect(log_path)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    transfer = KVTransferConfig(kv_role="kv_both", kv_connector_extra_config=connector, **CONNECTOR)
    llm = vllm.LLM(enforce_eager=True, disable_log_stats=True, kv_transfer_config=transfer, **options)
    pipe.send(_descendants(os.getpid()))
    pipe.recv()
    del llm


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _split_before_last(scheduler: Any) -> None:
    original, block = scheduler._mamba_block_aligned_split, scheduler.block_size

    def split(request: Any, num_new: int, local: int = 0, external: int = 0) -> int:
        if scheduler.need_aligned:
            num_new = original(request, num_new, local, external)
        start, last = request.num_computed_tokens + local + external, request.num_prompt_tokens - 1
        stops = [stop for stop in (last // block * block, last) if start < stop < start + num_new]
        return min(stops, default=start + num_new) - start

    scheduler.need_aligned, scheduler.need_mamba_block_aligned_split = scheduler.need_mamba_block_aligned_split, True
    scheduler._mamba_block_aligned_split = split


def _note_overlaps(core: Any) -> set[str]:
    """Requests that handed the stages a chunk while they still had an earlier one."""
    original, overlapping = core.scheduler.schedule, set[str]()

    def schedule(*args: Any) -> Any:
        output = original(*args)
        for _, earlier, _ in core.batch_queue or ():
            overlapping.update(earlier.num_scheduled_tokens.keys() & output.num_scheduled_tokens.keys())
        return output

    core.scheduler.schedule = schedule
    return overlapping


def _note_preemptions(scheduler: Any) -> list[str]:
    """Requests whose blocks were taken away for others, once for each time."""
    original, preempted = scheduler._preempt_request, list[str]()

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    return preempted


def _note_drafts(scheduler: Any) -> list[tuple[str, list[int]]]:
    """What was proposed to a request, step by step."""
    original, drafted = scheduler.update_draft_token_ids, list[tuple[str, list[int]]]()

    def update(proposed: Any) -> None:
        drafted.extend(
            (each, list(map(int, ids))) for each, ids in zip(proposed.req_ids, proposed.draft_token_ids, strict=True)
        )
        original(proposed)

    scheduler.update_draft_token_ids = update
    return drafted


def _foretold() -> list[list[int]]:
    """Drafts by n-grams become those of tokens that are known, of prompts and their answers, which are added to the list. Of one
    step all are right, of the next one none, or the first few; now and then there is one less.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    known: list[list[int]] = []

    def propose(
        proposer: Any, most: int, sampled: list[list[int]], lengths: Any, tokens: Any, *_: Any, **__: Any
    ) -> Any:
        return [
            _continued(known, tokens[row, : lengths[row]].tolist(), most) if ids else []
            for row, ids in enumerate(sampled)
        ]

    NgramProposer.propose = propose
    return known


def _continued(known: list[list[int]], tokens: list[int], most: int) -> list[int]:
    length = len(tokens)
    found = next((each for each in known if each[:length] == tokens), None)
    if found is None:
        return []
    right = found[length : length + most - (length % 5 == 2)]
    return [token if number < length % (most + 1) or length % 3 else token ^ 1 for number, token in enumerate(right)]


def _kept(core: Any, request_id: str, layers: str) -> dict[str, Any]:
    """The blocks of a request that runs, of layers whose name has `layers` in it."""
    (name,) = (each for each in core.scheduler.requests if each.startswith(f"{request_id}-"))
    tables, modules = core.scheduler.kv_cache_manager.get_block_ids(name), _modules(core)
    return {
        layer: modules[layer].kv_cache[tables[table]].float().numpy()
        for table, group in enumerate(core.scheduler.kv_cache_config.kv_cache_groups)
        for layer in group.layer_names
        if layers in layer
    }


def _modules(core: Any) -> dict[str, Any]:
    modules: dict[str, Any] = core.vllm_config.compilation_config.static_forward_context
    return modules


def _submit(engine: Any, request_id: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)


def _redirect(log_path: str) -> None:
    """What is logged, and vLLM's sockets, which it leaves behind however it ends, go where the log is."""
    os.environ["VLLM_RPC_BASE_PATH"] = str(Path(log_path).parent)
    out = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
