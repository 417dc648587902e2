"""An engine whose layers are computed by several processes, one after the other, so that chunks of a prompt follow each other.

    this process        scheduler ─► stage 0 ─► stage 1 ─► ... ─► stage N-1
                            ▲           │          │                 │        each writes its layers' KVCache to the pages
                            └───────────┴──────────┴─────────────────┘        of the job, and says so; the last one has logits

This process computes nothing and loads no weights: no torch. At most two chunks are at the first stage and N + 1 in
all. So no stage waits for its next chunk, and no chunk queues for long. Decoding goes the same way, a token at a time:
that is for a prefill node that must answer after all. Answers are not kept as prefix cache.
"""

import contextlib
import logging
import os
import queue
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from engine.agent.base import Logits
from engine.agent.identity import DigestMemory, model_files, model_identity, num_layers
from engine.agent.job_pages import JobKV, OwnLoan
from engine.errors import EngineError, ModelError, PrefillAborted, StageDied, TransferError
from engine.staged import messages as m
from engine.staged.permits import SLOTS, Permits
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from transport.control.python_command import python_module

log = logging.getLogger(__name__)

AT_FIRST: Final = 2  # chunks: one that is computed, one that waits for it
START_S: Final = 3600.0  # a supervisor has its own idea, and less patience
STALL_S: Final = 60.0  # without a layer computed, by a stage that has something to do
LOOK_S: Final = 5.0
END_S: Final = 5.0
_KINDS: Final = (FullAttention, SlidingWindow, LinearState)  # the order of groups in a layout


