"""Recurrent states of a server with drafts, on a CPU: what vLLM has Triton kernels for, in PyTorch.

A convolution keeps its last columns, and as many more as there are drafts. A step rolls them by one token and puts all of its
tokens behind: if the next step finds that `n` of them were accepted, its columns begin at `n - 1`. What else a state consists of
is written after each token of a step, into a block for each; the next step goes on from the block of the last accepted one.
With prefix caching a request moves to other blocks at a border, and its states with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.vllm.layout import NULL_BLOCK


def rolled(
    columns: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, accepted: int
) -> torch.Tensor:
    """A step of one request through a convolution, before its activation. `columns` [channels, columns] of its block are those of
    the step before, of whose tokens `accepted` were; afterwards they are those of this step. `tokens`: [tokens, channels]."""
    kept = weight.shape[-1] - 1
    series = torch.cat([columns[:, accepted - 1 : accepted - 1 + kept], tokens.T.to(columns.dtype)], dim=-1)
    made = (series.to(weight.dtype).unfold(-1, kept + 1, 1) * weight[:, None]).sum(-1)
    columns[:, : series.shape[1] - 1] = series[:, 1:]
    return (made if bias is None else made + bias[:, None]).T


def update_columns(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """A step of several requests, as vLLM's `causal_conv1d_update`. `settings`: those of its kernel."""
    blocks = conv_state_indices.reshape(len(conv_state_indices), -1)[:, 0].tolist()
    starts = list(range(len(blocks) + 1)) if query_start_loc is None else query_start_loc.tolist()
    accepted = [1] * len(blocks) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    made = torch.zeros_like(x)
    for row, block in enumerate(blocks):
        tokens = slice(starts[row], starts[row + 1])
        if block != NULL_BLOCK and tokens.start < tokens.stop:
            made[tokens] = rolled(conv_state[block], x[tokens], weight, bias, accepted[row]).to(x.dtype)
    return functional.silu(made) if activation in (True, "silu", "swish") else made


# Mamba 2

SelectiveUpdate = Callable[..., None]


def token_by_token(update: SelectiveUpdate) -> SelectiveUpdate:
    """vLLM's `selective_state_update` over requests with drafts. The CPU build's kernel goes on from a request's first block,
    whatever was accepted, and leaves the state after the last draft there. Here each token starts from a copy of the state
    before it, in the block that its own is noted in.
    """

    def updated(
        state: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        *others: torch.Tensor,
        out: torch.Tensor,
        state_batch_indices: torch.Tensor,
        num_accepted_tokens: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **settings: Any,
    ) -> None:
        if num_accepted_tokens is None or cu_seqlens is None:
            settings |= {"num_accepted_tokens": num_accepted_tokens, "cu_seqlens": cu_seqlens}
            return update(state, x, dt, A, B, C, *others, out=out, state_batch_indices=state_batch_indices, **settings)
        lengths = cu_seqlens.diff()
        for token in range(int(lengths.max())):
            rows = (lengths > token).nonzero().flatten()
            before = num_accepted_tokens[rows] - 1 if token == 0 else torch.full_like(rows, token - 1)
            blocks = state_batch_indices[rows, token]
            state[blocks] = state[state_batch_indices[rows, before]]
            here, made = cu_seqlens[rows] + token, torch.empty_like(out[: len(rows)])
            settings |= {"state_batch_indices": blocks, "dst_state_batch_indices": blocks, "out": made}
            update(state, x[here], dt[here], A, B[here], C[here], *others, **settings)
            out[here] = made

    return updated


# Gated delta nets


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """A request's tokens in a step, by number, and its blocks. `accepted`: of the step before; 0 of one that has no state."""

    tokens: torch.Tensor
    blocks: list[int]
    accepted: int
    is_drafted: bool


def delta_rows(metadata: Any) -> Iterator[DeltaRow]:
    """The requests of a step, by vLLM's GDNAttentionMetadata."""
    order = torch.arange(metadata.num_actual_tokens)
    is_mixed = metadata.spec_sequence_masks is not None and metadata.num_prefills + metadata.num_decodes > 0
    if metadata.spec_sequence_masks is not None:
        starts = metadata.spec_query_start_loc.tolist()
        drafted = metadata.spec_token_indx if is_mixed else order
        for row in range(metadata.num_spec_decodes):
            blocks = metadata.spec_state_indices_tensor[row].tolist()
            accepted = int(metadata.num_accepted_tokens[row])
            yield DeltaRow(drafted[starts[row] : starts[row + 1]], blocks, accepted, is_drafted=True)
    if metadata.num_prefills + metadata.num_decodes == 0:
        return
    starts, others = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_token_indx if is_mixed else order
    continued = (
        [True] * (len(starts) - 1) if metadata.has_initial_state is None else metadata.has_initial_state.tolist()
    )
    for row, block in enumerate(metadata.non_spec_state_indices_tensor.tolist()):
        yield DeltaRow(others[starts[row] : starts[row + 1]], [block], int(continued[row]), is_drafted=False)


