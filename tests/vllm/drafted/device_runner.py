"""vLLM's second model runner over a hybrid with drafts, as far as KVCache goes: which block is read and written when.

Written after `vllm/v1/worker/gpu/model_runner.py`, `model_states/mamba_hybrid.py`, and the kernels of `mamba_utils.py`. What it
knows of requests is the worker's own: a scheduler that runs ahead does not know yet which drafts were accepted. Operators are
launched on a device that does them as late as it can.

    attention, for each token     what it is and where
    state, for each block         columns of a convolution, the last of what was computed | number of tokens, digest of them
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tests.engine.vllm.worker_side.lazy_device import LazyDevice

KEPT: Final = 3  # columns of a convolution
REST: Final = 2  # words of what else a state consists of
UNWRITTEN: Final = -1


def attended(token: int, position: int) -> int:
    """What attention keeps of a token."""
    return token * 4096 + position


def state_after(tokens: Sequence[int]) -> list[int]:
    """What a server without drafts keeps of these tokens."""
    columns = ([0] * KEPT + [each + 1 for each in tokens])[-KEPT:]
    digest = 0
    for token in tokens:
        digest = _advance(digest, token)
    return [*columns, len(tokens), digest]


def _advance(digest: int, token: int) -> int:
    return (digest * 31 + token + 7) & 0x3FFFFFFF


@dataclass
class Row:
    """A request in the runner's hands."""

    tokens: list[int]  # known to the device
    prefill_len: int
    computed: int
    tables: tuple[list[int], ...]
    column: int  # of its block tables: where its state is
    accepted: int = 1  # of the step before, its own token among them
    is_lost: bool = False  # vLLM's own state of it is wrong


