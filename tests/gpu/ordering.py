"""Part A: copies of the connector's workers come after what they must, and how fast they are. No vLLM, no model.

The "model" is a slow operator before each of its own: so whatever does not wait for it comes first. The same rounds without
the waits are the negative control, and must go wrong.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.agent.block_copies import BlockCopies, CopyPiece
from engine.agent.job_pages import MappedArena
from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, LoadBlocks, SaveBlocks
from engine.vllm.worker_side.blocks import blocks_of
from engine.vllm.worker_side.device import ArenaMemory, CopyDevice, CopyStream, Mark, Moves
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for

LAYERS = 4
ROUNDS = 8
WIDTH = 4096  # bytes of a token
WAIT_S = 30.0
POLL_S = 0.001


class Machine(Protocol):
    """A device, as a model uses it."""

    port: CopyDevice
    torch_device: torch.device

    def launch(self, work: Callable[[], object]) -> None:
        """An operator of the model, behind a slow one."""

    def synchronize(self) -> None: ...


class UnorderedStream:
    """A stream that waits for nothing."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream

    def wait_for(self, mark: Mark) -> None:
        return

    def copy(self, moves: Moves) -> None:
        self._stream.copy(moves)

    def run(self, work: Callable[[], object]) -> None:
        self._stream.run(work)

    def mark(self) -> Mark:
        return self._stream.mark()


class Watched:
    """A device whose arena is known, with the waits of the port or without."""

    def __init__(self, port: CopyDevice, *, waits: bool) -> None:
        self._port = port
        self._waits = waits
        self.memory: ArenaMemory | None = None

    def stream(self) -> CopyStream:
        stream = self._port.stream()
        return stream if self._waits else UnorderedStream(stream)

    def mark(self) -> Mark:
        return self._port.mark()

    def hold_model(self, mark: Mark) -> None:
        if self._waits:
            self._port.hold_model(mark)

    def host_rows(self, rows: int, row_bytes: int) -> torch.Tensor:
        return self._port.host_rows(rows, row_bytes)

    def adopt(self, memory: ArenaMemory) -> None:
        self.memory = memory
        self._port.adopt(memory)

    def close(self) -> None:
        self._port.close()


def ordering(machine: Machine, *, registered: bool, waits: bool = True, rounds: int = ROUNDS) -> list[str]:
    """What went wrong, one line each. `registered`: whether copies are to go straight to the arena."""
    port = Watched(machine.port, waits=waits)
    layout = layout_of(*(full(f"l.{number}", part_bytes=BLOCK * WIDTH) for number in range(LAYERS)))
    num_tokens = 16 * BLOCK
    pages = pages_for(layout, num_tokens)
    tables = (tuple(range(1, 17)),)
    wrong = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "arena")
        path.write_bytes(bytes(num_pages(pages) * layout.model.page_bytes))
        arena = ArenaRef(str(path), layout.model.page_bytes, num_pages(pages), 1)
        side = WorkerSide(layout, 0, devices=lambda _: port)
        tensors = {
            place.layer.name: torch.zeros((20, 1, BLOCK, WIDTH), dtype=torch.uint8, device=machine.torch_device)
            for place in layout.places
        }
        side.register(tensors)
        side.begin_step(ForwardStep("", arena, (pages,)))
        side.finish_step()
        assert port.memory is not None
        if registered and not _is_registered(port.memory):
            wrong.append("the arena could not be registered")
        for number in range(rounds):
            value = number % 200 + 1
            _save(machine, side, tensors, SaveBlocks("j", 0, num_tokens, (), tables), value)
            held = np.fromfile(path, np.uint8)
            if (count := int((held == value).sum())) != len(tensors) * num_tokens * WIDTH:
                wrong.append(f"round {number}: {count} bytes of {len(tensors) * num_tokens * WIDTH} were saved")
            if failed := _load(machine, side, tensors, LoadBlocks(f"r{number}", "j", 0, num_tokens, tables)):
                wrong.append(f"round {number}: loads failed: {failed}")
            lost = [name for name, tensor in tensors.items() if not (tensor[1:17] == value).all()]
            if lost:
                wrong.append(f"round {number}: not loaded: {lost}")
        side.close()
    return wrong


def _is_registered(memory: ArenaMemory) -> bool:
    """Waits for it: another thread registers."""
    deadline = time.monotonic() + WAIT_S
    while not memory.is_registered and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return memory.is_registered


def _save(machine: Machine, side: WorkerSide, tensors: dict[str, torch.Tensor], save: SaveBlocks, value: int) -> None:
    side.begin_step(ForwardStep("", None, (), (save,)))
    for name, tensor in tensors.items():
        machine.launch(lambda tensor=tensor: tensor.fill_(value))
        side.save_layer(name)
    side.start_loads()
    side.finish_step()
    for tensor in tensors.values():  # the next step has the blocks for something else
        machine.launch(lambda tensor=tensor: tensor.fill_(255))
    machine.synchronize()


def _load(machine: Machine, side: WorkerSide, tensors: dict[str, torch.Tensor], load: LoadBlocks) -> set[str]:
    for tensor in tensors.values():
        machine.launch(lambda tensor=tensor: tensor.zero_())
    side.begin_step(ForwardStep("", None, (), (), (load,)))
    side.start_loads()
    side.finish_step()
    deadline = time.monotonic() + WAIT_S
    while load.request_id not in (results := side.take_results()).done:
        if time.monotonic() > deadline:
            return {"not ended"}
        time.sleep(POLL_S)
    machine.synchronize()
    return results.failed


def rates(machine: Machine, *, total_bytes: int, block_bytes: int, registered: bool) -> dict[str, float]:
    """GB/s of one layer's copies each way."""
    count = total_bytes // block_bytes
    tensor = torch.zeros((count, 1, 1, block_bytes), dtype=torch.uint8, device=machine.torch_device)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "arena")
        path.touch()
        with path.open("r+b") as file:
            file.truncate(total_bytes)
        memory = ArenaMemory(MappedArena.open(path, block_bytes, count).data)
        if registered:
            machine.port.adopt(memory)
            _is_registered(memory)
        blocks, stream = blocks_of("a", tensor, block_bytes, machine.port), machine.port.stream()
        order = np.random.default_rng(0).permutation(count).astype(np.int64)
        copies = [BlockCopies(order, (CopyPiece(0, block_bytes, np.arange(count, dtype=np.int64) * block_bytes),))]
        found: dict[str, float] = {"is_registered": float(memory.is_registered)}
        for name, copy in (("to_host", blocks.read), ("to_device", blocks.write)):
            copy(copies, memory, stream).wait()  # once to warm up
            began_s = time.perf_counter()
            submitted = copy(copies, memory, stream)
            submitted_s = time.perf_counter()
            submitted.wait()
            found[f"{name}_gb_per_s"] = count * block_bytes / (time.perf_counter() - began_s) / 1e9
            found[f"{name}_submit_ms"] = 1e3 * (submitted_s - began_s)
        machine.port.close()
    return found
