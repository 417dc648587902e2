"""Ranks of two engines around one arena, with real tensors: what one side saves the other loads, whatever their number."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.agent.block_copies import BlockCopies, CopyPiece
from engine.errors import PagesInvalid
from engine.vllm.layout import CacheLayer, VllmLayout
from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, LoadBlocks, SaveBlocks
from engine.vllm.worker_side.blocks import HostBlocks, StridedBlocks, blocks_of
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for, state, window

HEADS, WIDTH, NUM_BLOCKS = 4, 6, 12
STATE_BYTES = 96
LOAD_WAIT_S = 30.0


def layers(ranks: int, kinds: str) -> list[CacheLayer]:
    parts = min(ranks, HEADS)
    size = HEADS // parts * BLOCK * WIDTH * 4
    made = {
        "f": full("0.attn", table=0, part_bytes=size, parts=parts),
        "w": window("1.attn", tokens=BLOCK + 2, table=1, part_bytes=size, parts=parts),
        "s": state("2.mixer", table=2, part_bytes=STATE_BYTES // ranks, parts=ranks),
    }
    return [made[kind] for kind in kinds]


class Side:
    """All ranks of one engine. Whole tensors hold what all ranks together would. Stage s of n has every nth layer from s on."""

    def __init__(self, ranks: int, kinds: str, folder: Path, *, seed: int, stages: int = 1) -> None:
        self.layout: VllmLayout = layout_of(*layers(ranks, kinds), ranks=ranks, stages=stages)
        torch.manual_seed(seed)
        self.whole = {
            layer.name: torch.randint(0, 100, (NUM_BLOCKS, 1, 1, STATE_BYTES), dtype=torch.int8)
            if layer.name.endswith("mixer")
            else torch.rand(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
            for layer in layers(ranks, kinds)
        }
        self.tensors = [
            {name: self.shard(name, self.whole[name], rank, ranks) for name in sorted(self.whole)[stage::stages]}
            for stage in range(stages)
            for rank in range(ranks)
        ]
        self.workers = [
            WorkerSide(self.layout, rank, own=tensors.keys(), load_wait_s=LOAD_WAIT_S)
            for rank, tensors in enumerate(self.tensors)
        ]
        for worker, tensors in zip(self.workers, self.tensors, strict=True):
            worker.register(tensors)

    @staticmethod
    def shard(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        if name.endswith("mixer"):
            size = STATE_BYTES // ranks
            padded = torch.zeros(NUM_BLOCKS, 1, 1, size + 32, dtype=torch.int8)  # vLLM pads pages of states
            padded[..., :size] = tensor[..., rank * size : (rank + 1) * size]
            return padded[..., :size]
        heads = max(1, HEADS // ranks)
        first = rank * HEADS // ranks
        return tensor[:, first : first + heads].clone()

    def step(self, step: ForwardStep) -> None:
        for worker, tensors in zip(self.workers, self.tensors, strict=True):
            worker.begin_step(step)
            for name in tensors:
                worker.save_layer(name)
            worker.start_loads()
            worker.finish_step()

    def loaded(self, request_id: str) -> set[str]:
        """Waits for a load on all ranks; returns the failed ones."""
        failed: set[str] = set()
        for worker in self.workers:
            done: set[str] = set()
            deadline = time.monotonic() + 30.0
            while request_id not in done:
                assert time.monotonic() < deadline
                results = worker.take_results()
                done |= results.done
                failed |= results.failed
                time.sleep(0.001)
        return failed

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def sides(tmp_path):
    made = []

    def make(ranks: int, kinds: str, seed: int, stages: int = 1) -> Side:
        made.append(Side(ranks, kinds, tmp_path, seed=seed, stages=stages))
        return made[-1]

    yield make
    for side in made:
        side.close()


def arena_for(folder: Path, layout: VllmLayout, *pages) -> ArenaRef:
    path = folder / "arena"
    path.write_bytes(bytes(num_pages(*pages) * layout.model.page_bytes))
    return ArenaRef(str(path), layout.model.page_bytes, num_pages(*pages), 1)


def assert_equal_blocks(source: Side, source_tables, target: Side, target_tables, num_tokens: int) -> None:
    for rank, tensors in enumerate(target.tensors):
        for place in (place for place in target.layout.places if place.layer.name in tensors):
            name, table = place.layer.name, place.layer.table
            ranks = target.layout.ranks
            expected = Side.shard(name, source.whole[name], rank % ranks, ranks)
            for block, (theirs, ours) in enumerate(zip(source_tables[table], target_tables[table], strict=True)):
                if ours:
                    assert torch.equal(tensors[name][ours], expected[theirs]), f"rank {rank} {name} block {block}"


@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (2, 8)])
def test_attention_moves_between_any_numbers_of_ranks(sides, tmp_path, here, there):
    n = 3 * BLOCK + 1
    source, target = sides(here, "fw", 1), sides(there, "fw", 2)
    assert source.layout.model.fingerprint == target.layout.model.fingerprint
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    full_table, window_table = (1, 2, 3, 4), (0, 0, 6, 7)
    source_tables = (full_table, window_table)
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (), source_tables),)))
    target_tables = ((5, 6, 7, 8), (0, 0, 9, 10))
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, target_tables),)))
    assert target.loaded("r") == set()
    assert_equal_blocks(source, source_tables, target, target_tables, n)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_move_between_equal_numbers_of_ranks(sides, tmp_path, ranks):
    n = 2 * BLOCK + 1
    source, target = sides(ranks, "fws", 1), sides(ranks, "fws", 2)
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    source_tables = ((1, 2, 3), (0, 5, 6), (0, 0, 7))
    target_tables = ((3, 2, 1), (0, 5, 4), (0, 0, 8))
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (n,), source_tables),)))
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, target_tables),)))
    assert target.loaded("r") == set()
    assert_equal_blocks(source, source_tables, target, target_tables, n)


@pytest.mark.parametrize(("here", "there"), [((1, 2), (1, 1)), ((1, 1), (1, 3)), ((1, 2), (1, 3)), ((2, 2), (2, 3))])
def test_layers_move_between_pipelines(sides, tmp_path, here, there):
    """(ranks, stages) of both sides: each stage saves and loads its own layers, whatever the other side's are."""
    n = 2 * BLOCK + 1
    source, target = sides(here[0], "fws", 1, here[1]), sides(there[0], "fws", 2, there[1])
    assert source.layout.model.fingerprint == target.layout.model.fingerprint
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    source_tables = ((1, 2, 3), (0, 5, 6), (0, 0, 7))
    target_tables = ((3, 2, 1), (0, 5, 4), (0, 0, 8))
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (n,), source_tables),)))
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, target_tables),)))
    assert target.loaded("r") == set()
    assert {name for tensors in target.tensors for name in tensors} == set(target.whole)
    assert_equal_blocks(source, source_tables, target, target_tables, n)


