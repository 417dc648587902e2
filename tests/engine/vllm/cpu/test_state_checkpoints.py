"""States at the ends of a chunk's pieces, said by a scan that says the last one of a sequence alone."""

from types import SimpleNamespace
from typing import Any

import torch

from engine.vllm.cpu.state_checkpoints import store_checkpoint, with_states_of_pieces

LENGTHS = (5, 4)  # two sequences, cut into pieces of at most 3 tokens
BORDERS = [0, 3, 5, 8, 9]


def decaying_sums(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, out: Any, *, initial_states: Any, cu_seqlens: Any, D: Any
) -> torch.Tensor:
    """As vLLM's CPU scan: the outputs of all tokens, and each sequence's last state."""
    states = []
    for number, (start, stop) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)):
        state = torch.zeros(1) if initial_states is None else initial_states[number].clone()
        for token in range(start, stop):
            state = state * A + dt[token] * B[token] * x[token]
            out[token] = C[token] * state + D * x[token]
        states.append(state)
    return torch.stack(states)


def scanned(scan: Any, begin: torch.Tensor | None, **asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, b, c = torch.rand(4, sum(LENGTHS), 1, generator=torch.Generator().manual_seed(3))
    out = torch.zeros_like(x)
    ends = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    states = scan(x, dt, 0.5, b, c, 3, out, initial_states=begin, cu_seqlens=ends, D=0.1, **asked)
    return states, out


def test_states_of_pieces_are_those_of_prompts_that_end_there() -> None:
    for begin in (None, torch.tensor([[2.0], [0.0]])):
        expected, out = scanned(decaying_sums, begin)
        asked = {
            "return_intermediate_states": True,
            "cu_chunk_seqlens": torch.tensor(BORDERS),
            "seq_idx": torch.tensor([0, 0, 1, 1]),
            "last_chunk_indices": torch.tensor([1, 3]),
        }
        states, pieced = scanned(with_states_of_pieces(decaying_sums), begin, **asked)
        assert len(states) == len(BORDERS) - 1
        assert torch.allclose(states[[1, 3]], expected)
        assert torch.allclose(pieced, out)
        assert not torch.allclose(states[0], states[1])


def test_a_scan_that_need_not_say_them_is_left_alone() -> None:
    plain, out = scanned(decaying_sums, None)
    states, same = scanned(with_states_of_pieces(decaying_sums), None, return_intermediate_states=False)
    assert torch.equal(plain, states)
    assert torch.equal(out, same)


def test_a_checkpoint_is_written_into_its_block_and_a_row_without_one_writes_nothing() -> None:
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor([0, 3]), state_indices=torch.tensor([0, 2]))
    x = torch.arange(9.0).unsqueeze(0)
    conv, ssm = torch.full((3, 1, 4), -1.0), torch.full((3, 1), -1.0)
    chunks, starts = torch.tensor([[5.0], [6.0], [7.0], [8.0]]), torch.tensor([0, 5, 9])
    store_checkpoint(checkpoint, torch.tensor([0, 2]), x, conv, chunks, ssm, starts, state_len=2)
    assert conv[2].tolist() == [[6.0, 7.0, -1.0, -1.0]]  # the two before token 5 + 3; drafts' places stay
    assert ssm.flatten().tolist() == [-1.0, -1.0, 7.0]
    assert (conv[:2] == -1.0).all()
