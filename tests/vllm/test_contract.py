"""What of vLLM the connector stands on. A new version that changes it fails here, with the name of what changed."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Final

import pytest

from engine.vllm.cpu.state_checkpoints import store_checkpoint
from engine.vllm.scheduler_side import media
from engine.vllm.server.servable import refusal_of
from hybrid_cache.hashing.block_hash import MEDIUM

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # importing vLLM is slow
    pytest.mark.filterwarnings("default"),  # what its import warns of is not ours to mend
]

# Parameters as of 0.32.0 of every method that we override or call, and what an older release does not have yet.
NEW: Final = {"get_loaded_kv_cache_group_ids": "0.32"}
METHODS = {
    "__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    "bind_connector_metadata": ("self", "connector_metadata"),
    "build_connector_meta": ("self", "scheduler_output"),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "clear_connector_metadata": ("self",),
    "get_handshake_metadata": ("self",),
    "get_kv_connector_stats": ("self",),
    "get_loaded_kv_cache_group_ids": ("self", "request"),
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "get_required_kvcache_layout": ("vllm_config",),
    "get_transfer_results": ("self", "finished_req_ids"),
    "on_new_request": ("self", "request"),
    "register_kv_caches": ("self", "kv_caches"),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "reset_cache": ("self",),
    "set_xfer_handshake_metadata_pp_aware": ("self", "metadata"),
    "save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "shutdown": ("self",),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "update_connector_output": ("self", "connector_output"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("self", "layer_name"),
    "wait_for_save": ("self",),
}


@pytest.fixture(scope="module")
def base():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return KVConnectorBase_V1


def is_before(release: str) -> bool:
    import vllm

    return tuple(map(int, vllm.__version__.split(".")[:2])) < tuple(map(int, release.split(".")))


@pytest.mark.parametrize("name", METHODS)
def test_method_has_the_parameters_it_had(base, name):
    if name in NEW and is_before(NEW[name]):
        pytest.skip(f"came with {NEW[name]}")
    assert hasattr(base, name), f"KVConnectorBase_V1.{name} is gone"
    found = tuple(inspect.signature(getattr(base, name)).parameters)
    assert found == METHODS[name], f"KVConnectorBase_V1.{name} changed: {found}, it was {METHODS[name]}"


def test_we_override_nothing_that_is_not_there_and_all_that_is_abstract(base):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    from engine.vllm.connector import PrfaasConnector

    known = {*dir(base), *dir(SupportsHMA), *(name for name, release in NEW.items() if is_before(release))}
    ours = {name for name in vars(PrfaasConnector) if not name.startswith("_")}
    assert ours <= known, f"vLLM never calls {sorted(ours - known)}"
    assert not PrfaasConnector.__abstractmethods__, "methods that vLLM wants and we have not"


def test_all_groups_finish_together():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

    found = tuple(inspect.signature(SupportsHMA.request_finished_all_groups).parameters)
    assert found == ("self", "request", "block_ids")


def test_a_scheduler_hears_what_its_workers_have_and_not_from_its_configuration():
    """Of a pipeline's layers, that has the first stage's alone; and of layers of several sizes only one."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.engine.core import EngineCore

    assert "deepcopy(kv_cache_configs[0])" in inspect.getsource(generate_scheduler_kv_cache_config)
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("= Scheduler(") < source.index("kv_connector.set_xfer_handshake_metadata_pp_aware(")


def test_what_stages_keep_is_put_together():
    from engine.vllm.connector import Cached, all_cached
    from engine.vllm.layout import CacheLayer, LayerKind
    from hybrid_cache.errors import LayoutError

    first, second = (
        CacheLayer(name=name, table=0, kind=LayerKind.FULL, block_tokens=16, part_bytes=64, parts=1) for name in "ab"
    )
    stages = [Cached((first,), ("conv",), ("cpu amx",), {"a": "1"}), Cached((second,), (), ("cpu amx",), {})]
    assert all_cached(stages) == Cached((first, second), ("conv",), ("cpu amx",), {"a": "1"})
    with pytest.raises(LayoutError, match="odd"):
        all_cached([stages[0], LayoutError("odd")])


