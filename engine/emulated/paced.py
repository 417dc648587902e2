"""The scheduler of an engine that computes nothing: every step is due at a time, and no thread waits for it.

It computes one prompt after the other, in the order of arrival, as the planner's simulator does. Tenants take turns
chunk by chunk (`engine.runtime.turns`). A batch decodes beside it:

    prompt   | what the server takes | chunk: layer, layer, ... | chunk: ... | next prompt
    batch    | goes on               | stands still                          | goes on

With several stages the next chunk, or the next prompt, begins when the first of them is free
(`engine.emulated.pipeline`). Landings load at once: there is nothing to compute.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from engine.emulated.emulated import EmulatedEngine
from engine.emulated.pipeline import EmulatedPipeline, Passage
from engine.emulated.standin import StandIn
from engine.errors import EngineError
from engine.runtime.batch import DecodeBatch
from engine.runtime.scheduler import Keep, ModelWork, Scheduler, SchedulerLoad
from engine.runtime.steps import Steps
from prompts.tokens.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

ROUNDING_S: Final = 0.0005  # uvloop's timers have milliseconds: rather late than early, and called again at once


class PacedScheduler(Scheduler):
    """The queue of a stand-in. `step` does what is due by now, `due_at` says when that is next."""

    def __init__(
        self,
        engine: EmulatedEngine,
        tokenizer: TextTokenizer,
        clock: Callable[[], float],
        stand_in: StandIn,
        *,
        chunk_tokens: int,
        stages: int = 1,
    ) -> None:
        """`stages` computers share the layers evenly, so that each has an Nth of `stand_in`'s time for a chunk."""
        super().__init__(engine, tokenizer, clock, chunk_tokens=chunk_tokens, max_running=stand_in.max_running)
        self._emulated = engine
        self._stand_in = stand_in
        self._batch: DecodeBatch[ModelWork] = DecodeBatch(stand_in.decode_step_s)
        self._pipeline = EmulatedPipeline(stages)
        self._entering: ModelWork | None = None  # whose next chunk comes to the first stage at `_enters_s`
        self._enters_s = 0.0
        self._under_way: list[_Chunk] = []

    @property
    def due_at(self) -> float:
        """Seconds on the scheduler's clock; inf while there is nothing to do."""
        now = self._clock()
        return now if self._keeping else min(self._prompt_due_s(now), self._batch.due_at())

    def step(self) -> None:
        now = self._clock()
        self._drop_aborted()
        self._let_go(now)
        self._take_landings(now)
        self._compute(now)
        due = self._batch.due(now)
        if due:
            batch = len(self._batch)
            self.steps.note(batch, self._stand_in.decode_step_s(batch) * self._stand_in.steps_per_token)
        self._decode(due)
        for work in due:
            if work in self._decoding:
                self._batch.go_on(work, self._stand_in.steps_per_token)
        self._let_go(now)
        self._take_landings(now)
        self._keep_some()

    def _let_go(self, now: float) -> None:
        """Drops sequences that have ended or were aborted."""
        for work in self._batch.members:
            if work not in self._decoding:
                self._batch.leave(now, work)
        self._drop_prompts(now)

    def _drop_prompts(self, now: float) -> None:
        if self._entering is not None and self._entering not in self._prefilling:
            self._entering = None
        if any(chunk.work not in self._prefilling for chunk in self._under_way):
            self._under_way = [chunk for chunk in self._under_way if chunk.work in self._prefilling]
            if not self._under_way:
                self._pipeline.clear(now)
                self._batch.hold(now, held=False)

    def _take_landings(self, now: float) -> None:
        while (work := self._next_landing(self._may_begin(now), now)) is not None:
            self._begin(work)
            self._guarded(self._prefill_some, work)
            self._join(now, work)

    def _compute(self, now: float) -> None:
        """Does all prompt work that is due. Each part begins where the one before ended, even when this call is
        late."""
        at_s = now
        while (due_s := self._prompt_due_s(at_s)) <= now:
            at_s = due_s
            chunk = self._next_chunk()
            if chunk is not None and chunk.due_s <= at_s:
                self._guarded(partial(self._go_on, chunk, at_s), chunk.work)
                self._join(now, chunk.work)
            elif (work := self._next_in_line(at_s)) is not self._entering:
                assert work is not None
                self._entering = work
                self._guarded(partial(self._turn_to, at_s), work)
            else:
                assert work is not None
                self._guarded(partial(self._enter, at_s), work)
            self._drop_prompts(at_s)

    def _prompt_due_s(self, now: float) -> float:
        """The time at which a prompt's next part is due. A waiting prompt begins now, or once a stage is free."""
        chunk = self._next_chunk()
        chunk_s = chunk.due_s if chunk is not None else math.inf
        if self._entering is not None:
            return min(chunk_s, self._enters_s)
        return chunk_s if self._next_in_line(now) is None else min(chunk_s, max(now, self._pipeline.ready_s))

    def _next_chunk(self) -> "_Chunk | None":
        """The sequence whose layer is due next."""
        return min(self._under_way, key=lambda chunk: chunk.due_s, default=None)

    def _next_in_line(self, now: float) -> ModelWork | None:
        """The sequence whose next chunk enters the first stage: a started one comes before the others of its tenant."""
        through = [chunk.work for chunk in self._under_way if chunk.is_last]
        begun = {work.part.flow: work for work in reversed(self._prefilling) if work not in through}
        beginners = [flow for flow in self._may_begin(now) if any(self._to_compute(flow))]
        flows = dict.fromkeys((*reversed(begun), *beginners))
        if not flows:
            return None
        flow = self._turns.first(flows, now)
        return begun[flow] if flow in begun else next(self._to_compute(flow))

    def _turn_to(self, now: float, work: ModelWork) -> None:
        """A prompt's chunks come next. What it costs the server comes before any stage."""
        self._enters_s = now
        if work not in self._prefilling:
            self._begin(work)
            self._start(work)
            self._enters_s = now + self._stand_in.prefill_s(0)

    def _enter(self, now: float, work: ModelWork) -> None:
        """The next chunk of a prompt comes to the first stage."""
        start, prefill_s = work.sequence.num_tokens, self._stand_in.prefill_s
        stop = self._chunk_stop(work, start)
        self._charge(work.part, stop - start, now)
        passage = self._pipeline.take(now, prefill_s(stop) - prefill_s(start))
        layers = self._emulated.prefill_layers(work.sequence, work.prompt[start:stop], work.kv)
        if not self._under_way:
            self._batch.hold(now, held=True)
        self._under_way.append(_Chunk(work, passage, layers, is_last=stop == work.prefill_tokens))
        self._enters_s = self._pipeline.ready_s
        if stop == work.prefill_tokens:
            self._entering = None

    def _go_on(self, chunk: "_Chunk", now: float, work: ModelWork) -> None:
        """Another layer of a chunk has been computed."""
        if chunk.write_layer():
            return
        self._under_way.remove(chunk)
        if not self._under_way:
            self._batch.hold(now, held=False)
        if chunk.is_last:
            self._prefilling.remove(work)
            self._end_prefill(work)

    def _join(self, now: float, work: ModelWork) -> None:
        if work in self._decoding:
            self._batch.join(now, work)


