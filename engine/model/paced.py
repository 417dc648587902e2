"""Rounds of an engine that computes nothing: everything is due at a time, and nothing holds a thread meanwhile.

One prompt after the other is computed, in the order of arrival, as the planner's simulator has it; a batch decodes beside it:

    prompt   | what the server takes | chunk: layer, layer, ... | chunk: ... | next prompt
    batch    | goes on               | stands still                          | goes on

What a landing brings is loaded at once: there is nothing to compute.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from typing import Final

from engine.errors import EngineError
from engine.model.batch import DecodeBatch
from engine.model.emulated import EmulatedEngine
from engine.model.scheduler import Keep, Load, Scheduler, Work
from engine.model.standin import StandIn
from engine.model.steps import Steps
from prompts.tokenizer import TextTokenizer

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
    ) -> None:
        super().__init__(engine, tokenizer, clock, chunk_tokens=chunk_tokens, max_running=stand_in.max_running)
        self._emulated = engine
        self._stand_in = stand_in
        self._batch: DecodeBatch[Work] = DecodeBatch(stand_in.decode_step_s)
        self._computing: Work | None = None
        self._phases: Iterator[float] = iter(())
        self._phase_end_s = 0.0

    @property
    def due_at(self) -> float:
        """Seconds on the scheduler's clock; inf while there is nothing to do."""
        if self._keeping or (self._prefilling and self._computing is None):
            return self._clock()
        prompt_s = self._phase_end_s if self._computing is not None else math.inf
        return min(prompt_s, self._batch.due_at())

    def step(self) -> None:
        now = self._clock()
        self._drop_aborted()
        self._let_go(now)
        self._admit()
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
        self._admit()
        self._keep_some()

    def _let_go(self, now: float) -> None:
        """Of what has ended or was aborted."""
        for work in self._batch.members:
            if work not in self._decoding:
                self._batch.leave(now, work)
        if self._computing is not None and self._computing not in self._prefilling:
            self._end_computing(now)

    def _take_landings(self, now: float) -> None:
        for work in [work for work in self._prefilling if work.load_tokens >= work.prefill_tokens]:
            self._guarded(self._prefill_some, work)
            self._join(now, work)

    def _compute(self, now: float) -> None:
        """All phases of prompts that have ended by now: each begins where the one before ended, however late we are."""
        began_s = now
        while self._computing is not None or self._prefilling:
            if self._computing is None:
                self._computing, self._phase_end_s = self._prefilling[0], began_s
                self._phases = self._prompt(self._computing)
            elif self._phase_end_s > now:
                return
            work = self._computing
            self._guarded(self._next_phase, work)
            if work not in self._prefilling:
                began_s = self._phase_end_s
                self._end_computing(began_s)
                self._join(now, work)

    def _next_phase(self, work: Work) -> None:
        self._phase_end_s += next(self._phases, 0.0)

    def _prompt(self, work: Work) -> Iterator[float]:
        """The seconds of each phase; what follows a yield happens at its end."""
        self._start(work)
        sequence, prefill_s = work.sequence, self._stand_in.prefill_s
        if sequence.num_tokens < work.prefill_tokens:
            yield prefill_s(0)
            self._batch.hold(self._phase_end_s, held=True)
        while (start := sequence.num_tokens) < work.prefill_tokens:
            stop = self._chunk_stop(work, start)
            chunk_s = prefill_s(stop) - prefill_s(start)
            for share in self._emulated.prefill_layers(sequence, work.prompt[start:stop], work.kv):
                yield chunk_s * share
        self._end_prefill(work)

    def _end_computing(self, now: float) -> None:
        self._computing, self._phases = None, iter(())
        self._batch.hold(now, held=False)

    def _join(self, now: float, work: Work) -> None:
        if work in self._decoding:
            self._batch.join(now, work)


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
    def load(self) -> Load:
        return self._scheduler.load

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def steps(self) -> Steps:
        return self._scheduler.steps.report()

    def start(self) -> None:
        self.alive = True

    def submit(self, work: Work | Keep) -> None:
        self._scheduler.add(work)
        self._call_in(0.0)

    def set_chunk_tokens(self, chunk_tokens: int) -> None:
        self._scheduler.chunk_tokens = chunk_tokens

    def stop(self, timeout_s: float) -> None:
        """What still runs is told that it failed. Nothing is waited for."""
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
