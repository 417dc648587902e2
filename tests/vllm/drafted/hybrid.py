"""A server over a hybrid with drafts whose steps overlap: vLLM's scheduler, both sides of our connector, and no model.

A step is put together before the one before has said what it sampled. What the device is given is done as late as it may be.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch

from engine.vllm.layout import CacheLayer, LayerKind, VllmLayout, vllm_layout
from engine.vllm.scheduler_side.errands import Arrived, ErrandWritten, Granted
from engine.vllm.scheduler_side.steps import ArenaRef, LayerWritten, SaveFailed, StateWritten, StepWritten
from engine.vllm.worker_side.worker import LoadResults, WorkerSide
from tests.engine.vllm.builders import num_pages, pages_for
from tests.engine.vllm.scripted import LEG, Agent
from tests.engine.vllm.worker_side.lazy_device import LazyDevice
from tests.engine.vllm.worker_side.listener import Scheduler
from tests.vllm.drafted.device_runner import KEPT, REST, UNWRITTEN, DeviceRunner, attended, state_after
from tests.vllm.scheduled import BLOCK, Caches, Scheduled
from transport.control.messages import Delivered, JobPages

WORD: Final = 4  # bytes
MODEL_LEN: Final = 1024
DEPTH: Final = 2  # steps that are under way
PAGES: Final = 4096


def hybrid(drafts: int, *, aligned: bool, num_blocks: int = 64) -> Caches:
    """Attention, and states of two groups. `aligned`: they are kept at borders of blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

    mode, size = ("align", BLOCK) if aligned else ("none", MODEL_LEN)
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    state = MambaSpec(
        block_size=size, shapes=((KEPT + drafts, 1), (REST,)), dtypes=(torch.int32, torch.int32),
        page_size_padded=attention.page_size_bytes, mamba_cache_mode=mode, num_speculative_blocks=drafts,
    )  # fmt: skip
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], state), KVCacheGroupSpec(["t"], state)]
    return Caches(groups, layout(drafts, size), mode, num_blocks)


def layout(drafts: int, state_tokens: int) -> VllmLayout:
    states = [
        CacheLayer(
            name=name, table=table, kind=LayerKind.STATE, block_tokens=state_tokens, part_bytes=(KEPT + REST) * WORD,
            parts=1, gap_at=KEPT * WORD if drafts else 0, gap_bytes=drafts * WORD,
        )
        for table, name in enumerate("st", 1)
    ]  # fmt: skip
    attention = CacheLayer(name="a", table=0, kind=LayerKind.FULL, block_tokens=BLOCK, part_bytes=BLOCK * WORD, parts=1)
    return vllm_layout([attention, *states], model="tiny", dtype="float32", block_tokens=BLOCK, ranks=1)


@dataclass
class Job:
    """A request's pages, and what has been said of them."""

    request: str
    prompt: list[int]
    pages: JobPages
    is_leg: bool
    states: set[tuple[int, int]] = field(default_factory=set)  # (layer, length), written
    layers: dict[int, int] = field(default_factory=dict)  # tokens written, by layer
    unfilled: list[tuple[int, int]] | None = None  # once its last step has been put together
    is_whole: bool = False  # every layer up to its end
    is_over: bool = False


