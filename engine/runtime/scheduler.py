"""Decides what the model computes next: at most one prefill chunk, then one decode step of all running sequences.

    round   | prefill chunk of one sequence | decode a, b, c, ... | a piece of a finished answer to its pages |

So a long prompt slows running streams by one chunk per token and no more. Tenants take turns, chunk by chunk, by what
each has been served lately (`engine.runtime.turns`): a prompt of one that has had little waits for the chunk under way.
Among a tenant's prompts the one with the least left to compute goes first. Every chunk given to its others counts as a
chunk less, so no request waits for ever.

    WAITING ──► PREFILL ──► SETTLING ──► DECODE ──► done      a prefill leg ends after SETTLING: it never samples
       └ in line by tenant, holds no slot                     KVCache that has landed is loaded in a chunk's place

An engine in stages takes a chunk while others are under way. A prompt settles when its last chunk is through; meanwhile
the next prompt's chunks follow. Other engines settle at once.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from engine.agent.base import Engine, Logits
from engine.agent.job_pages import JobKV
from engine.errors import EngineError, PagesInvalid, PrefillAborted, TransferError
from engine.runtime.detokenizer import OutputText
from engine.runtime.lines import Lines
from engine.runtime.sampling import SampledToken, Sampler, SamplingParams
from engine.runtime.steps import StepTimes
from engine.runtime.turns import EVERYBODYS, HALF_LIFE_S, WorkShare, may_begin
from prompts.tokens.tokenizer import TextTokenizer
from transport.turns import Turns

log = logging.getLogger(__name__)

MAX_RUNNING: Final = 64
GROWTH_HINT_TOKENS: Final = 1024  # room for output that is reserved at once; more is found when it is needed
LANDINGS_AHEAD: Final = (
    4  # loads that may pass a chunk: they are short, and their requests have waited for a link already
)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The KVCache of all prompt tokens but the last is there. Times on the scheduler's clock, in seconds."""

    num_tokens: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class NewToken:
    """One output token and the text that became certain with it. `finish_reason` is set on the last one."""

    sampled: SampledToken
    text: str
    finish_reason: str | None
    at_s: float


@dataclass(frozen=True, slots=True)
class WorkFailed:
    error: EngineError


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended well. `sequence` holds an answer that could be kept (see Keep)."""

    sequence: Any = None


@dataclass(frozen=True, slots=True)
class SequenceKept:
    """A finished sequence is completely in its pages."""


Event = Prefilled | NewToken | WorkFailed | Finished | SequenceKept


@dataclass(eq=False, kw_only=True)
class ModelWork:
    """One request for the model. `emit` is called on the model's thread."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams | None  # None: a prefill leg
    emit: Callable[[Event], None]
    part: WorkShare = EVERYBODYS
    kv: JobKV | None = None
    load_tokens: int = 0  # how many tokens of `kv` are there already
    num_answered: int = 0  # tokens at the end of `prompt` that are of the answer: another engine has given them
    keeps: bool = False  # whether the answer is wanted as prefix cache afterwards
    aborted: bool = False
    sequence: Any = None
    started_s: float | None = None
    chunks_waited: int = 0
    received: bool = False
    output: "_Output | None" = field(default=None, repr=False)

    @property
    def prefill_tokens(self) -> int:
        return len(self.prompt) - 1

    @property
    def has_landed(self) -> bool:
        """Whether no token of its prompt must be computed."""
        return self.load_tokens >= self.prefill_tokens

    @property
    def remaining_tokens(self) -> int:
        sequence = self.sequence  # read once: the model's thread may drop it
        done = self.load_tokens if sequence is None else sequence.num_tokens
        return max(0, self.prefill_tokens - done)

    def abort(self) -> None:
        """Stops the work as soon as possible, also in the middle of a chunk. Any thread."""
        self.aborted = True
        sequence = self.sequence
        if sequence is not None:
            sequence.cancelled = True


@dataclass(eq=False, kw_only=True)
class Keep:
    """A finished sequence whose KVCache goes into pages, a piece per round. `emit` is called on the model's thread."""

    sequence: Any
    kv: JobKV
    emit: Callable[[Event], None]
    aborted: bool = False
    pieces: Iterator[None] | None = None

    def abort(self) -> None:
        """Any thread."""
        self.aborted = True