class StagedSequence:
    """A sequence as the engine's process knows it: its KVCache is with the stages."""

    marked_tokens: Final = 0

    def __init__(self, number: int, slot: int, stages: int, cancel: Callable[[], None]) -> None:
        self.number: Final = number
        self.slot: Final = slot
        self.num_tokens = 0
        self.given = 0  # loads and chunks
        self.done: Final = [0] * stages  # of those, by stage
        self.kv: JobKV | None = None
        self.error: EngineError | None = None
        self.logits: bytearray | None = None
        self._cancel = cancel
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value
        if value:
            self._cancel()

    @property
    def is_settled(self) -> bool:
        return min(self.done) == self.given


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The start parameters of all stages of an engine."""

    model: Path
    stages: int
    block_size: int
    threads: int = 1
    max_model_len: int | None = None


@dataclass(eq=False, slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    events: socket.socket


class StagedEngine:
    """Implements `engine.agent.base.Engine`. `close` ends its processes."""

    def __init__(self, options: StageOptions, identity: Callable[[], str], clock: Callable[[], float]) -> None:
        """Starts the stages and waits until they have their weights; `identity` names the model meanwhile.

        Raises ModelError where no start can succeed, StageDied where another one may.
        """
        self._stages = options.stages
        self._clock = clock
        self._numbers = 0
        self._slots = list(range(SLOTS))
        self._sequences: weakref.WeakValueDictionary[int, StagedSequence] = weakref.WeakValueDictionary()
        self._given = 0
        self._done = [0] * options.stages
        self._news = threading.Condition()
        self._on_progress: Callable[[], None] = lambda: None
        self._died = ""
        self._stalls = Stalls(options.stages)
        self._closing = False
        self._outbox: queue.SimpleQueue[tuple[m.ToStage, bytes] | None] = queue.SimpleQueue()
        self._permits = Permits.create(options.stages)
        self._first, self._processes = _start(options, self._permits)
        self._threads: list[threading.Thread] = []
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="identity") as beside:
                naming = beside.submit(identity)
                ready = [self._ready(number) for number in range(options.stages)]
                name = naming.result()
            self.layout: Final = whole_layout([ModelLayout.from_json(each.layout_json) for each in ready], name)
            self.max_model_len: Final = ready[0].max_model_len
            self.vocab_size: Final = ready[0].vocab_size
            m.send(self._first, m.Whole(self.layout.to_json()))
        except BaseException:
            self.close()
            raise
        for target, what in ((self._tell, "to stages"), (self._listen, "from stages")):
            self._threads.append(threading.Thread(target=target, name=what, daemon=True))
            self._threads[-1].start()

    @classmethod
    def load_directory(
        cls,
        directory: Path,
        *,
        stages: int,
        block_size: int = 64,
        max_model_len: int | None = None,
        threads: int = 1,
        revision: str = "",
        digests: DigestMemory | None = None,
    ) -> "StagedEngine":
        """As `EmbeddedEngine.load_directory`. Raises ModelError, and StageDied."""
        files = model_files(directory)
        layers = num_layers(directory)
        if layers is not None and stages > layers:  # every stage would find out, and take seconds
            raise ModelError(f"{stages} stages for a model of {layers} layers: at most one stage per layer")
        engine = cls(
            StageOptions(directory, stages, block_size, threads, max_model_len),
            lambda: model_identity(directory, revision=revision, memory=digests),
            time.monotonic,
        )
        if model_files(directory) != files:
            engine.close()
            raise ModelError(f"{directory} changed while it was loaded: start again when it is complete")
        return engine

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    # engine.agent.base.Engine, on the model's thread

    def new_sequence(self, expected_tokens: int = 0) -> StagedSequence:
        if not self._slots:
            raise EngineError(f"{SLOTS} sequences are there already")
        slot = self._slots.pop()
        self._numbers += 1
        number = self._numbers
        self._permits.give(slot, number)
        sequence = StagedSequence(number, slot, self._stages, lambda: self._permits.cancel(slot, number))
        self._sequences[number] = sequence
        self._outbox.put((m.Begin(number, slot, expected_tokens), b""))
        # Its last holder lets go of it: a request, an answer that is not kept, a scheduler that fails.
        weakref.finalize(sequence, self._drop, number, slot).atexit = False
        return sequence

    def load(self, sequence: StagedSequence, kv: JobKV, num_tokens: int) -> None:
        """Begins to; `settled` says when it is done."""
        kv.check_ours()
        self._lend(sequence, kv)
        self._give(sequence, m.LoadPages(sequence.number, num_tokens))
        sequence.num_tokens = num_tokens

    def prefill(self, sequence: StagedSequence, tokens: Sequence[int], kv: JobKV | None) -> None:
        """Hands the chunk over."""
        self._check(sequence)
        if kv is not None and kv is not sequence.kv:
            self._lend(sequence, kv)
        self._give(sequence, m.SequenceChunk(sequence.number, len(tokens)), np.asarray(tokens, np.int64).tobytes())
        sequence.num_tokens += len(tokens)

    @property
    def takes_more(self) -> bool:
        if self._died:
            raise StageDied(self._died)
        given = self._given
        return given - self._done[0] < AT_FIRST and given - self._done[-1] < self._stages + 1

    def settled(self, sequence: StagedSequence) -> bool:
        self._check(sequence)
        return sequence.is_settled

    def listen(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress

    def decode(self, sequences: Sequence[StagedSequence], tokens: Sequence[int]) -> Sequence[Logits]:
        """The sequences follow each other through the stages; so each has the logits that it has alone."""
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.logits = None
            self._give(
                sequence, m.SequenceChunk(sequence.number, 1, steps=True), np.asarray([token], np.int64).tobytes()
            )
            sequence.num_tokens += 1
        with self._news:
            self._news.wait_for(lambda: self._ended or all(each.is_settled for each in sequences))
        for sequence in sequences:
            if sequence.error is not None or self._ended:
                raise sequence.error or StageDied(self._ended)
        return [np.frombuffer(sequence.logits or b"", np.float32) for sequence in sequences]

    def begin_answer(self, sequence: StagedSequence) -> None:
        """Nothing is remembered of answers."""

    def keep(self, sequence: StagedSequence, kv: JobKV) -> Iterator[None]:
        raise NotImplementedError("answers computed in stages are not kept")

    def hold(self, descriptor: int) -> None:
        """Has all stages hold a connection, in the place of any before: an agent takes its end for that of all who write."""
        for process in self._processes:
            with contextlib.suppress(OSError):  # a stage that is gone holds nothing, and writes nothing
                socket.send_fds(process.events, [b"h"], [descriptor])

    def close(self) -> None:
        """Ends the stages and waits for that. Any thread, once."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._outbox.put(None)
        for peer in (self._first, *(process.events for process in self._processes)):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            _end(process.popen)
        for thread in self._threads:
            thread.join(END_S)
        for peer in (self._first, *(process.events for process in self._processes)):
            peer.close()
        self._permits.close()

    @property
    def _ended(self) -> str:
        """The reason why the engine has stopped computing; "" while it computes."""
        return self._died or ("the engine is closed" if self._closing else "")

    # What goes out

    def _lend(self, sequence: StagedSequence, kv: JobKV) -> None:
        """From here on the stages may write to the pages, until the loan is over."""
        place, loan = kv.arena.place, kv.loan
        if place is None or not isinstance(loan, OwnLoan):
            raise EngineError("pages of an arena that no other process can open")
        sequence.kv = kv
        self._permits.give_pages(sequence.slot, sequence.number)
        slot, number = sequence.slot, sequence.number
        loan.share(lambda: self._withdraw(slot, number))
        pages = m.SequencePages(sequence.number, place.path, place.page_bytes, place.num_pages, place.file, kv.pages)
        self._outbox.put((pages, b""))

    def _withdraw(self, slot: int, number: int) -> None:
        if self._closing:
            return  # and every stage has ended, or will have before this process does
        for stage in self._permits.withdraw_pages(slot, number):
            log.error("stage %d does not release its pages: killing it", stage)
            self._processes[stage].popen.kill()
            self._processes[stage].popen.wait()

    def _give(self, sequence: StagedSequence, message: m.LoadPages | m.SequenceChunk, payload: bytes = b"") -> None:
        with self._news:
            sequence.given += 1
            self._given += 1
        self._outbox.put((message, payload))

    def _check(self, sequence: StagedSequence) -> None:
        if self._died:
            raise StageDied(self._died)
        if sequence.cancelled:
            raise PrefillAborted
        if sequence.error is not None:
            raise sequence.error

    def _drop(self, number: int, slot: int) -> None:
        """Any thread, in the middle of whatever: nothing here waits."""
        if self._closing:
            return
        self._permits.cancel(slot, number)
        self._withdraw(slot, number)
        self._slots.append(slot)
        self._outbox.put((m.Drop(number), b""))

    def _tell(self) -> None:
        """The thread that writes to the first stage, and waits for it where that must be."""
        try:
            while (item := self._outbox.get()) is not None:
                m.send(self._first, *item)
        except OSError as exc:
            self._die(f"stage 0 does not listen: {exc}")

    # What comes in

    def _ready(self, stage: int) -> m.StageReady:
        """Raises ModelError where no start can succeed, StageDied where another one may."""
        process = self._processes[stage]
        process.events.settimeout(START_S)
        try:
            frame = m.receive_from_stage(process.events)
        except OSError as exc:
            raise StageDied(f"stage {stage} says nothing: {exc}") from exc
        process.events.settimeout(STALL_S)  # for the rest of what a stage has begun to say
        if frame is None:
            raise StageDied(f"stage {stage} {_how_it_ended(process.popen)} while it loaded its weights")
        if isinstance(frame.message, m.StageUnfit):
            raise ModelError(frame.message.reason)
        assert isinstance(frame.message, m.StageReady)
        return frame.message

    def _listen(self) -> None:
        """The thread that hears what stages have done, and looks after them."""
        try:
            with selectors.DefaultSelector() as selector:
                for stage, process in enumerate(self._processes):
                    selector.register(process.events, selectors.EVENT_READ, stage)
                while not self._closing and not self._died:
                    for key, _ in selector.select(LOOK_S):
                        self._hear_from(key.data)
                    self._look(self._clock())
        except Exception as exc:
            log.exception("the stages cannot be read any more")
            self._die(f"the stages cannot be read any more: {type(exc).__name__}: {exc}")

    def _hear_from(self, stage: int) -> None:
        try:
            frame = m.receive_from_stage(self._processes[stage].events)
        except (OSError, ValueError) as exc:
            frame = None
            log.error("stage %d: %s", stage, exc)
        if frame is None:
            self._die(f"stage {stage} {_how_it_ended(self._processes[stage].popen)}")
            return
        self._hear(stage, frame.message, frame.payload)

    def _hear(self, stage: int, message: m.FromStage, payload: bytearray) -> None:
        assert not isinstance(message, m.StageReady | m.StageUnfit)
        sequence = self._sequences.get(message.sequence)
        if isinstance(message, m.Done):
            with self._news:
                self._done[stage] += 1
                if sequence is not None:
                    sequence.done[stage] += 1
                self._news.notify_all()
            self._on_progress()
        elif sequence is not None:
            self._note(sequence, message, payload)

    def _note(
        self,
        sequence: StagedSequence,
        message: m.StageLayerWritten | m.StageStateWritten | m.StageFailure | m.Logits,
        payload: bytearray,
    ) -> None:
        kv = sequence.kv
        match message:
            case m.StageLayerWritten() if kv is not None:
                with contextlib.suppress(RuntimeError):  # of a closed event loop: the engine is ending
                    kv.on_layer(message.group, message.layer, message.num_tokens)
            case m.StageStateWritten() if kv is not None:
                with contextlib.suppress(RuntimeError):
                    kv.on_state(message.group, message.layer, message.num_tokens)
            case m.Logits():
                sequence.logits = payload
            case m.StageFailure():
                self._permits.cancel(sequence.slot, sequence.number)
                sequence.error = (
                    TransferError(message.reason, message.text)
                    if message.reason == "pages_invalid"
                    else EngineError(f"the model failed: {message.text}")
                )

    def _look(self, now: float) -> None:
        beats = [self._permits.beats(stage) for stage in range(self._stages)]
        if (stage := self._stalls.look(self._given, self._done, beats, now)) is not None:
            self._die(f"stage {stage} has computed nothing for {STALL_S:g} s")

    def _die(self, why: str) -> None:
        """Marks the engine as broken: its runner ends it."""
        if self._closing or self._died:
            return
        log.error("%s: the engine ends", why)
        with self._news:
            self._died = why
            self._news.notify_all()
        self._on_progress()