class HybridAgent(Agent):
    """Has pages for each prompt, at once: a state at each border of blocks, and at the end."""

    def __init__(self, layout: VllmLayout, arena: ArenaRef) -> None:
        super().__init__()
        self._layout, self._arena, self._page = layout, arena, 0
        self.jobs: dict[int, Job] = {}
        self.release: Callable[[str], None] = lambda job: None  # of its pages, by the ranks

    def begin(self, request_id, prompt, num_tokens, salt, ticket, hints, insets):  # type: ignore[no-untyped-def]
        number = super().begin(request_id, prompt, num_tokens, salt, ticket, hints, insets)
        pages = pages_for(self._layout, num_tokens, job=f"j{number}", first=self._page)
        self._page = num_pages(pages)
        for group, lengths in enumerate(pages.states):
            for length in range(BLOCK, num_tokens, BLOCK) if lengths else ():
                size = self._layout.model.pages_per_block(group)
                lengths[length] = tuple(range(self._page, self._page + size))
                self._page += size
        assert self._page <= PAGES
        self.jobs[number] = Job(request_id, list(prompt[:num_tokens]), pages, ticket is not None)
        self.events.append(Granted(number, pages, self._arena))
        return number

    def last_step(self, errand, unfilled, *, computed_tokens, so_far_s):  # type: ignore[no-untyped-def]
        self.jobs[errand].unfilled = list(unfilled)

    def end(self, errand, *, loaded=False, reason=""):  # type: ignore[no-untyped-def]
        super().end(errand, loaded=loaded, reason=reason)
        self.jobs[errand].is_over = True
        self.release(self.jobs[errand].pages.job)


