"""What vLLM's CPU build (0.32) lacks, mended in the processes of its ranks: it would die of each, with or without a connector.

`tests/vllm/test_contract.py` says of each that it is still lacking.
"""

import functools
import glob
import os
from pathlib import Path
from typing import Any

from engine.vllm.cpu.drafted_states import (
    delta_rule,
    keep_at_borders,
    move_ahead,
    moved_states,
    token_by_token,
    update_columns,
)
from engine.vllm.cpu.state_checkpoints import store_checkpoint, with_states_of_pieces
from engine.vllm.cpu.uneven_shares import gather_shares, own_share_of_sum
from engine.vllm.server.seeds import with_seeds_back, without_unread_seeds


def mend_eager_stages() -> None:
    """vLLM's CPU runner makes what a later stage receives into while it warms up what it has compiled. One that compiles
    nothing (`--enforce-eager`) dies of its absence in its first step, with or without a connector: it is made then.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "sync_and_gather_intermediate_tensors" in vars(CPUModelRunner):
        return
    receive = CPUModelRunner.sync_and_gather_intermediate_tensors

    @functools.wraps(receive)
    def receive_somewhere(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return receive(self, *args, **kwargs)

    CPUModelRunner.sync_and_gather_intermediate_tensors = receive_somewhere


def mend_seeded_chunks() -> None:
    """A prompt in several chunks samples a token after each, and vLLM takes a seeded generator back for those that are not used:
    by an offset, which a CPU's generators do not have. Its CPU build (0.32) dies of it, with or without a connector.
    Here those samples leave the generator alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if "_sample" not in vars(CPUModelRunner):
        CPUModelRunner._sample = without_unread_seeds(CPUModelRunner._sample)
        CPUModelRunner._bookkeeping_sync = with_seeds_back(CPUModelRunner._bookkeeping_sync)


def mend_state_checkpoints() -> None:
    """With prefix caching, states of Mamba 2 at a border of blocks are exported from inside a chunk (`align`). The CPU build's
    scan does not say them, and it has no kernel that writes them: the first prompt beyond a border ends the server ("index is
    out of bounds"). Other models never ask for them.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    if mamba_mixer2.store_prefill_checkpoint is not store_checkpoint:
        mamba_mixer2.store_prefill_checkpoint = store_checkpoint
        ssd_combined._mamba_chunk_scan_combined_fwd = with_states_of_pieces(ssd_combined._mamba_chunk_scan_combined_fwd)


def mend_drafted_states() -> None:
    """With drafts the CPU build computes recurrent states wrongly, or dies. Its convolutions of Mamba 2 and of LFM2 do not
    look at what has been accepted, nor does its scan of Mamba 2. The convolution of gated delta nets loses its place when a
    step has fewer drafts than the one before. With prefix caching the states are moved by kernels of Triton, which it lacks
    ("'function' object is not subscriptable").
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    if mamba_mixer2.causal_conv1d_update is update_columns:
        return
    mamba_mixer2.causal_conv1d_update = short_conv.causal_conv1d_update = update_columns
    mamba_mixer2.selective_state_update = token_by_token(mamba_mixer2.selective_state_update)
    # It knows drafts, and is PyTorch otherwise.
    short_conv.ShortConv.forward_native = short_conv.ShortConv.forward_cuda
    gdn_attention._cpu_gdn_attention_spec_aware = _delta_net_with_drafts
    MambaSpecDecodeGPUContext._populate_metadata = _note_moved_states
    MambaSpecDecodeGPUContext.run_fused_precopy = _move_ahead
    MambaSpecDecodeGPUContext.run_fused_postprocess = _keep_at_borders


def _delta_net_with_drafts(layer: Any, metadata: Any, mixed_qkv: Any, b: Any, a: Any, out: Any, *widths: int) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    columns, weight = gdn_attention._conv_buffer_view(layer), gdn_attention._unpacked_conv_weight(layer)
    delta_rule(layer, metadata, mixed_qkv, b, a, out, columns, weight)


def _note_moved_states(context: Any, config: Any, layers: Any, functions: Any, tables: Any, _: Any) -> None:
    from vllm.v1.worker.mamba_utils import _get_mamba_spec_for_layer

    def copy_of(group: Any, name: str) -> Any:
        return functions[_get_mamba_spec_for_layer(group, name).mamba_type]

    context.moved = moved_states(config.kv_cache_groups, context.mamba_group_ids, layers, copy_of, tables)
    context.is_initialized = True


def _move_ahead(
    context: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: Any
) -> None:
    move_ahead(context.moved, num_reqs, state_idx_gpu, src_col_gpu, token_bias_gpu)


def _keep_at_borders(
    context: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    out, accepted = context.num_accepted_tokens_out, num_accepted_tokens_gpu
    out[:num_reqs] = accepted[:num_reqs]
    ends = (num_computed_tokens_gpu + num_scheduled_tokens_gpu - num_draft_tokens_gpu)[:num_reqs]
    for row in keep_at_borders(context.moved, num_reqs, context.block_size, accepted, mamba_state_idx_gpu, ends):
        out[row] = 1


def mend_exchanges() -> None:
    """Data parallel ranks of a mixture of experts exchange tokens, each its own number of them. The CPU build's communicator
    has no way to (NotImplementedError in the first step)."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if "all_gatherv" not in vars(CpuCommunicator):
        CpuCommunicator.all_gatherv = gather_shares
        CpuCommunicator.reduce_scatterv = own_share_of_sum


def unlink_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Takes the names off the memory that ranks of vLLM's CPU build share: it never does so itself, and each of its starts left
    4 MB for every rank. On a rank once all of them have it, which they do as soon as they have loaded the model.
    """
    ident = os.environ.get("VLLM_DIST_IDENT", "")
    for path in folder.glob(f"{glob.escape(ident)}-*-cpushm_*") if ident else ():
        path.unlink(missing_ok=True)  # by another rank