def test_blocks_that_vllm_has_already_are_left_alone(sides, tmp_path):
    n = 2 * BLOCK + 1
    source, target = sides(1, "f", 1), sides(1, "f", 2)
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    before = target.tensors[0]["0.attn"].clone()
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (), ((1, 2, 3),)),)))
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", BLOCK, n, ((4, 5, 6),)),)))
    assert target.loaded("r") == set()
    assert torch.equal(target.tensors[0]["0.attn"][4], before[4])
    assert torch.equal(target.tensors[0]["0.attn"][5], source.whole["0.attn"][2])


def test_a_step_with_nothing_to_compute_waits_for_a_load(sides, tmp_path):
    n = 2 * BLOCK
    side = sides(2, "f", 1)
    pages = pages_for(side.layout, n)
    load = LoadBlocks("r", "j", 0, n, ((1, 2),))
    side.step(ForwardStep("", arena_for(tmp_path, side.layout, pages), (pages,), (), (load,), is_idle=True))
    assert [worker.take_results().done for worker in side.workers] == [{"r"}, {"r"}]


def test_a_load_that_lacks_bytes_fails_and_writes_nothing(sides, tmp_path):
    n = 2 * BLOCK + 1
    target = sides(1, "fs", 2)
    pages = pages_for(target.layout, n)
    arena = arena_for(tmp_path, target.layout, pages)
    before = {name: tensor.clone() for name, tensor in target.tensors[0].items()}
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, ((1, 2, 3), (), (0, 0, 0))),)))
    assert target.loaded("r") == {"r"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.tensors[0].items())


def test_released_pages_are_neither_read_nor_written(sides, tmp_path):
    n = 2 * BLOCK
    side = sides(1, "f", 1)
    pages = pages_for(side.layout, n)
    arena = arena_for(tmp_path, side.layout, pages)
    side.step(ForwardStep("", arena, (pages,)))
    side.workers[0].release("j")
    side.step(
        ForwardStep("", arena, (), (SaveBlocks("j", 0, n, (), ((1, 2),)),), (LoadBlocks("r", "j", 0, n, ((1, 2),)),))
    )
    assert side.loaded("r") == {"r"}
    assert not any(Path(arena.path).read_bytes())
    side.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (), ((1, 2),)),)))
    assert not any(Path(arena.path).read_bytes()), "a grant that was built before the release came after it"