class Server:
    """One server. `right`: how many drafts of each step are, in turn."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        drafts: int,
        aligned: bool,
        right: Sequence[int] = (0,),
        blocks: int = 64,
        keeps_order: bool = True,
    ) -> None:
        caches = hybrid(drafts, aligned=aligned, num_blocks=blocks)
        self.layout = caches.layout
        arena = ArenaRef(str(folder / "arena"), self.layout.model.page_bytes, PAGES, 1)
        self._arena = Path(arena.path)
        self._arena.write_bytes(bytes(PAGES * arena.page_bytes))
        self.agent = HybridAgent(self.layout, arena)
        speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        options: dict[str, Any] = {"speculative_config": speculation} if drafts else {}
        self.scheduled = Scheduled(model, caches=caches, agent=self.agent, **options)
        self._listener = Scheduler(folder)
        self.agent.rank_socket = str(self._listener.path)
        device = LazyDevice(keeps_order=keeps_order)
        self._worker = WorkerSide(self.layout, 0, devices=lambda _: device)
        shapes = {"a": (BLOCK, 1), "s": (1, KEPT + drafts + REST), "t": (1, KEPT + drafts + REST)}
        tensors = {
            name: torch.full((blocks, 1, *shape), UNWRITTEN, dtype=torch.int32) for name, shape in shapes.items()
        }
        self._worker.register(tensors)
        self.agent.release = self._worker.release
        self._answers: dict[str, Sequence[int]] = {}
        guesses = cycle(right)
        self.runner = DeviceRunner(
            device, tensors["a"], {1: tensors["s"], 2: tensors["t"]}, BLOCK, drafts, aligned,
            lambda name, number: self._answers[name][number % len(self._answers[name])], lambda: next(guesses),
        )  # fmt: skip
        self.answered: dict[str, Any] = {}  # what vLLM says at its end, by request
        self.said: dict[str, list[int]] = {}
        self._under_way: deque[tuple[dict[str, list[int]], LoadResults]] = deque()
        self._heard = 0
        self.counts: dict[str, int] = {}  # tokens of the last step, by request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self._listener.close()

    def ask(self, name: str, prompt: Sequence[int], answer: Sequence[int], *, leg: bool, max_tokens: int = 6) -> Any:
        self._answers[name] = answer
        self.said[name] = []
        return self.scheduled.ask(name, prompt, LEG if leg else None, max_tokens=max_tokens)

    def begin(self) -> None:
        """The next step is put together, and given to the device."""
        step = self.scheduled.schedule()
        self._worker.begin_step(step.kv_connector_metadata.step)
        self.runner.begin(step)
        self.counts = dict(step.num_scheduled_tokens)
        sampled: dict[str, list[int]] = {}
        if step.total_num_scheduled_tokens:
            computed = self.runner.compute(step, lambda: self._worker.save_layer("a"))
            self._worker.finish_forward()
            sampled = self.runner.sample(computed)
        self._worker.start_loads()
        self._worker.finish_step()
        self._under_way.append((sampled, self._worker.take_results()))

    def end(self) -> None:
        """The oldest step has been heard of."""
        for name, output in self.scheduled.end(*self._under_way.popleft()).items():
            self.said[name] += output.new_token_ids
            if output.finished:
                self.answered[name] = output

    def step(self) -> None:
        """As vLLM's engine: the next step begins before the one before is heard of."""
        self.begin()
        while len(self._under_way) >= DEPTH:
            self.end()

    def preempt(self) -> bool:
        """The last request that runs, as when there are no blocks left; false: none runs."""
        running = self.scheduled.scheduler.running
        if running:
            self.scheduled.scheduler._preempt_request(running.pop(), 0.0)
        return bool(running)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduled.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def hear(self) -> None:
        """The ranks announce what the device has done so far. The agent then delivers the jobs that are written whole."""
        self.runner.device.synchronize()
        ends = {
            (job.pages.job, job.pages.num_tokens)
            for job in self.agent.jobs.values()
            if job.unfilled is not None and not job.is_over
        }
        heard = self._listener.heard
        self._listener.wait_until(
            lambda: ends <= {(each.job, each.num_tokens) for each in heard if isinstance(each, StepWritten)}
        )
        for message in heard[self._heard :]:
            self._note(message)
        self._heard = len(heard)

    def _note(self, message: Any) -> None:
        assert not isinstance(message, SaveFailed), message
        number = int(getattr(message, "job", "j0")[1:])
        if (job := self.agent.jobs.get(number)) is None:
            return
        match message:
            case LayerWritten(layer=layer, num_tokens=num_tokens):
                job.layers[layer] = max(job.layers.get(layer, 0), num_tokens)
            case StateWritten(layer=layer, num_tokens=length):
                job.states.add((layer, length))
            case StepWritten(num_tokens=num_tokens) if num_tokens >= job.pages.num_tokens and not job.is_whole:
                job.is_whole = True
                outcome = Delivered(job=job.pages.job, ok=True)
                self.agent.events.append(Arrived(number, outcome) if job.is_leg else ErrandWritten(number))

    # What lies in pages

    def saved_attention(self, job: Job, stop: int) -> list[int]:
        """Of the first tokens."""
        blocks = [self._words(pages)[:BLOCK] for pages in job.pages.blocks[self._group("a")][: -(-stop // BLOCK)]]
        return [int(word) for block in blocks for word in block][:stop]

    def saved_state(self, job: Job, layer: int, length: int) -> list[int]:
        place = self.layout.places[layer]
        words = self._words(job.pages.states[place.group][length])
        size = KEPT + REST
        return [int(word) for word in words[place.layer_index * size :][:size]]

    def _group(self, name: str) -> int:
        return next(place.group for place in self.layout.places if place.layer.name == name)

    def _words(self, pages: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        held = np.fromfile(self._arena, np.int32).reshape(PAGES, -1)
        return np.concatenate([held[page] for page in pages])


def left(server: Server) -> dict[str, int]:
    """What is remembered of requests that are over."""
    side, worker = server.scheduled.side, server._worker
    remembered = {
        "requests": side._requests, "handovers": side._handovers, "errands": side._errands, "grants": side._grants,
        "loads": side._loads, "grants of the rank": worker._grants, "saves": worker._saves,
    }  # fmt: skip
    return {name: len(each) for name, each in remembered.items() if each}


def mistakes(server: Server) -> list[str]:
    """What has been announced and is not what a server without drafts would have. That more is announced than a prompt has."""
    found = list(server.runner.wrong)
    for job in server.agent.jobs.values():
        where = f"{job.request}, {len(job.prompt)} tokens"
        for layer, num_tokens in job.layers.items():
            if num_tokens > len(job.prompt):
                found.append(f"{where}: layer {layer} up to {num_tokens}")
            elif server.saved_attention(job, num_tokens) != [
                attended(token, position) for position, token in enumerate(job.prompt[:num_tokens])
            ]:
                found.append(f"{where}: layer {layer} is wrong")
        for layer, length in job.states:
            saved, expected = server.saved_state(job, layer, length), state_after(job.prompt[:length])
            if saved != expected:
                found.append(f"{where}: layer {layer} after {length}: {saved}, not {expected}")
    return found
