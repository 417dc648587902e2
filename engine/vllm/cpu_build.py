"""What vLLM's CPU build (0.32) lacks, mended in the processes of its ranks: it would die of each, with or without a connector.

`tests/vllm/test_contract.py` says of each that it is still lacking.
"""

import functools
import glob
import os
from pathlib import Path
from typing import Any

from engine.vllm.server.seeds import with_seeds_back, without_unread_seeds
from engine.vllm.worker_side.state_checkpoints import store_checkpoint, with_states_of_pieces
from engine.vllm.worker_side.uneven_shares import gather_shares, own_share_of_sum


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