def test_an_eager_stage_of_the_cpu_build_still_lacks_what_it_receives_into():
    """Why `cpu_build.mend_eager_stages` is there. When this fails, it need not be any more."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    receive = inspect.getsource(CPUModelRunner.sync_and_gather_intermediate_tensors)
    assert "assert self.intermediate_tensors is not None" in receive
    assert "CompilationMode.NONE" in inspect.getsource(CPUModelRunner.warming_up_model)


def test_the_cpu_build_still_dies_of_a_seeded_prompt_in_several_chunks():
    """Why `cpu_build.mend_seeded_chunks` is there. When this fails, it need not be any more."""
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    books = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "gen.set_offset(gen.get_offset() - 4)" in books
    assert "self.input_batch.generators.get(" in books
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()
    tokens = inspect.getsource(CPUModelRunner.sample_tokens)
    assert tokens.index("self._sample(") < tokens.index("self._bookkeeping_sync(")


def test_the_cpu_build_still_says_no_states_inside_of_a_chunk():
    """Why `cpu_build.mend_state_checkpoints` is there. When this fails, it need not be any more."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_checkpoint, ssd_combined
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

    scan = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu
    assert "return_intermediate_states" in inspect.signature(scan).parameters
    assert inspect.getsource(scan).count("return_intermediate_states") == 1, "it is heard of now"
    assert "_mamba_chunk_scan_combined_fwd(" in inspect.getsource(ssd_combined.mamba_chunk_scan_combined_varlen)
    assert "store_prefill_checkpoint(" in inspect.getsource(mamba_mixer2)
    ours = inspect.signature(store_checkpoint)
    assert list(inspect.signature(ssd_checkpoint.store_prefill_checkpoint).parameters) == list(ours.parameters)


def test_an_engine_of_several_still_knows_its_number():
    """Of a dense model: all else says that it is the only one. `internals.check_scheduling` stands on it."""
    from vllm.config.parallel import ParallelConfig

    source = inspect.getsource(ParallelConfig.reconfigure_for_independent_dp_rank)
    assert "self.data_parallel_size = 1" in source
    assert "data_parallel_index =" not in source
    assert "data_parallel_external_lb =" not in source


def test_ranks_on_a_cpu_still_cannot_exchange_uneven_shares():
    """Why `cpu_build.mend_exchanges` is there. When this fails, it need not be any more."""
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    assert "raise NotImplementedError" in inspect.getsource(DeviceCommunicatorBase.all_gatherv)
    source = inspect.getsource(CpuCommunicator)
    assert "def all_gatherv" not in source
    assert "def reduce_scatterv" not in source
    assert "reduce_scatterv(hidden_states, dim=0, sizes=sizes)" in inspect.getsource(AgRsAll2AllManager.combine)


def test_ranks_of_a_dense_model_are_still_no_group():
    """Its nodes are on their own, without flags for data parallel ranks. docs/guides/vllm.md says so."""
    from vllm.engine.arg_utils import EngineArgs

    assert "Non-MoE models do not support external data parallel mode" in inspect.getsource(
        EngineArgs.create_engine_config
    )


def test_shared_memory_of_ranks_is_named_as_we_look_for_it():
    """Why `cpu_build.unlink_shared_memory` is there: vLLM leaves the names behind."""
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.v1.worker import cpu_worker

    source = inspect.getsource(cpu_communicator)
    assert 'f"{instance_identifier}-{shm_group_identifier}-cpushm"' in source
    assert "unlink" not in source
    assert 'os.environ["VLLM_DIST_IDENT"]' in inspect.getsource(cpu_worker)