@dataclass
class DeviceRunner:
    """`answers`: what the model would say, by request and number of the token. `right`: how many drafts of a step are."""

    device: LazyDevice
    attention: torch.Tensor  # [blocks, 1, tokens of a block, 1]
    states: dict[int, torch.Tensor]  # by group: [blocks, 1, 1, words]
    block_tokens: int
    drafts: int
    aligned: bool
    answers: Callable[[str, int], int]
    right: Callable[[], int]
    rows: dict[str, Row] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)  # their lengths
    wrong: list[str] = field(default_factory=list)  # where a state is not that of its tokens

    def begin(self, step: Any) -> None:
        """Requests that go, come and go on."""
        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.rows.pop(name, None)
        for new in step.scheduled_new_reqs:
            computed, tokens = new.num_computed_tokens, list(new.prefill_token_ids)
            tables = tuple(map(list, new.block_ids))
            column = (computed - 1) // self.block_tokens
            self.rows[new.req_id] = Row(tokens, len(tokens), computed, tables, column)
            self.prompts[new.req_id] = len(new.prompt_token_ids)
        cached = step.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, more in zip(self.rows[name].tables, ids or ((),) * len(self.rows[name].tables), strict=True):
                table.extend(more)

    def compute(self, step: Any, is_final: Callable[[], None]) -> dict[str, tuple[int, int]]:
        """The forward pass; attention says when it is final. Returns each request's tokens and drafts in this step."""
        scheduled = {
            name: (count, len(step.scheduled_spec_decode_tokens.get(name, ())))
            for name, count in step.num_scheduled_tokens.items()
        }
        for name, (count, _) in scheduled.items():
            self._move_ahead(self.rows[name], count)
        fed = {name: self._fed(name, *counts) for name, counts in scheduled.items()}
        for name, tokens in fed.items():
            self._attend(self.rows[name], tokens)
        is_final()
        for name, tokens in fed.items():
            self._advance_states(name, tokens, scheduled[name][1])
        return scheduled

    def sample(self, scheduled: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
        """What is accepted and sampled, and where that leaves the states."""
        sampled = {}
        for name, (count, drafts) in scheduled.items():
            row = self.rows[name]
            known = row.computed + count - drafts
            said: list[int] = []
            if known >= row.prefill_len:
                accepted = self._accepted[name]
                said = [self._answer(name, known + number) for number in range(accepted + 1)]
                row.tokens = row.tokens[:known] + said
                row.computed = known + accepted
            else:
                row.computed = known
            sampled[name] = said
            row.accepted = max(len(said), 1)
            self._keep_at_border(row)
        return sampled

    def _answer(self, name: str, position: int) -> int:
        return self.answers(name, position - self.prompts[name])

    def _fed(self, name: str, count: int, drafts: int) -> list[int]:
        """Tokens of a step. One that pads the end of a prompt has drafts that no model has proposed: token 0."""
        row = self.rows[name]
        known = row.computed + count - drafts
        assert known <= len(row.tokens), f"{name}: the device does not know tokens up to {known}"
        true = [self._answer(name, known + number) for number in range(drafts)]
        if row.computed < row.prefill_len:
            guessed = [0] * drafts
        else:
            right = min(self.right(), drafts)
            guessed = [token if number < right else token + 1 for number, token in enumerate(true)]
        self._accepted[name] = next((n for n, (a, b) in enumerate(zip(true, guessed, strict=True)) if a != b), drafts)
        return [*row.tokens[row.computed : known], *guessed]

    @property
    def _accepted(self) -> dict[str, int]:
        return self.__dict__.setdefault("accepted_of_step", {})

    def _attend(self, row: Row, tokens: Sequence[int]) -> None:
        slots = []
        for position, token in enumerate(tokens, row.computed):
            index, offset = divmod(position, self.block_tokens)
            slots.append((row.tables[0][index], offset, attended(token, position)))

        def write() -> None:
            for block, offset, value in slots:
                self.attention[block, 0, offset, 0] = value

        self.device.launch(write)

    # States

    def _move_ahead(self, row: Row, count: int) -> None:
        """A request that has come to another block takes its state along."""
        if not self.aligned:
            row.column = 0
            return
        before, row.column = row.column, -(-(row.computed + count) // self.block_tokens) - 1
        if before >= 0 and before != row.column:
            self._move(row, before, row.column, max(row.accepted - 1, 0))
            row.accepted = 1

    def _keep_at_border(self, row: Row) -> None:
        """A state at a border of blocks becomes that of the block which ends there."""
        if not self.aligned:
            return
        first = row.computed - row.accepted + 1
        border = row.computed // self.block_tokens * self.block_tokens
        if border < first:
            return
        target, bias = border // self.block_tokens - 1, border - first
        if row.column == target:
            row.accepted = 1
        if row.column != target or bias:
            self._move(row, row.column, target, bias)

    def _move(self, row: Row, source: int, target: int, bias: int) -> None:
        for group, states in self.states.items():
            table = row.tables[group]
            begin, to, whole = table[source], table[target], table[source + bias]

            def move(states: torch.Tensor = states, begin: int = begin, to: int = to, whole: int = whole) -> None:
                columns = states[begin, 0, 0, bias : KEPT + self.drafts].clone()
                rest = states[whole, 0, 0, KEPT + self.drafts :].clone()
                states[to, 0, 0, : len(columns)] = columns
                states[to, 0, 0, KEPT + self.drafts :] = rest

            self.device.launch(move)

    def _advance_states(self, name: str, tokens: Sequence[int], drafts: int) -> None:
        row = self.rows[name]
        is_decode = row.computed >= row.prefill_len or (len(tokens) - drafts == 1 and row.computed > 0)
        row.is_lost |= drafts > 0 and not is_decode
        for group, states in self.states.items():
            blocks = row.tables[group][row.column :][: 1 + self.drafts]
            self.device.launch(
                _Advance(
                    states, blocks, list(tokens), row.computed, row.accepted - 1, self.drafts, is_decode,
                    None if row.is_lost else state_after(row.tokens[: row.computed]), self.wrong, f"{name}:{row.computed}",
                )
            )  # fmt: skip


@dataclass(frozen=True)
class _Advance:
    """Tokens of a request in a step. A decoding one keeps the state after each of them, any other that of its end."""

    states: torch.Tensor
    blocks: list[int]
    tokens: list[int]
    computed: int
    offset: int  # what was accepted of the step before, beyond its first token
    drafts: int
    is_decode: bool
    expected: list[int] | None
    wrong: list[str]
    where: str

    def __call__(self) -> None:
        room, first = KEPT + self.drafts, self.states[self.blocks[0], 0, 0]
        columns, length, digest = [0] * KEPT, 0, 0
        if self.computed:
            columns = first[self.offset : self.offset + KEPT].tolist()
            length, digest = self.states[self.blocks[self.offset], 0, 0, room:].tolist()
        if self.expected not in (None, [*columns, length, digest]):
            self.wrong.append(f"{self.where}: {[*columns, length, digest]}, not {self.expected}")
        series = columns + [token + 1 for token in self.tokens]
        after = []
        for token in self.tokens:
            length, digest = length + 1, _advance(digest, token)
            after.append((length, digest))
        if self.is_decode:
            first[: len(series) - 1] = torch.tensor(series[1:], dtype=torch.int32)
            for block, rest in zip(self.blocks, after, strict=False):
                self.states[block, 0, 0, room:] = torch.tensor(rest, dtype=torch.int32)
        else:
            first[:KEPT] = torch.tensor(series[-KEPT:], dtype=torch.int32)
            first[room:] = torch.tensor(after[-1], dtype=torch.int32)
