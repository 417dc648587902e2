"""Whatever goes wrong beside a step of the model: the step ends, the scheduler's side is told, the pages are safe."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.vllm.scheduler_side.steps import (
    ArenaRef,
    ForwardStep,
    LayerWritten,
    LoadBlocks,
    SaveBlocks,
    SaveFailed,
    StepWritten,
)
from engine.vllm.worker_side.worker import WorkerSide
from tests.engine.vllm.builders import BLOCK, full, layout_of, num_pages, pages_for
from tests.engine.vllm.worker_side.listener import WAIT_S, Scheduler
from transport.control.messages import JobPages

N = 2 * BLOCK
LAYOUT = layout_of(full("a", part_bytes=2 * BLOCK * 4))
TABLES = ((1, 2),)


class Hanging(torch.Tensor):
    """A tensor whose device does not answer until it is let."""

    hangs, reached, may_answer = False, threading.Event(), threading.Event()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.hangs:
            cls.reached.set()
            cls.may_answer.wait(WAIT_S)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def hanging() -> Iterator[type[Hanging]]:
    Hanging.reached.clear()
    Hanging.may_answer.clear()
    yield Hanging
    Hanging.hangs = False
    Hanging.may_answer.set()


def worker(tensor: torch.Tensor, **options: Any) -> WorkerSide:
    made = WorkerSide(LAYOUT, 0, load_wait_s=WAIT_S, **options)
    made.register({"a": tensor})
    return made


def kv(fill: float = 1.0) -> torch.Tensor:
    return torch.full((4, 1, BLOCK, 2), fill)


def arena_for(folder: Path, *pages: JobPages) -> ArenaRef:
    path = folder / "arena"
    path.write_bytes(bytes(num_pages(*pages) * LAYOUT.model.page_bytes))
    return ArenaRef(str(path), LAYOUT.model.page_bytes, num_pages(*pages), 1)


def run(side: WorkerSide, step: ForwardStep) -> None:
    side.begin_step(step)
    side.save_layer("a")
    side.start_loads()
    side.finish_step()


def saving(pages: JobPages) -> tuple[SaveBlocks, ...]:
    return (SaveBlocks(pages.job, 0, N, (), TABLES),)


def test_a_save_that_hangs_costs_its_job_and_neither_the_step_nor_anothers_pages(
    scheduler: Scheduler, tmp_path: Path, hanging: type[Hanging]
) -> None:
    pages = pages_for(LAYOUT, N)
    arena = arena_for(tmp_path, pages)
    tensor = torch.ones(4, BLOCK, 2, 1).transpose(1, 2).as_subclass(hanging)
    side = worker(tensor, save_timeout_s=0.05)
    hanging.hangs = True
    run(side, ForwardStep(str(scheduler.path), arena, (pages,), saving(pages)))
    scheduler.wait_for(SaveFailed, "j")
    assert side.take_counts().saves_given_up == 1
    assert hanging.reached.is_set()
    released = threading.Thread(target=scheduler.release, args=("j",))
    released.start()
    assert released.is_alive(), "its pages stay with it while the copy may still write"
    hanging.hangs = False
    hanging.may_answer.set()
    released.join(WAIT_S)
    assert not released.is_alive()
    other = pages_for(LAYOUT, N, job="k")
    run(side, ForwardStep(str(scheduler.path), None, (other,), saving(other)))
    scheduler.wait_for(StepWritten, "k")
    side.close()
    assert not any(
        isinstance(message, LayerWritten | StepWritten) and message.job == "j" for message in scheduler.heard
    )


def test_pages_that_cannot_be_mapped_fail_what_needs_them(scheduler: Scheduler, tmp_path: Path) -> None:
    pages = pages_for(LAYOUT, N)
    side = worker(kv())
    gone = ArenaRef(str(tmp_path / "gone"), LAYOUT.model.page_bytes, num_pages(pages), 1)
    run(
        side,
        ForwardStep(
            str(scheduler.path), gone, (pages,), saving(pages), (LoadBlocks("r", "j", 0, N, TABLES),), is_idle=True
        ),
    )
    assert side.take_results().failed == {"r"}
    scheduler.wait_for(SaveFailed, "j")
    side.close()


def test_without_a_link_no_pages_are_taken_and_it_is_said_later(scheduler: Scheduler, tmp_path: Path) -> None:
    """Then no request could ask for them back."""
    pages = pages_for(LAYOUT, N)
    arena = arena_for(tmp_path, pages)
    side = worker(kv())
    run(side, ForwardStep(str(tmp_path / "nobody.sock"), arena, (pages,), saving(pages)))
    assert not any(Path(arena.path).read_bytes())
    run(side, ForwardStep(str(scheduler.path), arena))
    scheduler.wait_for(SaveFailed, "j")
    side.close()


def test_a_rank_that_counts_as_gone_touches_no_pages(tmp_path: Path) -> None:
    pages = pages_for(LAYOUT, N)
    arena = arena_for(tmp_path, pages)
    side = worker(kv())
    scheduler = Scheduler(tmp_path)
    run(side, ForwardStep(str(scheduler.path), arena, (pages,), saving(pages)))
    scheduler.wait_for(StepWritten, "j")
    Path(arena.path).write_bytes(bytes(Path(arena.path).stat().st_size))
    scheduler.close()
    load = ForwardStep("", arena, (), (), (LoadBlocks("r", "j", 0, N, TABLES),), is_idle=True)
    deadline, failed = time.monotonic() + WAIT_S, set[str]()
    while not failed and time.monotonic() < deadline:  # until it has noticed
        run(side, load)
        failed = side.take_results().failed
    assert failed == {"r"}
    run(side, ForwardStep("", arena, (), saving(pages)))
    assert not any(Path(arena.path).read_bytes())
    side.close()