@dataclass(slots=True)
class _Output:
    params: SamplingParams
    end_tokens: tuple[int, ...]
    sampler: Sampler
    text: OutputText
    last_token: int
    count: int = 0

    def replay(self, answered: Sequence[int]) -> None:
        """Adds the tokens of another engine's answer, as if they had been sampled here; the client has their text."""
        for token in answered:
            self.sampler.note(token)
            self.count += 1
            self.text.push(token, may_stop=self.count > self.params.min_tokens)


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    running: int
    waiting: int
    queued_tokens: int


def no_chunk(chunk_tokens: int, block_size: int) -> str:
    """The reason why the engine cannot compute chunks of that length."""
    return f"chunk_tokens = {chunk_tokens}: less than a block, block_size = {block_size}"


class Scheduler:
    """The queue of one model. Not thread-safe: it lives on the model's thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        clock: Callable[[], float],
        *,
        chunk_tokens: int,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.slots = max_running
        self.steps = StepTimes()
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock
        self._turns: Turns[str] = Turns(HALF_LIFE_S)
        self._waiting: Lines[ModelWork] = Lines()  # nothing has been done for them
        self._prefilling: list[ModelWork] = []
        self._settling: list[ModelWork] = []
        self._decoding: list[ModelWork] = []
        self._keeping: deque[Keep] = deque()
        self._landings_passed = 0  # loads since the last chunk

    @property
    def load(self) -> SchedulerLoad:
        """A waiting request with a free slot counts as running: it will run after a chunk or two."""
        begun, waiting = self._num_begun, len(self._waiting)
        starting = min(waiting, max(0, self.slots - begun))
        return SchedulerLoad(
            running=begun + starting,
            waiting=waiting - starting,
            queued_tokens=sum(work.remaining_tokens for work in (*self._waiting, *self._prefilling)),
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until something comes in, or the engine makes progress."""
        may_prefill = bool(self._prefilling) or bool(self._may_begin(self._clock()))
        return not (self._decoding or self._keeping or (may_prefill and self._engine.takes_more))

    @property
    def _num_begun(self) -> int:
        """Each of these holds a slot."""
        return len(self._prefilling) + len(self._settling) + len(self._decoding)

    def add(self, work: ModelWork | Keep) -> None:
        if isinstance(work, Keep):
            self._keeping.append(work)
            return
        work.received = True
        self._waiting.add(work.part.flow, work)

    def step(self) -> None:
        """One round."""
        self._drop_aborted()
        for work in list(self._settling):
            self._guarded(self._end_if_settled, work)
        # Asked in any case: it raises once nothing can be computed any more, be there nothing to compute.
        if self._engine.takes_more and (next_work := self._next_prefill()) is not None:
            self._guarded(self._prefill_some, next_work)
        began_s, batch = self._clock(), len(self._decoding)
        self._decode(list(self._decoding))
        self.steps.note(batch, self._clock() - began_s)
        self._keep_some()

    def fail_all(self, error: EngineError) -> None:
        for work in [*self._waiting, *self._prefilling, *self._settling, *self._decoding]:
            work.emit(WorkFailed(error))
        for keep in self._keeping:
            keep.emit(WorkFailed(error))
        self._keeping.clear()
        self._waiting.clear()
        self._prefilling.clear()
        self._settling.clear()
        self._decoding.clear()

    def _drop_aborted(self) -> None:
        if any(work.aborted for work in (*self._waiting, *self._prefilling, *self._settling, *self._decoding)):
            self._waiting.keep(lambda work: not work.aborted)
            self._prefilling = [work for work in self._prefilling if not work.aborted]
            self._settling = [work for work in self._settling if not work.aborted]
            self._decoding = [work for work in self._decoding if not work.aborted]

    def _guarded(self, action: Callable[[ModelWork], None], work: ModelWork) -> None:
        """One request's failure is its own."""
        try:
            action(work)
        except PrefillAborted:
            self._forget(work)
        except Exception as exc:
            self._fail(work, exc)

    def _fail(self, work: ModelWork, error: Exception) -> None:
        if not isinstance(error, EngineError):
            log.error("request %s failed in the model", work.id, exc_info=error)
            error = EngineError(f"the model failed: {type(error).__name__}: {error}")
        self._forget(work)
        work.emit(WorkFailed(error))

    def _forget(self, work: ModelWork) -> None:
        for queue in (self._prefilling, self._settling, self._decoding):
            if work in queue:
                queue.remove(work)
        work.sequence = None

    # Turns

    def _may_begin(self, now: float) -> list[str]:
        """Flows with a waiting request that may have a slot."""
        free = self.slots - self._num_begun
        if not self._waiting or free <= 0:
            return []
        held = Counter(work.part.flow for work in (*self._prefilling, *self._settling, *self._decoding))
        return may_begin(self._turns, self._waiting.flows, held, free, now)

    def _candidates(self, flow: str) -> Iterator[ModelWork]:
        """The waiting requests that would get the free slots."""
        return self._waiting.ahead(flow, max(0, self.slots - self._num_begun))

    def _to_compute(self, flow: str) -> Iterator[ModelWork]:
        return (work for work in self._candidates(flow) if not work.has_landed)

    def _charge(self, part: WorkShare, tokens: int, now: float) -> None:
        self._turns.charge(part.flow, tokens / part.weight, now)

    def _begin(self, work: ModelWork) -> None:
        """It has a slot from now on."""
        self._waiting.take(work.part.flow, work)
        self._prefilling.append(work)

    # Prefill

    def _next_prefill(self) -> ModelWork | None:
        """The request that has the round's chunk, or is loaded in its place."""
        now = self._clock()
        beginners = self._may_begin(now)
        landing = self._next_landing(beginners, now)
        if landing is None or self._landings_passed >= LANDINGS_AHEAD:
            self._landings_passed = 0
            chosen = self._next_to_compute(beginners, now) or landing
        else:
            self._landings_passed += 1
            chosen = landing
        if chosen is not None and chosen not in self._prefilling:
            self._begin(chosen)
        return chosen

    def _next_landing(self, beginners: Sequence[str], now: float) -> ModelWork | None:
        firsts = {flow: next((work for work in self._candidates(flow) if work.has_landed), None) for flow in beginners}
        found = {flow: work for flow, work in firsts.items() if work is not None}
        return found[self._turns.first(found, now)] if found else None

    def _next_to_compute(self, beginners: Sequence[str], now: float) -> ModelWork | None:
        begun = dict.fromkeys(work.part.flow for work in self._prefilling)
        flows = [*begun, *(flow for flow in beginners if flow not in begun and any(self._to_compute(flow)))]
        if not flows:
            return None
        flow = self._turns.first(flows, now)
        own = [work for work in self._prefilling if work.part.flow == flow]
        if flow in beginners:
            own += self._to_compute(flow)
        chosen = min(own, key=self._urgency)
        for work in own:
            work.chunks_waited += work is not chosen
        return chosen

    def _urgency(self, work: ModelWork) -> float:
        return work.remaining_tokens / self.chunk_tokens - work.chunks_waited

    def _prefill_some(self, work: ModelWork) -> None:
        if work.sequence is None:
            self._start(work)
        start = work.sequence.num_tokens
        if start < work.prefill_tokens:
            stop = self._chunk_stop(work, start)
            self._charge(work.part, stop - start, self._clock())
            self._engine.prefill(work.sequence, work.prompt[start:stop], work.kv)
        if work.sequence.num_tokens >= work.prefill_tokens:
            self._prefilling.remove(work)
            self._settling.append(work)
            self._end_if_settled(work)

    def _end_if_settled(self, work: ModelWork) -> None:
        if self._engine.settled(work.sequence):
            self._settling.remove(work)
            self._end_prefill(work)

    def _start(self, work: ModelWork) -> None:
        work.started_s = self._clock()
        max_tokens = work.params.max_tokens if work.params else 0
        work.sequence = self._engine.new_sequence(len(work.prompt) + min(max_tokens, GROWTH_HINT_TOKENS))
        if work.aborted:
            raise PrefillAborted
        if work.kv is None or not work.load_tokens:
            return
        try:
            self._engine.load(work.sequence, work.kv, work.load_tokens)
        except PagesInvalid as exc:
            raise TransferError("pages_invalid", str(exc)) from exc

    def _chunk_stop(self, work: ModelWork, start: int) -> int:
        """Chunks end on block borders, at every length whose states must be stored, and one token before the end.

        Raises EngineError where that leaves nothing to compute: the request would stand there for ever.
        """
        block_size = self._engine.layout.block_size
        stops = [work.prefill_tokens, start + self.chunk_tokens - start % block_size]
        if work.kv is not None:
            stops += [length for length in work.kv.snapshot_lengths if length > start]
        if (stop := min(stops)) <= start:
            raise EngineError(
                f"{no_chunk(self.chunk_tokens, block_size)}; {start} tokens are computed, and no more can be"
            )
        return stop

    def _end_prefill(self, work: ModelWork) -> None:
        assert work.started_s is not None
        work.emit(Prefilled(work.sequence.num_tokens, work.started_s, self._clock()))
        if work.params is None:
            work.sequence = None
            work.emit(Finished())
            return
        if work.keeps:
            self._engine.begin_answer(work.sequence)
        work.output = self._new_output(work.params, work.prompt[-1])
        work.output.replay(work.prompt[len(work.prompt) - work.num_answered :])
        self._decoding.append(work)

    # Decode

    def _new_output(self, params: SamplingParams, last_token: int) -> "_Output":
        eos = () if params.ignore_eos else self._tokenizer.eos_token_ids
        end_tokens = (*eos, *params.stop_token_ids)
        return _Output(
            params, end_tokens, Sampler(params, end_tokens), OutputText(self._tokenizer, params.stop), last_token
        )

    def _decode(self, works: Sequence[ModelWork]) -> None:
        """One step of all. An aborted request gets no token of it; an error is one request's alone, unless it is the model's."""
        works = [work for work in works if not work.aborted]
        if not works:
            return
        now = self._clock()
        for part, tokens in Counter(work.part for work in works).items():
            self._charge(part, tokens, now)
        try:
            all_logits = self._engine.decode(
                [work.sequence for work in works], [_output(work).last_token for work in works]
            )
        except Exception as exc:
            for work in works:
                self._fail(work, exc)
            return
        for work, logits in zip(works, all_logits, strict=True):
            if not work.aborted:
                self._guarded(partial(self._take_token, logits), work)

    def _take_token(self, logits: Logits, work: ModelWork) -> None:
        output = _output(work)
        sampled = output.sampler.sample(logits, work.sequence.num_tokens)
        output.last_token = sampled.token
        output.count += 1
        may_stop = output.count > output.params.min_tokens
        text, stopped = output.text.push(sampled.token, may_stop=may_stop)
        reason = "stop" if stopped else self._finish_reason(output, work.sequence.num_tokens + 1)
        if reason and not stopped:
            rest, stopped = output.text.flush(may_stop=may_stop)
            text, reason = text + rest, "stop" if stopped else reason
        work.emit(NewToken(sampled, text, reason, self._clock()))
        if reason:
            sequence = work.sequence if work.keeps and work.sequence.marked_tokens else None
            self._forget(work)
            work.emit(Finished(sequence))

    # Keeping

    def _keep_some(self) -> None:
        """One piece of one finished answer: running ones do not wait for more."""
        while self._keeping and self._keeping[0].aborted:
            self._keeping.popleft()
        if not self._keeping:
            return
        keep = self._keeping[0]
        try:
            if keep.pieces is None:
                keep.pieces = self._engine.keep(keep.sequence, keep.kv)
            next(keep.pieces)
        except StopIteration:
            self._keeping.popleft()
            keep.emit(SequenceKept())
        except Exception as exc:
            log.exception("an answer cannot be kept")
            self._keeping.popleft()
            keep.emit(WorkFailed(EngineError(f"the model failed: {type(exc).__name__}: {exc}")))

    def _finish_reason(self, output: "_Output", total_tokens: int) -> str | None:
        if output.last_token in output.end_tokens:
            return "stop"
        full = output.count >= output.params.max_tokens or total_tokens >= self._engine.max_model_len
        return "length" if full else None


def _output(work: ModelWork) -> _Output:
    assert work.output is not None
    return work.output
