"""States of Mamba 2 after each piece of a chunk, on a CPU: vLLM's prefix cache keeps one at the last border of a prompt's blocks.

vLLM's scan on a GPU says the states at the ends of all pieces. A kernel writes the one at a border into its block. The scan of
its CPU build says a sequence's last state alone, and it has no such kernel (`engine.vllm.cpu.cpu_build.mend_state_checkpoints`).
"""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def with_states_of_pieces(scan: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`scan` of a batch, which says its last states, so that it says those after every piece where it is asked to."""

    @functools.wraps(scan)
    def scanning(x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, out: Any, **options: Any) -> torch.Tensor:
        if not options.pop("return_intermediate_states", False):
            return scan(x, dt, A, B, C, chunk_size, out, **options)
        borders, owners = options.pop("cu_chunk_seqlens").tolist(), options.pop("seq_idx").tolist()
        begin, gate = options.pop("initial_states"), options.pop("z", None)
        for of_sequences in ("cu_seqlens", "last_chunk_indices"):
            options.pop(of_sequences)
        tokens = {"x": x, "dt": dt, "B": B, "C": C, "out": out} | ({} if gate is None else {"z": gate})
        states: list[torch.Tensor] = []
        for number, (start, stop) in enumerate(pairwise(borders)):
            follows = number > 0 and owners[number] == owners[number - 1]
            first: torch.Tensor | None = None if begin is None else begin[owners[number]].unsqueeze(0)
            state = states[-1] if follows else first
            piece = {name: each[start:stop] for name, each in tokens.items()}
            length = torch.tensor([0, stop - start], dtype=torch.int32)
            states.append(scan(A=A, chunk_size=chunk_size, initial_states=state, cu_seqlens=length, **piece, **options))
        return torch.cat(states)

    return scanning


def store_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Writes each row's state at its checkpoint into the block that vLLM has for it; 0 of a row: it has none."""
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset <= 0:
            continue
        block, end = int(checkpoint.state_indices[row]), int(query_start_loc[row]) + offset
        conv_state[block, :, :state_len] = x[:, end - state_len : end]
        ssm_state[block] = chunk_states[int(chunk_idx[row])]
