"""States of servers with different numbers of drafts, or none: what one saves another loads, and the rest stays as it was."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.agent.block_copies import BlockCopies, pieces_of
from engine.errors import PagesInvalid
from engine.vllm.layout import CacheLayer, LayerKind
from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, SaveBlocks
from engine.vllm.worker_side.blocks import Blocks, blocks_of
from engine.vllm.worker_side.device import ArenaMemory, CopyDevice, HostDevice
from engine.vllm.worker_side.gaps import blocks_around
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for, state
from tests.engine.vllm.worker_side.lazy_device import LazyDevice

COLUMN, COLUMNS, PAGE, NUM_BLOCKS = 16, 3, 64, 6
DEVICES = [HostDevice, LazyDevice, lambda: LazyDevice(registers=False)]


def layer(drafts: int, rest: int, table: int = 0) -> CacheLayer:
    return CacheLayer(
        name="s", table=table, kind=LayerKind.STATE, block_tokens=4, part_bytes=COLUMNS * COLUMN + rest, parts=1,
        gap_at=COLUMNS * COLUMN if drafts else 0, gap_bytes=drafts * COLUMN,
    )  # fmt: skip


def pages_of_blocks(drafts: int, rest: int, seed: int) -> torch.Tensor:
    """As vLLM has them: int8 whatever a state consists of, with padding between two blocks."""
    size = (COLUMNS + drafts) * COLUMN + rest
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (NUM_BLOCKS, 1, 1, size + 40), dtype=torch.int8, generator=generator)[..., :size]


def blocks(drafts: int, rest: int, tensor: torch.Tensor, device: CopyDevice) -> Blocks:
    kept = layer(drafts, rest)
    if not drafts:
        return blocks_of("s", tensor, kept.part_bytes, device)
    return blocks_around(kept, tensor, device, lambda reason, num_bytes: None)


def state_in(tensor: torch.Tensor, block: int, drafts: int) -> bytes:
    content = tensor[block].flatten()
    end = COLUMNS * COLUMN
    return torch.cat([content[:end], content[end + drafts * COLUMN :]]).numpy().tobytes()


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("rest", [0, 100])
@pytest.mark.parametrize(("ours", "theirs"), list(product((0, 1, 4), repeat=2)))
def test_what_is_saved_by_one_is_loaded_by_another(make: type[HostDevice], rest: int, ours: int, theirs: int) -> None:
    device = make()
    arena = ArenaMemory(np.zeros(8 * PAGE, np.uint8))
    device.adopt(arena)
    stream = device.stream()
    starts = np.array([[0, 3 * PAGE, 5 * PAGE]], np.int64)
    saved, loaded = pages_of_blocks(ours, rest, 1), pages_of_blocks(theirs, rest, 2)
    before = loaded.clone()
    pieces = pieces_of(starts, 0, layer(ours, rest).part_bytes, PAGE)
    blocks(ours, rest, saved, device).read([BlockCopies(np.array([2]), pieces)], arena, stream).wait()
    blocks(theirs, rest, loaded, device).write([BlockCopies(np.array([4]), pieces)], arena, stream).wait()
    assert state_in(loaded, 4, theirs) == state_in(saved, 2, ours)
    gap = slice(COLUMNS * COLUMN, (COLUMNS + theirs) * COLUMN)
    assert torch.equal(loaded[4, ..., gap], before[4, ..., gap]), "room for drafts is left alone"
    others = [0, 1, 2, 3, 5]
    assert torch.equal(loaded[others], before[others])


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_state_is_that_of_its_step_though_the_next_one_has_begun(
    tmp_path: Path, drafts: int, keeps_order: bool
) -> None:
    """The device has both steps before it does anything. Without its waits the later one's state, or none, is saved."""
    layout = layout_of(full("a", part_bytes=BLOCK * 8), state("s", table=1, part_bytes=COLUMNS * COLUMN + 100))
    if drafts:
        attention, kept = layout.places
        layout = replace(layout, places=(attention, replace(kept, layer=layer(drafts, 100, table=1))))
    pages, device = pages_for(layout, BLOCK), LazyDevice(keeps_order=keeps_order)
    path = tmp_path / "arena"
    path.write_bytes(bytes(num_pages(pages) * layout.model.page_bytes))
    arena = ArenaRef(str(path), layout.model.page_bytes, num_pages(pages), 1)
    states = torch.zeros((4, 1, 1, (COLUMNS + drafts) * COLUMN + 100), dtype=torch.int8)
    worker = WorkerSide(layout, 0, devices=lambda _: device)
    worker.register({"a": torch.zeros((4, 1, BLOCK, 8), dtype=torch.int8), "s": states})

    def step(value: int, work: ForwardStep) -> None:
        worker.begin_step(work)
        device.launch(lambda: states[2].fill_(value))
        device.launch(lambda: states[2, ..., COLUMNS * COLUMN : (COLUMNS + drafts) * COLUMN].fill_(99))
        worker.finish_step()

    step(7, ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, BLOCK, (BLOCK,), ((1,), (2,))),)))
    for value in (8, 9):
        step(value, ForwardStep())
    device.synchronize()
    saved = path.read_bytes()
    worker.close()
    assert (saved.count(7) == COLUMNS * COLUMN + 100) is keeps_order
    assert saved.count(99) == 0


@pytest.mark.parametrize("says_so", [True, False])
def test_a_state_before_drafts_is_saved_before_they_are_accepted(tmp_path: Path, says_so: bool) -> None:
    """vLLM's second runner moves a state once it has sampled, before the step ends. Without its word that would be saved."""
    layout = layout_of(full("a", part_bytes=BLOCK * 8), state("s", table=1, part_bytes=100))
    pages, device = pages_for(layout, BLOCK), LazyDevice()
    path = tmp_path / "arena"
    path.write_bytes(bytes(num_pages(pages) * layout.model.page_bytes))
    arena = ArenaRef(str(path), layout.model.page_bytes, num_pages(pages), 1)
    states = torch.zeros((4, 1, 1, 100), dtype=torch.int8)
    worker = WorkerSide(layout, 0, devices=lambda _: device)
    worker.register({"a": torch.zeros((4, 1, BLOCK, 8), dtype=torch.int8), "s": states})
    save = SaveBlocks("j", 0, BLOCK, (BLOCK,), ((1,), (2,)), is_drafted=True)
    worker.begin_step(ForwardStep("", arena, (pages,), (save,)))
    device.launch(lambda: states[2].fill_(7))
    if says_so:
        worker.finish_forward()
    device.launch(lambda: states[2].fill_(8))
    worker.finish_step()
    device.synchronize()
    assert worker.take_counts().bytes_saved == BLOCK * 8 + 100, "once"
    worker.close()
    assert path.read_bytes().count(7 if says_so else 8) == 100


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(PagesInvalid, match="blocks of 112 bytes, not of 128"):
        blocks(2, 48, pages_of_blocks(1, 48, 1), HostDevice())


@pytest.mark.parametrize("row", [-1, NUM_BLOCKS])
def test_a_block_that_is_not_there_is_refused_before_anything_is_copied(row: int) -> None:
    tensor = pages_of_blocks(2, 100, 1)
    arena = ArenaMemory(np.zeros(8 * PAGE, np.uint8))
    starts = np.array([[0, PAGE, 2 * PAGE]] * 2, np.int64)
    copies = BlockCopies(np.array([1, row]), pieces_of(starts, 0, layer(2, 100).part_bytes, PAGE))
    with pytest.raises(IndexError):
        blocks(2, 100, tensor, HostDevice()).read([copies], arena, HostDevice().stream())
    assert not arena.data.any()
