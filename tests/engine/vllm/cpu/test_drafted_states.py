"""States of servers with drafts, by PyTorch: they are those of the accepted tokens alone, whatever was drafted."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.vllm.cpu.drafted_states import (
    MovedStates,
    delta_rule,
    keep_at_borders,
    move_ahead,
    moved_states,
    token_by_token,
    update_columns,
)

CHANNELS, KEPT, DRAFTS, BLOCK = 8, 3, 4, 2
STEPS = [
    (1, 1),
    (5, 3),
    (1, 1),
    (3, 3),
    (5, 5),
    (2, 1),
    (5, 1),
    (4, 2),
]  # tokens with their drafts, and how many were accepted
HEADS, WIDTH = 2, 2


def weights(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def column_states() -> torch.Tensor:
    """[blocks, channels, columns], with what an earlier request left in the room for drafts."""
    return weights(6, KEPT + DRAFTS, CHANNELS, seed=9).transpose(1, 2)


def steps() -> list[tuple[torch.Tensor, int]]:
    """Each with its accepted tokens first, which are of one series; drafts are anything."""
    accepted = iter(weights(sum(number for _, number in STEPS), CHANNELS, seed=2))
    made = []
    for step, (tokens, number) in enumerate(STEPS):
        drafts = weights(tokens - number, CHANNELS, seed=100 + step)
        made.append((torch.cat([torch.stack([next(accepted) for _ in range(number)]), drafts]), number))
    return made


def test_a_convolution_goes_on_from_what_was_accepted_however_many_drafts_there_were() -> None:
    states, weight, bias = column_states(), weights(CHANNELS, KEPT + 1), weights(CHANNELS)
    series, before = states[BLOCK, :, :KEPT].T.clone(), 1
    others = states[[0, 1, 3, 4, 5]].clone()
    for tokens, accepted in steps():
        made = update_columns(
            torch.cat([tokens, tokens]), states, weight, bias, "silu",
            conv_state_indices=torch.tensor([[BLOCK, 4], [0, 0]]), num_accepted_tokens=torch.tensor([before, 1]),
            query_start_loc=torch.tensor([0, len(tokens), 2 * len(tokens)]), max_query_len=DRAFTS + 1,
        )  # fmt: skip
        longer = torch.cat([series, tokens])[-(KEPT + len(tokens)) :]
        expected = functional.silu(functional.conv1d(longer.T[None], weight[:, None], bias, groups=CHANNELS)[0].T)
        assert torch.allclose(made[: len(tokens)], expected, atol=1e-5)
        assert not made[len(tokens) :].any(), "a row without a block is padding"
        series, before = torch.cat([series, tokens[:accepted]]), accepted
    assert torch.equal(states[[0, 1, 3, 4, 5]], others)


def scanned(state: torch.Tensor, x: torch.Tensor, *rest: Any, **settings: Any) -> None:
    """A kernel that computes one series in the block that it starts from: a state is the sum of its tokens."""
    for row, block in enumerate(settings["state_batch_indices"].tolist()):
        state[block] += x[row]
        settings["out"][row] = state[block]


def test_a_scan_starts_each_token_from_a_copy_and_notes_each_state() -> None:
    """Two requests, the second with fewer drafts; the first had two of its tokens accepted, and starts from that one's block."""
    states, tokens = torch.zeros(8, 1), torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    states[[1, 2, 4]] = torch.tensor([[100.0], [200.0], [400.0]])
    out, blocks = torch.zeros(4, 1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    rest = (torch.zeros(4), torch.zeros(1), torch.zeros(4), torch.zeros(4))
    update = token_by_token(scanned)
    settings = {"num_accepted_tokens": torch.tensor([2, 1]), "cu_seqlens": torch.tensor([0, 3, 4])}
    update(states, tokens, *rest, out=out, state_batch_indices=blocks, **settings)
    assert states.flatten().tolist() == [0, 201, 203, 207, 408, 0, 0, 0]
    assert out.flatten().tolist() == [201, 203, 207, 408]


def test_a_scan_without_drafts_is_the_kernels_own() -> None:
    states, out, rest = torch.zeros(2, 1), torch.zeros(1, 1), (None,) * 4
    update = token_by_token(scanned)
    update(states, torch.ones(1, 1), *rest, out=out, state_batch_indices=torch.tensor([1]), num_accepted_tokens=None)
    assert states.flatten().tolist() == [0, 1]


def delta_net() -> Any:
    return SimpleNamespace(
        kv_cache=(None, weights(8, HEADS, WIDTH, WIDTH, seed=7)),
        conv1d=SimpleNamespace(bias=None),
        activation="silu",
        A_log=weights(HEADS, seed=3),
        dt_bias=weights(HEADS, seed=4),
        rearrange_mixed_qkv=lambda mixed: [
            mixed[None, :, start : start + 2 * heads].reshape(1, len(mixed), heads, WIDTH)
            for start, heads in ((0, 1), (2, 1), (4, HEADS))
        ],
    )


def metadata(**fields: Any) -> Any:
    names = ["sequence_masks", "query_start_loc", "token_indx", "state_indices_tensor"]
    absent = dict.fromkeys(
        [*(f"{kind}_{name}" for kind in ("spec", "non_spec") for name in names), "has_initial_state"]
    )
    return SimpleNamespace(**absent | {"num_prefills": 0, "num_decodes": 0, "num_spec_decodes": 0} | fields)


def computed(layer: Any, columns: torch.Tensor, tokens: torch.Tensor, step: Any) -> torch.Tensor:
    out = torch.zeros(len(tokens), HEADS, WIDTH)
    gates = tokens[:, :HEADS], tokens[:, HEADS : 2 * HEADS]
    step.num_actual_tokens = len(tokens)
    delta_rule(layer, step, tokens, *gates, out, columns, weights(CHANNELS, KEPT + 1))
    return out


def prefill(block: int, *, begins: bool) -> dict[str, Any]:
    return {
        "num_prefills": 1,
        "non_spec_state_indices_tensor": torch.tensor([block]),
        "has_initial_state": torch.tensor([not begins]),
    }


def whole(block: int, num_tokens: int) -> Any:
    """A prompt in one chunk."""
    return metadata(**prefill(block, begins=True), non_spec_query_start_loc=torch.tensor([0, num_tokens]))


def test_a_gated_delta_net_goes_on_from_the_state_of_the_last_accepted_token() -> None:
    """Beside a prompt in chunks, which begins in a block that has been used."""
    alone, layer = delta_net(), delta_net()
    own, columns = column_states()[:, :, :KEPT].clone(), column_states()
    prompt = weights(9, CHANNELS, seed=5)
    first = computed(layer, columns, prompt, whole(BLOCK, 9))
    before, series, answers = 1, prompt, [first]
    for number, (tokens, accepted) in enumerate(steps()):
        beside = weights(2, CHANNELS, seed=50 + number)
        spec = {
            "spec_sequence_masks": torch.tensor([False, True]), "num_spec_decodes": 1,
            "spec_query_start_loc": torch.tensor([0, len(tokens)]), "spec_token_indx": torch.arange(2, 2 + len(tokens)),
            "spec_state_indices_tensor": torch.tensor([[BLOCK, 3, 4, 5, 6]]),
            "num_accepted_tokens": torch.tensor([before]),
            "non_spec_query_start_loc": torch.tensor([0, 2]), "non_spec_token_indx": torch.arange(2),
        }  # fmt: skip
        step = metadata(**spec, **prefill(1, begins=number == 0))
        out = computed(layer, columns, torch.cat([beside, tokens]), step)
        answers.append(out[2:][:accepted])
        series, before = torch.cat([series, tokens[:accepted]]), accepted
    expected = computed(alone, own, series, whole(BLOCK, len(series)))
    assert torch.allclose(torch.cat(answers), expected, atol=1e-4)
    told = torch.cat([weights(2, CHANNELS, seed=50 + number) for number in range(len(STEPS))])
    computed(alone, own, told, whole(1, len(told)))
    assert torch.allclose(layer.kv_cache[1][1], alone.kv_cache[1][1], atol=1e-4)
    assert torch.allclose(columns[1, :, :KEPT], own[1], atol=1e-5)


def conv_copy() -> None: ...


def state_copy() -> None: ...


def moved(columns: torch.Tensor, states: torch.Tensor) -> list[MovedStates]:
    groups = [None, SimpleNamespace(layer_names=["s"])]
    layers = {"s": SimpleNamespace(kv_cache=(columns, states))}
    table = torch.tensor([[0, 1, 2, 3, 4], [0, 5, 6, 7, 0]])
    return moved_states(groups, [1], layers, lambda group, name: (conv_copy, state_copy), [table])


def test_a_request_takes_its_state_along_to_another_block() -> None:
    columns, states = weights(8, 5, CHANNELS), weights(8, 3, seed=2)
    before, numbers = columns.clone(), states.clone()
    move_ahead(moved(columns, states), 2, torch.tensor([3, 1]), torch.tensor([1, -1]), torch.tensor([2, 0]))
    assert torch.equal(columns[3, :3], before[1, 2:])
    assert torch.equal(states[3], numbers[3]), "after the second draft it was there already"
    assert torch.equal(columns[5], before[5]), "a new request has none"
    move_ahead(moved(columns, states), 2, torch.tensor([3, 2]), torch.tensor([3, 1]), torch.tensor([1, 1]))
    assert torch.equal(states[6], numbers[6])
    assert torch.equal(columns[6, :4], before[5, 1:])


@pytest.mark.parametrize(("accepted", "border"), [(1, False), (3, True), (4, True)])
def test_a_state_at_a_border_is_kept_where_its_block_ends(accepted: int, border: bool) -> None:
    """Blocks of 4 tokens; a step of tokens 6 to 9 in block number 2, so that token 6 is the first after it."""
    columns, states = weights(8, 5, CHANNELS), weights(8, 3, seed=2)
    before, numbers = columns.clone(), states.clone()
    ends = torch.tensor([6])
    neutral = keep_at_borders(moved(columns, states), 1, 4, torch.tensor([accepted]), torch.tensor([2]), ends)
    assert neutral == []
    assert torch.equal(states[1], numbers[4] if border else numbers[1]), "the state after 8 tokens, the second draft's"
    assert torch.equal(columns[1, :3], before[2, 2:] if border else before[1, :3])


def test_a_state_that_is_kept_in_its_own_block_is_without_drafts_from_there_on() -> None:
    columns, states = weights(8, 5, CHANNELS), weights(8, 3, seed=2)
    numbers = states.clone()
    assert keep_at_borders(moved(columns, states), 1, 4, torch.tensor([2]), torch.tensor([1]), torch.tensor([7])) == [0]
    assert torch.equal(states[1], numbers[2])
