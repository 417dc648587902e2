"""A step is said to be written when each layer of it is, whether or not the layer has said that it is final."""

from pathlib import Path

import pytest
import torch

from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, LayerWritten, SaveBlocks, SaveFailed, StepWritten
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for, state
from tests.engine.vllm.worker_side.listener import Scheduler

N = 2 * BLOCK
SIZE = BLOCK * 8
LAYOUT = layout_of(*(full(name, part_bytes=SIZE) for name in "abc"), state("s", table=1, part_bytes=16))
PAGES = pages_for(LAYOUT, N)
TABLES = ((1, 2), (0, 3))


@pytest.fixture
def arena(tmp_path: Path) -> ArenaRef:
    path = tmp_path / "arena"
    path.write_bytes(bytes(num_pages(PAGES) * LAYOUT.model.page_bytes))
    return ArenaRef(str(path), LAYOUT.model.page_bytes, num_pages(PAGES), 1)


def kv() -> dict[str, torch.Tensor]:
    made = {name: torch.full((4, 1, BLOCK, 8), number, dtype=torch.int8) for number, name in enumerate("abc", 1)}
    return made | {"s": torch.full((4, 1, 1, 16), 9, dtype=torch.int8)}


@pytest.fixture
def worker():
    side = WorkerSide(LAYOUT, 0)
    side.register(kv())
    yield side
    side.close()


def run(side: WorkerSide, step: ForwardStep, hooks: str) -> None:
    side.begin_step(step)
    for name in hooks:
        side.save_layer(name)
    side.start_loads()
    side.finish_step()


def saves(*states: int, tables=TABLES) -> tuple[SaveBlocks, ...]:
    return (SaveBlocks("j", 0, N, states, tables),)


@pytest.mark.parametrize("hooks", ["abc", "ac", ""])
def test_a_layer_without_a_hook_is_saved_at_the_end_of_the_step(scheduler: Scheduler, arena, worker, hooks) -> None:
    run(worker, ForwardStep(str(scheduler.path), arena, (PAGES,), saves(N)), hooks)
    scheduler.wait_for(StepWritten, "j")
    written = [message.layer for message in scheduler.heard if isinstance(message, LayerWritten)]
    assert sorted(written) == [0, 1, 2]
    counts = [Path(arena.path).read_bytes().count(number) for number in (1, 2, 3, 9)]
    assert counts == [2 * SIZE, 2 * SIZE, 2 * SIZE, 16]


def test_each_step_looks_for_its_own_hooks(scheduler: Scheduler, arena, worker) -> None:
    """A layer that was seen in one step may be silent in the next: a graph of it is replayed whole."""
    first = (SaveBlocks("j", 0, BLOCK, (), TABLES),)
    run(worker, ForwardStep(str(scheduler.path), arena, (PAGES,), first), "abc")
    run(worker, ForwardStep("", None, (), (SaveBlocks("j", BLOCK, N, (N,), TABLES),)), "c")
    scheduler.wait_for_count(StepWritten, "j", 2)
    assert Path(arena.path).read_bytes().count(2) == 2 * SIZE


def test_a_layer_that_says_it_twice_is_copied_once(scheduler: Scheduler, arena, worker) -> None:
    run(worker, ForwardStep(str(scheduler.path), arena, (PAGES,), saves(N)), "aabbccs")
    scheduler.wait_for(StepWritten, "j")
    assert worker.take_counts().bytes_saved == 6 * SIZE + 16


def test_a_step_that_lacks_a_layer_is_not_written(scheduler: Scheduler, arena, worker) -> None:
    """The pages wait for a state that vLLM has no block for: it must not be announced."""
    run(worker, ForwardStep(str(scheduler.path), arena, (PAGES,), saves(N, tables=((1, 2), (0, 0)))), "abc")
    scheduler.wait_for(SaveFailed, "j")
    assert not any(isinstance(message, StepWritten) for message in scheduler.heard)


def test_layers_of_microbatches_are_copied_when_all_of_them_are_over(scheduler: Scheduler, arena) -> None:
    """The first half's word says nothing of the second's tokens."""
    side, tensors = WorkerSide(LAYOUT, 0, in_microbatches=True), kv()
    side.register(tensors)
    side.begin_step(ForwardStep(str(scheduler.path), arena, (PAGES,), saves(N)))
    side.save_layer("a")
    tensors["a"].fill_(7)
    side.save_layer("a")
    side.finish_step()
    scheduler.wait_for(StepWritten, "j")
    assert [message.layer for message in scheduler.heard if isinstance(message, LayerWritten)] == [0, 1, 2]
    assert Path(arena.path).read_bytes().count(7) == 2 * SIZE
    side.close()


def test_layers_of_a_draft_are_copied_once_when_the_step_is_over(scheduler: Scheduler, arena) -> None:
    """A step computes a draft several times, and says each time that its layers are final."""
    side, tensors = WorkerSide(LAYOUT, 0, drafts={"b"}), kv()
    side.register(tensors)
    side.begin_step(ForwardStep(str(scheduler.path), arena, (PAGES,), saves(N)))
    side.save_layer("b")
    tensors["b"].fill_(7)
    side.save_layer("b")
    side.finish_step()
    scheduler.wait_for(StepWritten, "j")
    assert [message.layer for message in scheduler.heard if isinstance(message, LayerWritten)].count(1) == 1
    assert Path(arena.path).read_bytes().count(7) == 2 * SIZE
    side.close()
