"""Bytes of blocks, whatever their strides and wherever they are: into pages and back, in the order of a slab."""

import numpy as np
import pytest
import torch

from engine.agent.block_copies import BlockCopies, CopyPiece
from engine.errors import PagesInvalid
from engine.vllm.worker_side.blocks import (
    MAX_RUNS,
    SHORT_RUNS,
    DeviceBlocks,
    HostBlocks,
    blocks_of,
    runs_of,
    whole_blocks,
)
from engine.vllm.worker_side.device import NO_DRIVER, REFUSED, REGISTERING, ArenaMemory, CopyDevice, HostDevice
from tests.engine.vllm.builders import BLOCK
from tests.engine.vllm.worker_side.lazy_device import LazyDevice

HEADS, WIDTH, NUM_BLOCKS = 4, 6, 12
SIZE = HEADS * BLOCK * WIDTH * 4
DEVICES = [HostDevice, LazyDevice, lambda: LazyDevice(registers=False)]
KINDS = ["heads first", "tokens first", "cut in two"]


def tensor_of(kind: str, data: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, tokens, width] as it would lie in a cache of that kind."""
    if kind == "tokens first":
        return data.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "cut in two":  # blocks of half as many tokens, twice as many
        pieces = data.unflatten(2, (2, BLOCK // 2)).transpose(1, 2).contiguous()
        return pieces.flatten(0, 1)
    return data.contiguous()


def data_of(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    if kind == "cut in two":
        return tensor.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)
    return tensor


def copies_of(rows: list[int], *pieces: tuple[int, int, list[int]]) -> BlockCopies:
    """Pieces as (offset, length, starts)."""
    made = tuple(CopyPiece(offset, length, np.array(starts)) for offset, length, starts in pieces)
    return BlockCopies(np.array(rows), made)


def memory(size: int, device: CopyDevice) -> ArenaMemory:
    made = ArenaMemory(np.zeros(size, np.uint8))
    device.adopt(made)
    return made


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "starts"), [([1, -1], [0, 96]), ([1, NUM_BLOCKS], [0, 96]), ([1, 2], [0, -1]), ([1, 2], [0, 97])]
)
def test_what_is_not_there_is_refused_before_any_byte_is_copied(make, kind, rows, starts):
    tensor, device = tensor_of(kind, torch.ones(NUM_BLOCKS, HEADS, BLOCK, WIDTH)), make()
    blocks, arena, stream = blocks_of("a", tensor, SIZE, device), memory(96 + SIZE, device), device.stream()
    copies = [copies_of([3], (0, SIZE, [0])), copies_of(rows, (0, SIZE, starts))]
    with pytest.raises(IndexError):
        blocks.read(copies, arena, stream)
    with pytest.raises(IndexError):
        blocks.write(copies, arena, stream)
    stream.mark().wait()
    assert not arena.data.any()
    assert tensor.all()


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_all_strides_are_the_same_bytes_in_pages(make, kind):
    """Heads in order, whole tokens inside, wherever a page ends: so a side with one kind pairs with one of another."""
    torch.manual_seed(0)
    data = torch.rand(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    device = make()
    blocks = blocks_of("a", tensor_of(kind, data), SIZE, device)
    arena, stream = memory(4 * SIZE, device), device.stream()
    copies = [
        copies_of([4], (0, SIZE - 10, [7]), (SIZE - 10, 10, [SIZE + 50])),
        copies_of([2, 9], (0, SIZE, [2 * SIZE, 3 * SIZE])),
    ]
    blocks.read(copies, arena, stream).wait()
    bytes_of = [data[number].reshape(-1).view(torch.uint8).numpy() for number in range(NUM_BLOCKS)]
    assert (arena.data[7 : SIZE - 3] == bytes_of[4][:-10]).all()
    assert (arena.data[SIZE + 50 : SIZE + 60] == bytes_of[4][-10:]).all()
    assert (arena.data[2 * SIZE : 3 * SIZE] == bytes_of[2]).all()
    assert (arena.data[3 * SIZE :] == bytes_of[9]).all()


@pytest.mark.parametrize("make", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_take_back_what_pages_have_of_them(make, kind):
    torch.manual_seed(0)
    data = torch.rand(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    device = make()
    arena, stream = memory(2 * SIZE, device), device.stream()
    copies = [copies_of([4, 2], (0, SIZE - 10, [0, SIZE]), (SIZE - 10, 10, [SIZE - 10, 2 * SIZE - 10]))]
    tensor = tensor_of(kind, data)
    blocks = blocks_of("a", tensor, SIZE, device)
    blocks.read(copies, arena, stream).wait()
    tensor.zero_()
    blocks.write(copies, arena, stream).wait()
    found = data_of(kind, tensor)
    assert torch.equal(found[[2, 4]], data[[2, 4]])
    assert not found[3].any()


def test_each_device_has_the_blocks_it_can_copy_best():
    data = torch.ones(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    assert isinstance(blocks_of("a", data, SIZE, HostDevice()), HostBlocks)
    assert isinstance(blocks_of("a", data, SIZE, LazyDevice()), DeviceBlocks)
    assert isinstance(blocks_of("a", tensor_of("tokens first", data), SIZE, HostDevice()), DeviceBlocks)


@pytest.mark.parametrize(("blocks", "size"), [(4, SIZE + 4), (4, SIZE // 2), (3, 2 * SIZE)])
def test_blocks_of_another_size_are_refused(blocks, size):
    with pytest.raises(PagesInvalid, match="blocks of"):
        blocks_of("a", torch.ones(blocks, HEADS, BLOCK, WIDTH), size, HostDevice())


@pytest.mark.parametrize(
    ("kind", "runs"),
    [("heads first", (SIZE, 1)), ("tokens first", (WIDTH * 4, HEADS * BLOCK)), ("cut in two", (48, 8))],
)
def test_runs_are_as_long_as_a_block_allows(kind, runs):
    tensor = tensor_of(kind, torch.ones(NUM_BLOCKS, HEADS, BLOCK, WIDTH))
    run, starts = runs_of(whole_blocks(tensor, len(tensor) // NUM_BLOCKS).view(torch.uint8))
    assert (run, len(starts)) == runs


@pytest.mark.parametrize(
    ("kind", "make", "because"),
    [
        ("heads first", LazyDevice, None),
        ("heads first", HostDevice, None),
        ("tokens first", HostDevice, NO_DRIVER),
        ("heads first", lambda: LazyDevice(registers=False), REGISTERING),
        ("heads first", lambda: RefusingDevice(), REFUSED),
    ],
)
def test_bytes_that_go_through_a_buffer_are_counted_with_the_reason(kind, make, because):
    heard, device = [], make()
    blocks = blocks_of(
        "a",
        tensor_of(kind, torch.ones(NUM_BLOCKS, HEADS, BLOCK, WIDTH)),
        SIZE,
        device,
        lambda *what: heard.append(what),
    )
    arena, stream, copies = memory(2 * SIZE, device), device.stream(), [copies_of([3, 1], (0, SIZE, [0, SIZE]))]
    blocks.read(copies, arena, stream)
    blocks.write(copies, arena, stream)
    blocks.write([copies_of([], (0, SIZE, []))], arena, stream)
    assert heard == ([] if because is None else [(because, 2 * SIZE)] * 2)


def test_blocks_of_many_short_runs_are_counted_as_such():
    heard, device = [], LazyDevice()
    data = torch.ones(NUM_BLOCKS, MAX_RUNS // BLOCK + 1, BLOCK, 2 * WIDTH)[..., :WIDTH]
    size = data[0].numel() * data.element_size()
    blocks = blocks_of("a", data, size, device, lambda *what: heard.append(what))
    blocks.read([copies_of([0], (0, size, [0]))], memory(size, device), device.stream())
    assert heard == [(SHORT_RUNS, size)]


class RefusingDevice(LazyDevice):
    """Its driver does not register the arena."""

    def adopt(self, memory):
        memory.unregistered_because = REFUSED