def test_requests_have_what_we_change():
    """Cutting a prompt, and holding a request, is done on vLLM's own objects."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [5, 6, 7], SamplingParams(max_tokens=1), None)
    for name in (
        "prompt_token_ids",
        "_all_token_ids",
        "num_prompt_tokens",
        "block_hashes",
        "max_tokens",
        "mm_features",
        "skip_reading_prefix_cache",
    ):
        assert hasattr(request, name), f"Request.{name} is gone"
    assert request.next_decode_eligible_step == 0
    for name in ("_eos_token_id", "stop_token_ids", "repetition_detection"):
        assert hasattr(request.sampling_params, name), f"SamplingParams.{name} is gone"


def test_images_are_named_by_what_we_replace_and_workers_are_spared_what_we_keep():
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.v1.core.sched import output

    assert list(inspect.signature(BaseMultiModalProcessor._get_mm_hashes).parameters) == ["self", "inputs"]
    source = inspect.getsource(BaseMultiModalProcessor)
    assert "self.info.ctx.get_mm_config().mm_hasher_algorithm" in source
    assert "def _cached_apply_hf_processor(" in source
    assert list(inspect.signature(output.strip_covered_mm_data).parameters) == [
        "mm_features", "num_computed_tokens", "uses_mrope",
    ]  # fmt: skip
    assert "strip_covered_mm_data(" in inspect.getsource(output.NewRequestData.from_request)
    assert {field.name for field in dataclasses.fields(MultiModalConfig)} >= media.SEEN_ALIKE
    assert {field.name for field in dataclasses.fields(MultiModalFeatureSpec)} >= {
        "modality",
        "identifier",
        "mm_position",
    }
    assert {"offset", "length"} <= {field.name for field in dataclasses.fields(PlaceholderRange)}


class Items(list):
    def get_all_items_for_hash(self):
        return list(self)


def named(uuid=None, data=b"cat", algorithm="blake3", caches=None, **settings):
    """What an image is called, by a processor of a server with these settings. `caches`: its own way to."""
    from vllm.config.multimodal import MultiModalConfig
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.multimodal.processing.inputs import ProcessorInputs

    media.name_media()
    config = MultiModalConfig(mm_hasher_algorithm=algorithm, **settings)
    own = {} if caches is None else {"_cached_apply_hf_processor": caches}
    kind = type("Processor", (BaseMultiModalProcessor,), own)
    kind.__abstractmethods__ = frozenset()
    processor = kind.__new__(kind)
    processor.info = SimpleNamespace(ctx=SimpleNamespace(get_mm_config=lambda: config), model_id="/a/path")
    inputs = ProcessorInputs([], {"image": Items([data])}, {"image": [uuid]} if uuid else None)
    ((name,),) = processor._get_mm_hashes(inputs).values()
    return name


def test_an_image_is_called_by_what_it_is_and_how_it_is_seen():
    assert named().startswith(MEDIUM)
    assert named() == named(mm_processor_cache_gb=1.0, mm_processor_cache_type="shm")
    others = [
        named(data=b"dog"), named(algorithm="sha256"), named(mm_processor_kwargs={"size": 3}),
        named(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}), named(mm_encoder_attn_dtype="fp8"),
    ]  # fmt: skip
    assert len({named(), *others}) == 1 + len(others)


@pytest.mark.parametrize("uuid", ["logo", f"{MEDIUM}{'0' * 64}", 2 * MEDIUM])
def test_no_client_can_call_an_image_so(uuid):
    assert not named(uuid).startswith(MEDIUM)


def test_where_more_than_itself_says_what_an_image_comes_to_it_has_no_name():
    assert not named(video_pruning_rate=0.5).startswith(MEDIUM)
    assert not named(caches=lambda self, inputs, timing: None).startswith(MEDIUM)


def test_the_scheduler_skips_a_request_whose_step_has_not_come():
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "next_decode_eligible_step" in inspect.getsource(Scheduler.schedule), "held requests would go on decoding"


def test_what_holds_a_request_is_overwritten_only_for_the_second_model_runner():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(AsyncScheduler._update_after_schedule)
    guard = source.index("if self.use_v2_model_runner:")
    assert source.index("next_decode_eligible_step") > guard, "check_scheduling refuses too little"
    assert "next_decode_eligible_step" not in inspect.getsource(Scheduler._update_after_schedule)


def test_a_cpus_way_to_keep_keys_can_be_asked_for():
    """Keys lie differently in a block for AMX and for AVX-512: such servers must not pair."""
    from vllm.v1.attention.backends import cpu_attn

    found = tuple(inspect.signature(cpu_attn._get_attn_isa).parameters)
    assert found == ("dtype", "block_size", "head_size", "kv_cache_dtype")


def test_schedulers_and_caches_say_what_we_read():
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    assert "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
    assert hasattr(KVCacheConfig, "transfer_group_ids")
    assert {"layer_names", "kv_cache_spec", "enable_kv_transfer"} <= {
        *dir(KVCacheGroupSpec),
        *KVCacheGroupSpec.__dataclass_fields__,
    }
    for name in ("shapes", "dtypes", "block_size", "state_content_size_bytes", "tp_replicated"):
        assert name in {*dir(MambaSpec), *MambaSpec.__dataclass_fields__}, f"MambaSpec.{name} is gone"


def test_the_cpu_kernel_still_rotates_other_rows_when_heads_are_a_dimension():
    """Why LFM2 wants `-rotary_embedding` (cases.py, docs/guides/vllm.md). When this fails, it does no longer."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    tokens, heads, size = 8, 4, 16
    query, positions = torch.rand(tokens, heads, size), torch.arange(tokens)
    angles = torch.outer(torch.arange(float(tokens)), torch.rand(size // 2))
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    flat, with_heads = query.reshape(tokens, -1).clone(), query.clone()
    _custom_ops.rotary_embedding(positions, flat, flat.clone(), size, cache, True)
    _custom_ops.rotary_embedding(positions, with_heads, with_heads.clone(), size, cache, True)
    assert not torch.equal(flat.view_as(query), with_heads)


def test_an_engine_is_found_while_it_makes_its_connector():
    """Otherwise servers that wait for a landing would go on asking for it."""
    import queue

    from vllm.v1.engine.core import EngineCoreProc

    from engine.vllm.internals import engine_around

    source = inspect.getsource(EngineCoreProc.__init__)
    assert source.index("self.input_queue =") < source.index("super().__init__("), "made before its scheduler"
    assert source.index("self.output_queue =") < source.index("super().__init__("), "made before its scheduler"

    class Maker:
        def make(self):
            return engine_around()

    engine = EngineCoreProc.__new__(EngineCoreProc)
    engine.input_queue, engine.output_queue = queue.Queue(), queue.Queue()
    around = Maker.make(engine)
    assert not around.has_input()
    assert not around.has_output()
    engine.input_queue.put(1)
    engine.output_queue.put(1)
    assert around.has_input()
    assert around.has_output()
    assert Maker().make().has_input(), "unknown: as if there were always some"
    assert not Maker().make().end(object(), None)


def test_mains_of_processes_are_known_and_close_the_connector_last():
    """What `engine.vllm.server.leaving` stands on: a process that leaves at once has nothing left to do."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.worker.gpu_worker import Worker

    assert "engine_core.shutdown()" in inspect.getsource(EngineCoreProc.run_engine_core)
    assert "worker.shutdown()" in inspect.getsource(WorkerProc.worker_main)
    source = inspect.getsource(EngineCore.shutdown)
    assert source.index("self.model_executor.shutdown()") < source.index("self.scheduler.shutdown()")
    assert "ensure_kv_transfer_shutdown()" in inspect.getsource(Worker.shutdown)


def test_a_request_is_ended_by_what_the_engine_looks_at_between_its_steps():
    """What `EngineAround.end` stands on."""
    import queue
    from types import SimpleNamespace

    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    from engine.vllm.internals import _end

    assert "self.aborts_queue" in inspect.getsource(EngineCore.__init__)
    assert "_process_aborts_queue()" in inspect.getsource(EngineCore.step)
    assert "_process_aborts_queue()" in inspect.getsource(EngineCore.step_with_batch_queue)
    assert "output_queue" in inspect.getsource(EngineCoreProc.__init__)
    engine = SimpleNamespace(output_queue=queue.Queue(), aborts_queue=queue.Queue())
    assert _end(engine, SimpleNamespace(request_id="r", client_index=3), {"delivered": False})
    client, outputs = engine.output_queue.get_nowait()
    (output,) = outputs.outputs
    assert (client, output.request_id, output.kv_transfer_params) == (3, "r", {"delivered": False})
    assert output.finish_reason is FinishReason.ABORT
    assert engine.aborts_queue.get_nowait() == ["r"]


def test_answers_go_on_through_what_the_front_end_has():
    """What `internals.continue_answers` stands on: how answers are asked for, what they are made of, and who spells them."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    assert tuple(inspect.signature(AsyncLLM.generate).parameters)[:4] == (
        "self",
        "prompt",
        "sampling_params",
        "request_id",
    )
    assert hasattr(AsyncLLM, "get_tokenizer")
    assert {"prompt_token_ids", "outputs", "finished", "num_cached_tokens"} <= {
        *inspect.signature(RequestOutput.__init__).parameters
    }
    assert {"text", "token_ids", "finish_reason", "stop_reason"} <= set(CompletionOutput.__dataclass_fields__)
    params = SamplingParams(max_tokens=9, min_tokens=3, stop=["x"], extra_args={"kv_transfer_params": {}}).clone()
    assert (params.max_tokens, params.min_tokens, params.stop, params.detokenize) == (9, 3, ["x"], True)
    for name in ("from_new_request", "update", "get_next_output_text", "output_token_ids", "num_output_tokens"):
        assert hasattr(IncrementalDetokenizer, name), f"IncrementalDetokenizer.{name} is gone"
    VLLMValidationError("text", parameter="name")


def test_one_server_has_a_port_for_each_rank_and_asks_the_one_that_is_named():
    """What `engine.vllm.server.rank_ports` and `internals.listen_also` stand on."""
    import uvicorn
    from vllm.entrypoints.launchers import launcher
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    assert "data_parallel_rank" in inspect.signature(AsyncLLM.generate).parameters
    chooses = inspect.getsource(DPLBAsyncMPClient.get_core_engine_for_request)
    assert "request.data_parallel_rank) is None" in chooses
    serves = inspect.getsource(launcher.serve_http)
    assert serves.index("app.state.server = server") < serves.index("server.serve(")
    assert "config.http_protocol_class(" in inspect.getsource(launcher.NoSignalServer._connect)
    assert "for server in self.servers:" in inspect.getsource(uvicorn.Server.shutdown)


def test_streams_name_their_tokens_where_the_middleware_looks():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponseStreamChoice

    from engine.vllm.server.answers import NOT_DONE, named_tokens

    choice = CompletionResponseStreamChoice(index=0, text="x", prompt_token_ids=[7], token_ids=[5, 6])
    event = choice.model_dump_json(exclude_unset=True).encode()
    assert named_tokens(event) == 2
    assert b'"prompt_token_ids":[7]' in event
    known = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert {"return_token_ids", "kv_transfer_params", *NOT_DONE} - known <= {"logits_processors"}


def test_this_version_is_one_that_was_tested():
    import vllm

    from engine.vllm.version import is_tested

    assert is_tested(vllm.__version__), "run the matrix, then add to TESTED_VERSIONS"


def test_another_version_is_a_warning(caplog):
    from engine.vllm.connector import check_version

    check_version("0.99.1+cpu")
    assert "0.99.1" in caplog.text
    assert "tested" in caplog.text


def test_no_model_that_generates_is_refused_by_its_name() -> None:
    from vllm.model_executor.models import registry

    names = [*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS]
    assert len(names) > 200
    assert [name for name in names if refusal_of({"architectures": [name]})] == []
