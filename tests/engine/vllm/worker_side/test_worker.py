"""Ranks of two engines around one arena, with real tensors: what one side saves the other loads, whatever their number."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import PagesInvalid
from engine.vllm.layout import CacheLayer, VllmLayout
from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, LoadBlocks, SaveBlocks, StateOffer, StepWritten
from engine.vllm.worker_side.device import HostDevice
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for, state, window
from tests.engine.vllm.worker_side.lazy_device import LazyDevice
from tests.engine.vllm.worker_side.listener import Scheduler

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


class EagerDevice(HostDevice):
    """The host, as a model uses it."""

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def synchronize(self) -> None:
        return


DEVICES: dict[str, Callable[[], EagerDevice | LazyDevice]] = {
    "eager": EagerDevice,
    "lazy": LazyDevice,
    "lazy, not registered": lambda: LazyDevice(registers=False),
}


class Side:
    """All ranks of one engine, each with a device. Whole tensors hold what all ranks together compute in a step. Stage s of
    n has every nth layer from s on."""

    def __init__(self, ranks: int, kinds: str, device: str, *, seed: int, stages: int = 1) -> None:
        self.layout: VllmLayout = layout_of(*layers(ranks, kinds), ranks=ranks, stages=stages)
        torch.manual_seed(seed)
        self.whole = {
            layer.name: torch.randint(0, 100, (NUM_BLOCKS, 1, 1, STATE_BYTES), dtype=torch.int8)
            if layer.name.endswith("mixer")
            else torch.rand(NUM_BLOCKS, HEADS, BLOCK, WIDTH)
            for layer in layers(ranks, kinds)
        }
        self.computed = [
            {name: self.shard(name, self.whole[name], rank, ranks) for name in sorted(self.whole)[stage::stages]}
            for stage in range(stages)
            for rank in range(ranks)
        ]
        self.tensors = [
            {name: torch.full_like(tensor, 5) for name, tensor in tensors.items()} for tensors in self.computed
        ]
        self.devices = [DEVICES[device]() for _ in self.tensors]
        self.workers = [
            WorkerSide(
                self.layout, rank, own=tensors.keys(), load_wait_s=LOAD_WAIT_S, devices=lambda _, made=made: made
            )
            for rank, (tensors, made) in enumerate(zip(self.tensors, self.devices, strict=True))
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
        """The model zeroes what is to be loaded into, and fills the blocks that are saved. Then it has others use them."""
        for worker, device, tensors, computed in zip(
            self.workers, self.devices, self.tensors, self.computed, strict=True
        ):
            for load in step.loads:
                self._fill(device, tensors, load, lambda tensor, blocks: tensor.index_fill_(0, blocks, 0))
            worker.begin_step(step)
            for name, tensor in tensors.items():
                if step.saves:
                    device.launch(lambda tensor=tensor, name=name, computed=computed: tensor.copy_(computed[name]))
                worker.save_layer(name)
            worker.start_loads()
            worker.finish_step()
            for save in step.saves:
                self._fill(device, tensors, save, lambda tensor, blocks: tensor.index_fill_(0, blocks, 3))

    def _fill(self, device, tensors, of: SaveBlocks | LoadBlocks, fill) -> None:
        for place in self.layout.places:
            if (tensor := tensors.get(place.layer.name)) is not None:
                blocks = torch.tensor([block for block in of.tables[place.layer.table] if block], dtype=torch.long)
                device.launch(lambda tensor=tensor, blocks=blocks: fill(tensor, blocks))

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
        self.synchronize()
        return failed

    def synchronize(self) -> None:
        for device in self.devices:
            device.synchronize()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture(params=DEVICES)
def sides(request):
    made = []

    def make(ranks: int, kinds: str, seed: int, stages: int = 1) -> Side:
        made.append(Side(ranks, kinds, request.param, seed=seed, stages=stages))
        return made[-1]

    yield make
    for side in made:
        side.close()


def arena_for(folder: Path, layout: VllmLayout, *pages) -> ArenaRef:
    path = folder / "arena"
    path.write_bytes(bytes(num_pages(*pages) * layout.model.page_bytes))
    return ArenaRef(str(path), layout.model.page_bytes, num_pages(*pages), 1)


def move(folder: Path, source: Side, source_tables, target: Side, target_tables, num_tokens: int, *states) -> set[str]:
    """What one side has computed goes through pages into blocks of the other; returns the loads that failed."""
    pages = pages_for(source.layout, num_tokens)
    arena = arena_for(folder, source.layout, pages)
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, num_tokens, states, source_tables),)))
    source.synchronize()
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, num_tokens, target_tables),)))
    return target.loaded("r")


def assert_equal_blocks(source: Side, source_tables, target: Side, target_tables) -> None:
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
    source_tables, target_tables = ((1, 2, 3, 4), (0, 0, 6, 7)), ((5, 6, 7, 8), (0, 0, 9, 10))
    assert move(tmp_path, source, source_tables, target, target_tables, n) == set()
    assert_equal_blocks(source, source_tables, target, target_tables)


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_move_between_equal_numbers_of_ranks(sides, tmp_path, ranks):
    n = 2 * BLOCK + 1
    source, target = sides(ranks, "fws", 1), sides(ranks, "fws", 2)
    source_tables, target_tables = ((1, 2, 3), (0, 5, 6), (0, 0, 7)), ((3, 2, 1), (0, 5, 4), (0, 0, 8))
    assert move(tmp_path, source, source_tables, target, target_tables, n, n) == set()
    assert_equal_blocks(source, source_tables, target, target_tables)


def test_a_state_that_a_step_leaves_behind_is_taken_from_the_block_that_has_it(sides, tmp_path):
    """The table has null there, or the block of the step's end."""
    n = 2 * BLOCK
    source, target = sides(1, "fs", 1), sides(1, "fs", 2)
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    save = SaveBlocks("j", 0, n, (n,), ((1, 2), (), (0, 0, 8)), (StateOffer(2, 7, n),))
    source.step(ForwardStep("", arena, (pages,), (save,)))
    source.synchronize()
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, ((3, 4), (), (0, 5))),)))
    assert target.loaded("r") == set()
    assert torch.equal(target.tensors[0]["2.mixer"][5], source.whole["2.mixer"][7][..., :STATE_BYTES])


