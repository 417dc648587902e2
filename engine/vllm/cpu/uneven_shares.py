"""Exchanges of tokens among ranks that have different numbers of them, over groups of PyTorch's that want equal shares.

Ranks of a mixture of experts gather each other's tokens before its layers, and add up what became of them after
(`engine.vllm.cpu.cpu_build.mend_exchanges`).
"""

from collections.abc import Sequence
from typing import Any

import torch


def gather_shares(
    communicator: Any, shares: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """What all ranks have, in their order. As vLLM's `all_gatherv`: along the first dimension, of one tensor or of several."""
    if isinstance(shares, list):
        return [_gathered(communicator, share, sizes) for share in shares]
    return _gathered(communicator, shares, sizes)


def own_share_of_sum(
    communicator: Any, parts: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """A rank's own tokens out of the sum of what all ranks have of all tokens. As vLLM's `reduce_scatterv`."""
    total, rank = parts.clone(), communicator.rank_in_group
    communicator.device_group.allreduce([total]).wait()
    known = sizes or [len(parts) // communicator.world_size] * communicator.world_size
    start = sum(known[:rank])
    return total[start : start + known[rank]].contiguous()


def _gathered(communicator: Any, share: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    known = sizes or [len(share)] * communicator.world_size
    padded = share.new_zeros(max(known), *share.shape[1:])
    padded[: len(share)] = share
    found = [torch.empty_like(padded) for _ in known]
    communicator.device_group.allgather([found], [padded]).wait()
    return torch.cat([each[:size] for each, size in zip(found, known, strict=True)])