def delta_rule(
    layer: Any,
    metadata: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    """A step through a gated delta net, token by token. `conv_state`: [blocks, channels, columns]."""
    states = layer.kv_cache[1]
    states = states.view(*states.shape[:2], states.shape[3], states.shape[2])  # as vLLM's kernels for a CPU have them
    kept = weight.shape[-1] - 1
    for row in delta_rows(metadata):
        if len(row.tokens) == 0 or row.blocks[0] == NULL_BLOCK:
            continue
        columns = conv_state[row.blocks[0]]
        if row.is_drafted:
            made = rolled(columns, mixed_qkv[row.tokens], weight, layer.conv1d.bias, row.accepted)
        else:
            before = columns[:, :kept].clone() if row.accepted else columns.new_zeros(len(columns), kept)
            longer = torch.cat([before, columns.new_zeros(len(columns), len(row.tokens))], dim=-1)
            made = rolled(longer, mixed_qkv[row.tokens], weight, layer.conv1d.bias, 1)
            columns[:, :kept] = longer[:, len(row.tokens) - 1 :][:, :kept]
        made = functional.silu(made) if layer.activation in ("silu", "swish") else made
        query, key, value = (each[0].float() for each in layer.rearrange_mixed_qkv(made.to(mixed_qkv.dtype)))
        decay = -layer.A_log.float().exp() * functional.softplus(a[row.tokens].float() + layer.dt_bias.float())
        state = torch.zeros(states.shape[1:])
        if row.accepted:
            state.copy_(states[row.blocks[row.accepted - 1]])
        written = [states[block] for block in row.blocks] if row.is_drafted else []
        answers = _recur(state, query, key, value, decay, b[row.tokens].float().sigmoid(), written)
        if not row.is_drafted:
            states[row.blocks[0]] = state.to(states.dtype)
        core_attn_out[row.tokens] = answers.to(core_attn_out.dtype)


def _recur(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    written: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`state` [heads, keys, values] goes on by these tokens, in place. `written`: where it is noted after each of them."""
    times = value.shape[1] // key.shape[1]
    query, key = (_unit(each).repeat_interleave(times, dim=1) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    answers = []
    for token in range(len(value)):
        state *= decay[token].exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, key[token])
        state += torch.einsum("hk,hv->hkv", key[token], (value[token] - known) * beta[token][:, None])
        answers.append(torch.einsum("hkv,hk->hv", state, query[token]))
        if token < len(written):
            written[token].copy_(state)
    return torch.stack(answers)


def _unit(each: torch.Tensor) -> torch.Tensor:
    return each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6)


# At borders of blocks


@dataclass(frozen=True, slots=True)
class MovedStates:
    """The states of one group of layers: where they lie, by the blocks of requests. `convolved`: tensors of columns."""

    table: torch.Tensor
    convolved: tuple[torch.Tensor, ...]
    others: tuple[torch.Tensor, ...]

    def move(self, row: int, source: int, target: int, bias: int) -> None:
        """The state after the `bias`-th draft of a request, of its block number `source`, becomes that of number `target`."""
        table = self.table[row].tolist()
        for columns in self.convolved:
            kept = columns.shape[1] - bias
            columns[table[target], :kept] = columns[table[source], bias:].clone()
        for states in self.others:
            states[table[target]] = states[table[source + bias]].clone()


def moved_states(
    groups: Sequence[Any],
    numbers: Sequence[int],
    layers: Any,
    copy_of: Callable[[Any, str], Sequence[Any]],
    tables: Sequence[Any],
) -> list[MovedStates]:
    """Those of vLLM's KV cache groups with these `numbers`. `copy_of`: vLLM's functions for a layer's tensors, named by what
    those are. `tables`: the first rows of each group's table; vLLM names as many as the step has that asks first."""
    found = []
    for number, table in zip(numbers, tables, strict=True):
        group, columns, others = groups[number], list[torch.Tensor](), list[torch.Tensor]()
        for name in group.layer_names:
            for tensor, function in zip(layers[name].kv_cache, copy_of(group, name), strict=False):
                (columns if "conv" in function.__name__ else others).append(tensor)
        found.append(MovedStates(_whole(table), tuple(columns), tuple(others)))
    return found


def _whole(rows: torch.Tensor) -> torch.Tensor:
    """The table whose first rows these are."""
    stride = rows.stride(0)
    num_rows = rows.untyped_storage().nbytes() // (rows.itemsize * stride)
    return rows.as_strided((num_rows, rows.shape[1]), rows.stride(), 0)


def move_ahead(
    moved: Sequence[MovedStates], num_reqs: int, targets: torch.Tensor, sources: torch.Tensor, biases: torch.Tensor
) -> None:
    """Before a step: requests that have come to another block take their state along."""
    for row in range(num_reqs):
        source, target = int(sources[row]), int(targets[row])
        if 0 <= source != target:
            for each in moved:
                each.move(row, source, target, int(biases[row]))


def keep_at_borders(
    moved: Sequence[MovedStates],
    num_reqs: int,
    block_tokens: int,
    accepted: torch.Tensor,
    state_blocks: torch.Tensor,
    ends: torch.Tensor,
) -> list[int]:
    """After a step: a state that lies at a border of blocks becomes that of the block which ends there. `ends`: how many tokens a
    request has with the first of the step's. Returns the rows whose state is where it was before any draft again."""
    neutral = []
    for row in range(num_reqs):
        end, source = int(ends[row]), int(state_blocks[row])
        border = (end + int(accepted[row]) - 1) // block_tokens * block_tokens
        if border < end:
            continue
        target, bias = border // block_tokens - 1, border - end
        if source == target:
            neutral.append(row)
        if source != target or bias:
            for each in moved:
                each.move(row, source, target, bias)
    return neutral
