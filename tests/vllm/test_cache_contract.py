"""What of vLLM's caches the connector stands on: specs, packings, pieces of blocks, copies. As test_contract.py has it."""

import dataclasses
import importlib.util
import inspect
from pathlib import Path

import pytest

from engine.vllm.cpu import cpu_build
from engine.vllm.specs import CONVOLVED

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),  # importing vLLM is slow
    pytest.mark.filterwarnings("default"),  # what its import warns of is not ours to mend
]


def test_states_inside_a_last_chunk_are_offered():
    """What Mamba 2 exports there, as (group, block, tokens)."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import KVConnectorBlockState

    from engine.vllm.internals import state_offers
    from engine.vllm.scheduler_side.steps import StateOffer

    state = KVConnectorBlockState({"r"}, lambda _: ([],), {"r": [(1, 77, 512)]})
    assert state_offers(state) == {"r": [StateOffer(table=1, block=77, length=512)]}
    assert "append(\n                    (group_id, block.block_id, boundary_tokens)" in inspect.getsource(
        KVCacheManager.take_boundary_state_offloads
    )


def test_all_that_a_spec_may_say_is_known():
    """A field that is not would be ignored while its value is the default, and refused otherwise."""
    from vllm.v1 import kv_cache_interface

    from engine.vllm.specs import ATTENTION, KNOWN, STATE

    for kind in (*ATTENTION, STATE):
        fields = {field.name for field in dataclasses.fields(getattr(kv_cache_interface, kind))}
        assert fields <= KNOWN, f"{kind}: {sorted(fields - KNOWN)}"
    assert "kv_cache_specs" in {field.name for field in dataclasses.fields(kv_cache_interface.UniformTypeKVCacheSpecs)}


def test_what_backends_make_of_a_spec_is_told_apart():
    """nvfp4 with FlashInfer keeps all keys of a rank before its values, so a part for two ranks is not half of one for one."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, SparseCacheRole

    from engine.vllm.specs import packing

    plain = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert packing(plain, 1, "fp8") == packing(plain, 8, "fp8") == ""
    nvfp4 = {
        ranks: dataclasses.replace(
            plain,
            num_kv_heads=8 // ranks,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=2 * 8 // ranks,  # FlashInferBackend.customize_spec
            state_content_bytes=72,
        )
        for ranks in (1, 2)
    }
    assert packing(nvfp4[1], 1, "fp8") != packing(nvfp4[2], 2, "fp8")
    indexer = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    assert "indexer" in packing(indexer, 1, "fp8")


def test_platforms_and_backends_say_what_a_packing_is_made_of():
    from vllm.config import CompilationConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.worker.utils import select_common_block_size

    assert str(current_platform.fp8_dtype()).startswith("torch.float8")
    assert current_platform.is_rocm() is False
    assert hasattr(AttentionBackend, "get_name")
    assert "static_forward_context" in {field.name for field in dataclasses.fields(CompilationConfig)}
    assert list(inspect.signature(select_common_block_size).parameters) == [
        "kv_manager_block_size", "backends", "kv_cache_specs",
    ]  # fmt: skip


def test_pieces_of_a_block_follow_each_other():
    """What `blocks_of` stands on, where a backend's blocks are smaller than vLLM's."""
    from vllm.v1.kv_cache_interface import create_kv_cache_views, group_kernel_blocks

    assert "(num_blocks * ratio, ...)" in (group_kernel_blocks.__doc__ or "")
    assert "block_stride != dense_page_size" in inspect.getsource(create_kv_cache_views)


def test_copies_and_registered_memory_are_where_we_look_for_them():
    from vllm._custom_ops import swap_blocks_batch
    from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

    from engine.vllm import internals

    assert list(inspect.signature(swap_blocks_batch).parameters)[:3] == ["src_ptrs", "dst_ptrs", "sizes"]
    assert list(inspect.signature(host_register).parameters) == ["ptr", "num_bytes"]
    assert list(inspect.signature(host_unregister).parameters) == ["ptr"]
    assert internals.direct_copies() is None, "on a CPU nothing is registered"


def test_microbatches_are_said_where_we_look_for_them():
    from vllm.config import ParallelConfig

    assert isinstance(ParallelConfig.use_ubatching, property)