def test_counts_are_bytes_of_this_rank(sides, tmp_path):
    n = 2 * BLOCK
    side = sides(2, "f", 1)
    pages = pages_for(side.layout, n)
    side.step(
        ForwardStep("", arena_for(tmp_path, side.layout, pages), (pages,), (SaveBlocks("j", 0, n, (), ((1, 2),)),))
    )
    counts = side.workers[1].take_counts()
    assert counts.bytes_saved == side.layout.model.block_bytes(0)
    assert side.workers[1].take_counts().bytes_saved == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_another_size_are_refused(ranks):
    layout = layout_of(full("a"), ranks=1)
    with pytest.raises(PagesInvalid, match="blocks of"):
        WorkerSide(layout, 0).register({"a": torch.zeros(3, 1, BLOCK, 5)})
    with pytest.raises(PagesInvalid, match="no such"):
        WorkerSide(layout, 0).register({})


def copies_of(rows: list[int], *pieces: tuple[int, int, list[int]]) -> BlockCopies:
    """Pieces as (offset, length, starts)."""
    made = tuple(CopyPiece(offset, length, np.array(starts)) for offset, length, starts in pieces)
    return BlockCopies(np.array(rows), made)


@pytest.mark.parametrize("kind", [HostBlocks, StridedBlocks])
@pytest.mark.parametrize(
    ("rows", "starts"), [([1, -1], [0, 96]), ([1, NUM_BLOCKS], [0, 96]), ([1, 2], [0, -1]), ([1, 2], [0, 97])]
)
def test_what_is_not_there_is_refused_before_any_byte_is_copied(kind, rows, starts):
    tensor = torch.ones(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
    if kind is StridedBlocks:
        tensor = torch.ones(NUM_BLOCKS, BLOCK, HEADS, WIDTH).transpose(1, 2)
    size = HEADS * BLOCK * WIDTH * 4
    blocks, arena = blocks_of("a", tensor, size), np.zeros(96 + size, np.uint8)
    assert isinstance(blocks, kind)
    copies = [copies_of([3], (0, size, [0])), copies_of(rows, (0, size, starts))]
    with pytest.raises(IndexError):
        blocks.read(copies, arena, blocks.mark())
    with pytest.raises(IndexError):
        blocks.write(copies, arena)
    assert not arena.any()
    assert tensor.all()


def test_strided_blocks_read_and_write_what_contiguous_ones_do():
    """The way of accelerators: tensors whose tokens come before their heads."""
    torch.manual_seed(0)
    tensor = torch.rand(NUM_BLOCKS, BLOCK, HEADS, WIDTH)
    strided = tensor.transpose(1, 2)
    size = HEADS * BLOCK * WIDTH * 4
    assert isinstance(blocks_of("a", strided, size), StridedBlocks)
    assert isinstance(blocks_of("a", strided.contiguous(), size), HostBlocks)
    arenas = [np.zeros(3 * size, np.uint8) for _ in range(2)]
    copies = [
        copies_of([4], (0, size - 10, [7]), (size - 10, 10, [size + 50])),
        copies_of([2], (0, size, [2 * size])),
    ]
    for blocks, arena in zip(
        (blocks_of("a", strided, size), blocks_of("a", strided.contiguous(), size)), arenas, strict=True
    ):
        assert blocks.read(copies, arena, blocks.mark()) == 2 * size
    assert (arenas[0] == arenas[1]).all()
    copy = strided.clone(memory_format=torch.preserve_format).zero_()
    blocks_of("a", copy, size).write(copies, arenas[0])
    assert torch.equal(copy[4], strided[4])
    assert torch.equal(copy[2], strided[2])
    assert not copy[3].any()


class Stream:
    """An accelerator's, which shows what was waited for."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def wait_event(self, mark: object) -> None:
        self.seen.append(mark)

    def synchronize(self) -> None:
        self.seen.append("copied")

    def __enter__(self) -> None:
        self.seen.append("begun")

    def __exit__(self, *exc: object) -> None:
        self.seen.append("queued")


def test_copies_on_a_stream_begin_after_the_model_and_are_waited_for():
    """The order on an accelerator; the tensors here are the host's."""
    torch.manual_seed(0)
    strided = torch.rand(NUM_BLOCKS, BLOCK, HEADS, WIDTH).transpose(1, 2)
    size = HEADS * BLOCK * WIDTH * 4
    arena, stream = np.zeros(2 * size, np.uint8), Stream()
    blocks = StridedBlocks(strided, stream)
    copies = [copies_of([4, 2], (0, size, [0, size]))]
    assert blocks.read(copies, arena, "mark") == 2 * size
    assert stream.seen == ["mark", "begun", "queued", "copied"]
    assert (arena.view(np.float32)[: size // 4] == strided[4].reshape(-1).numpy()).all()
    before, stream.seen = strided.clone(), []
    strided[4] = strided[2] = 0.0
    assert blocks.write(copies, arena) == 2 * size
    assert stream.seen == ["begun", "queued", "copied"]
    assert torch.equal(strided, before)