class _Chunk:
    """A chunk on its way through the stages."""

    def __init__(self, work: ModelWork, passage: Passage, layers: Iterator[float], *, is_last: bool) -> None:
        """`layers`: `EmulatedEngine.prefill_layers`; each layer has the same share."""
        self.work: Final = work
        self.is_last: Final = is_last
        self._passage = passage
        self._layers = layers
        self._share = next(layers)
        self._written = 0

    @property
    def due_s(self) -> float:
        """When the next layer has been computed."""
        return self._passage.done_s(min(1.0, (self._written + 1) * self._share))

    def write_layer(self) -> bool:
        """Writes it; whether there are more. Raises PrefillAborted."""
        self._written += 1
        return next(self._layers, None) is not None


class PacedModel:
    """Runs a paced scheduler on the event loop: what a model's thread is to a model."""

    def __init__(
        self,
        scheduler: PacedScheduler,
        clock: Callable[[], float],
        on_load: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._on_load = on_load
        self._on_death = on_death
        self._timer: asyncio.TimerHandle | None = None
        self._published = scheduler.load
        self.alive = False

    @property
    def load(self) -> SchedulerLoad:
        return self._scheduler.load

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def steps(self) -> Steps:
        return self._scheduler.steps.report()

    def start(self) -> None:
        self.alive = True

    def submit(self, work: ModelWork | Keep) -> None:
        self._scheduler.add(work)
        self._call_in(0.0)

    def set_chunk_tokens(self, chunk_tokens: int) -> None:
        self._scheduler.chunk_tokens = chunk_tokens

    def stop(self, timeout_s: float) -> None:
        """Fails all running requests, and waits for nothing."""
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._scheduler.fail_all(EngineError("the engine is shutting down"))

    def _run(self) -> None:
        try:
            self._scheduler.step()
            due_at = self._scheduler.due_at
        except Exception:
            log.exception("the stand-in ends")
            self.stop(0.0)
            self._on_death()
            return
        if due_at < math.inf:
            self._call_in(due_at - self._clock() + ROUNDING_S)
        if (load := self._scheduler.load) != self._published:
            self._published = load
            self._on_load()

    def _call_in(self, seconds: float) -> None:
        if not self.alive:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._run)