def test_a_state_has_room_for_drafts_behind_the_first_columns_of_its_convolution():
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    assert not is_conv_state_dim_first()
    assert CONVOLVED.keys() <= MambaAttentionBackendEnum.__members__.keys()
    shapes = {
        "MAMBA2": lambda drafts: Shapes.mamba2_state_shape(1, 64, 1, 4, 16, 8, 4, num_spec=drafts),
        "GDN_ATTN": lambda drafts: Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 8, 4, num_spec=drafts),
        "SHORT_CONV": lambda drafts: Shapes.short_conv_state_shape(1, 64, 4, num_spec=drafts),
    }
    assert shapes.keys() == CONVOLVED.keys()
    for kind, shape_of in shapes.items():
        (plain, *rest), (drafted, *others) = shape_of(0), shape_of(3)
        assert len(rest) + 1 == CONVOLVED[kind]
        assert rest == others
        assert (plain[0], drafted[0]) == (3, 6)
        assert plain[1:] == drafted[1:]


def test_the_cpu_build_still_computes_no_states_with_drafts():
    """Its convolutions are not told what was accepted, and Triton moves the states; ours take the places of these."""
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d, gdn_attention
    from vllm.v1.worker import mamba_utils

    lacking = causal_conv1d.causal_conv1d_update_cpu
    assert "num_accepted_tokens" not in inspect.signature(lacking).parameters
    assert mamba_mixer2.causal_conv1d_update is short_conv.causal_conv1d_update is lacking
    with pytest.raises(TypeError, match="not subscriptable"):
        mamba_utils.postprocess_mamba_fused_kernel[1]
    context = mamba_utils.MambaSpecDecodeGPUContext
    places = {
        cpu_build._note_moved_states: context._populate_metadata,
        cpu_build._move_ahead: context.run_fused_precopy,
        cpu_build._keep_at_borders: context.run_fused_postprocess,
    }
    for ours, theirs in places.items():
        assert len(inspect.signature(ours).parameters) == len(inspect.signature(theirs).parameters)
    for ours, theirs in list(places.items())[1:]:
        assert list(inspect.signature(ours).parameters)[1:] == list(inspect.signature(theirs).parameters)[1:]
    delta_net = list(inspect.signature(gdn_attention._cpu_gdn_attention_spec_aware).parameters)
    assert delta_net == ["layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out", "width", "state_len"]
    assert callable(short_conv.ShortConv.forward_cuda)


def test_a_step_says_which_of_its_tokens_are_drafts():
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.output import SchedulerOutput

    assert "scheduled_spec_decode_tokens" in {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert "use_replayssm" in {field.name for field in dataclasses.fields(CacheConfig)}


def test_the_cpu_build_still_loses_states_of_mamba_2_that_drafts_were_accepted_in():
    """It goes on from the first block whatever was accepted, and leaves the state after the last draft there. With what was
    accepted it would go on from that token's block, and leave the first token's state in the first."""
    import torch
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

    heads, width, tokens, blocks = 1, 2, 3, torch.tensor([[1, 2, 3]], dtype=torch.int32)
    drawn = torch.Generator().manual_seed(1)

    def step(accepted: int) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.arange(4.0)[:, None, None, None].expand(4, heads, width, width).contiguous()
        out, ones = torch.zeros(tokens, heads, width), torch.ones(heads, width)
        inputs = torch.rand(tokens, heads, width, generator=drawn.manual_seed(1))
        selective_state_update(
            states, inputs, inputs, -torch.ones(heads, width, width), inputs, inputs, ones, dt_bias=ones,
            dt_softplus=True, state_batch_indices=blocks, dst_state_batch_indices=blocks, out=out,
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
            cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        )  # fmt: skip
        return out, states

    (first, states), (third, _) = step(1), step(3)
    assert torch.equal(first, third), "it looks at what was accepted: `token_by_token` need not be any more"
    assert torch.equal(states[1], states[3])


def test_the_second_runner_moves_states_after_its_word_and_before_the_step_is_over() -> None:
    """So a state before drafts is saved at that word. The first runner says none: there no padding is ever right."""
    runner = source_of("vllm.v1.worker.gpu.model_runner")
    forward, sampling = runner.index("self.kv_connector.finish_forward()"), runner.index("def sample_tokens")
    moved = runner.index("self.postprocess_sampled(", sampling)
    assert forward < sampling < moved < runner.index("kv_connector.post_forward(", moved)
    assert "self.model_state.postprocess_state(" in runner
    assert "finish_forward" not in source_of("vllm.v1.worker.gpu_model_runner")


def test_what_pads_a_prompt_is_verified_by_the_second_runner() -> None:
    """As token 0, which a model may say. The scheduler says -1, which none does, and the first runner takes that."""
    assert "self.draft_tokens[req_idx].zero_()" in source_of("vllm.v1.worker.gpu.states")
    scheduler = source_of("vllm.v1.core.sched.scheduler")
    assert "padded_num_tokens = 1 + self.num_spec_tokens" in scheduler


def source_of(module: str) -> str:
    """Of a module that may need Triton to be imported."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text()