class Stalls:
    """Tells a stage that hangs from one that has nothing to do."""

    def __init__(self, stages: int) -> None:
        self._marks = [(-1, -1)] * stages  # layers and chunks that it had computed
        self._idle_s = [0.0] * stages
        self._looked_s = 0.0

    def look(self, given: int, done: Sequence[int], beats: Sequence[int], now: float) -> int | None:
        """The last stage that has had something to do and has computed nothing for STALL_S. `given` and `done`: chunks.

        Those before it may have no stage that takes what they have computed. Layers of a step of decoding do not beat: there a
        stage moves from chunk to chunk. Time in which this thread did not look does not count: this process was stopped,
        and maybe the stages with it.
        """
        passed_s, self._looked_s = min(now - self._looked_s, 2 * LOOK_S), now
        hangs = None
        for stage, came in enumerate((given, *done[:-1])):
            mark = beats[stage], done[stage]
            if mark != self._marks[stage] or came <= done[stage]:
                self._marks[stage], self._idle_s[stage] = mark, 0.0
                continue
            self._idle_s[stage] += passed_s
            if self._idle_s[stage] > STALL_S:
                hangs = stage
        return hangs


def whole_layout(parts: Sequence[ModelLayout], identity: str) -> ModelLayout:
    """The layout of a model of whose layers each stage has told its part: that of one process. Raises ModelError."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for part in parts:
        for group in part.groups:
            layers.setdefault(group.spec, []).extend(group.layers)
    if not any(isinstance(spec, FullAttention | SlidingWindow) for spec in layers):
        raise ModelError("models without any attention layer are not supported: they cannot know a token's position")
    groups = [KVCacheGroup(spec, tuple(sorted(numbers))) for spec, numbers in layers.items()]
    groups.sort(key=lambda group: (_KINDS.index(type(group.spec)), group.layers))
    return replace(parts[0], model=identity, groups=tuple(groups))


def _start(options: StageOptions, permits: Permits) -> tuple[socket.socket, list[_Process]]:
    """The socket to the first stage, and all stages. Raises OSError."""
    links = [socket.socketpair() for _ in range(options.stages)]  # (who writes, who reads), the engine's first
    processes = []
    with contextlib.ExitStack() as handed_over:
        for writer, reader in links:
            handed_over.callback(reader.close)
            if writer is not links[0][0]:
                handed_over.callback(writer.close)
        for stage in range(options.stages):
            ours, theirs = socket.socketpair()
            handed_over.callback(theirs.close)
            behind = links[stage + 1][0].fileno() if stage + 1 < options.stages else -1
            command = _command(options, stage, links[stage][1].fileno(), behind, theirs.fileno(), permits.fd)
            fds = [fd for fd in (links[stage][1].fileno(), behind, theirs.fileno(), permits.fd) if fd >= 0]
            processes.append(_Process(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds), ours))
    return links[0][0], processes


def _command(options: StageOptions, stage: int, before: int, behind: int, engine: int, permits: int) -> list[str]:
    command = [*python_module("engine.staged.stage"), "--model", str(options.model)]
    command += ["--stage", str(stage), "--stages", str(options.stages), "--parent", str(os.getpid())]
    command += ["--before-fd", str(before), "--behind-fd", str(behind)]
    command += ["--engine-fd", str(engine), "--permits-fd", str(permits)]
    command += ["--block-size", str(options.block_size), "--threads", str(options.threads)]
    command += ["--log-level", logging.getLevelName(log.getEffectiveLevel()).lower()]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    return command


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends when it is hung up on; one that is stopped, or in the middle of something, is killed."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "hung up"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