@pytest.mark.parametrize(("here", "there"), [((1, 2), (1, 1)), ((1, 1), (1, 3)), ((1, 2), (1, 3)), ((2, 2), (2, 3))])
def test_layers_move_between_pipelines(sides, tmp_path, here, there):
    """(ranks, stages) of both sides: each stage saves and loads its own layers, whatever the other side's are."""
    n = 2 * BLOCK + 1
    source, target = sides(here[0], "fws", 1, here[1]), sides(there[0], "fws", 2, there[1])
    assert source.layout.model.fingerprint == target.layout.model.fingerprint
    source_tables, target_tables = ((1, 2, 3), (0, 5, 6), (0, 0, 7)), ((3, 2, 1), (0, 5, 4), (0, 0, 8))
    assert move(tmp_path, source, source_tables, target, target_tables, n, n) == set()
    assert {name for tensors in target.tensors for name in tensors} == set(target.whole)
    assert_equal_blocks(source, source_tables, target, target_tables)


def test_blocks_that_vllm_has_already_are_left_alone(sides, tmp_path):
    n = 2 * BLOCK + 1
    source, target = sides(1, "f", 1), sides(1, "f", 2)
    pages = pages_for(source.layout, n)
    arena = arena_for(tmp_path, source.layout, pages)
    source.step(ForwardStep("", arena, (pages,), (SaveBlocks("j", 0, n, (), ((1, 2, 3),)),)))
    source.synchronize()
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", BLOCK, n, ((4, 5, 6),)),)))
    assert target.loaded("r") == set()
    assert not target.tensors[0]["0.attn"][4].any(), "as the model left it"
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
    Path(arena.path).write_bytes(b"x" * Path(arena.path).stat().st_size)
    target.step(ForwardStep("", arena, (pages,), (), (LoadBlocks("r", "j", 0, n, ((1, 2, 3), (), (0, 0, 0))),)))
    assert target.loaded("r") == {"r"}
    assert not target.tensors[0]["0.attn"][1:4].any(), "as the model left it"
    assert (target.tensors[0]["2.mixer"] == 5).all()


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
    side.synchronize()
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


def test_without_the_waits_the_lazy_device_moves_what_is_not_there(tmp_path, monkeypatch):
    """What shows that the tests above mean something: saved too early or too late, or overwritten when loaded."""
    monkeypatch.setitem(DEVICES, "no order", lambda: LazyDevice(keeps_order=False))
    n, tables = 2 * BLOCK, ((1, 2),)
    ordered, loose = (Side(1, "f", device, seed=1) for device in ("lazy", "no order"))
    assert move(tmp_path, loose, tables, ordered, tables, n) == set()
    with pytest.raises(AssertionError):
        assert_equal_blocks(loose, tables, ordered, tables)
    assert move(tmp_path, ordered, tables, loose, tables, n) == set()
    assert not loose.tensors[0]["0.attn"][1:3].any(), "zeroed behind the load"
    for side in (ordered, loose):
        side.close()


def test_a_step_ends_while_its_device_still_copies(scheduler: Scheduler, tmp_path):
    """Its own next work waits for them, and the announcement does. The model's thread does not."""
    n, tables = 2 * BLOCK, ((1, 2),)
    side = Side(1, "f", "lazy", seed=1)
    pages = pages_for(side.layout, n)
    arena = arena_for(tmp_path, side.layout, pages)
    (device,) = side.devices
    device.may_work.clear()
    side.step(ForwardStep(str(scheduler.path), arena, (pages,), (SaveBlocks("j", 0, n, (), tables),)))
    released = threading.Thread(target=scheduler.release, args=("j",))
    released.start()
    assert released.is_alive(), "pages stay with a copy that is under way"
    assert not scheduler.heard
    device.may_work.set()
    scheduler.wait_for(StepWritten, "j")
    released.join(LOAD_WAIT_S)
    side.synchronize()
    saved = np.fromfile(arena.path, np.float32)[: side.whole["0.attn"][1].numel()]
    assert (saved == side.whole["0.attn"][1].reshape(-1).numpy()).all()
    assert (side.tensors[0]["0.attn"][1] == 3).all(), "and then the model used the block for something else"
    side.close()
