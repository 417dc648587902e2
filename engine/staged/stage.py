"""`python -m engine.staged.stage`: one stage of an engine's pipeline, started by `engine.staged.staged` alone.

    from before ─► reader's thread ─► queue ─► layers: KVCache to pages ─► the stage behind
                                                   └─ what has been written ─► the engine

A stage ends with its engine, and with either of its neighbours: what it would compute is wasted. The queue needs no bound of
its own: of chunks that are not through there are few (`engine.staged.staged`).
"""

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engine.agent.job_pages import ArenaPlace, JobKV, MappedArena
from engine.errors import ModelError, PagesInvalid, PrefillAborted
from engine.staged.messages import (
    Begin,
    Done,
    Drop,
    LoadPages,
    Logits,
    SequenceChunk,
    SequencePages,
    StageFailure,
    StageLayerWritten,
    StageMessage,
    StageReady,
    StageStateWritten,
    StageUnfit,
    ToStageFrame,
    Whole,
    receive_to_stage,
    send,
)
from engine.staged.permits import Permits
from engine.staged.share import LayerShare, load_share, num_layers_of, shares
from engine.torch.embedded import context_tokens
from hybrid_cache.layout.layout import ModelLayout

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG: Final = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage's position and its sockets; the last stage has None behind it."""

    stage: int
    before: socket.socket
    behind: socket.socket | None
    engine: socket.socket
    permits: Permits


@dataclass(eq=False, slots=True)
class _Sequence:
    number: int
    slot: int
    state: Any
    kv: JobKV | None = None
    is_broken: bool = False


class StageLoan:
    """Pages that the engine has lent on to this stage."""

    def __init__(self, place: StagePlace, slot: int, number: int) -> None:
        self._place = place
        self._slot = slot
        self._number = number

    @property
    def is_over(self) -> bool:
        return not self._place.permits.has_pages(self._slot, self._number)

    def writing(self) -> contextlib.AbstractContextManager[object]:
        return self._place.permits.writing(self._place.stage)

    def end(self) -> None:
        raise NotImplementedError("a stage gives no pages up")


class Stage:
    """Computes a share of the layers for live sequences, in the order in which things come in."""

    def __init__(self, share: LayerShare, place: StagePlace) -> None:
        self._share = share
        self._place = place
        self._layout = share.layout
        self._sequences: dict[int, _Sequence] = {}
        self._arena: MappedArena | None = None

    def hear(self, message: StageMessage, payload: bytearray) -> None:
        """Raises OSError where nothing listens any more."""
        match message:
            case SequenceChunk():
                self._compute(message, payload)
                return
            case LoadPages():
                self._pass_on(message)  # all load at once
                self._load(message)
                return
            case Whole():
                self._layout = ModelLayout.from_json(message.layout_json)
            case Begin():
                self._begin(message)
            case SequencePages():
                self._take_pages(message)
            case Drop():
                self._sequences.pop(message.sequence, None)
        self._pass_on(message)

    def _begin(self, begin: Begin) -> None:
        permits, stage = self._place.permits, self._place.stage

        def is_wanted() -> bool:
            permits.beat(stage)
            return permits.wants(begin.slot, begin.sequence)

        state = self._share.new_sequence(begin.expected_tokens, is_wanted)
        self._sequences[begin.sequence] = _Sequence(begin.sequence, begin.slot, state)

    def _take_pages(self, lent: SequencePages) -> None:
        sequence = self._sequences[lent.sequence]
        place = ArenaPlace(lent.path, lent.page_bytes, lent.num_pages, lent.file)
        try:
            if self._arena is None or self._arena.place != place:
                self._arena = place.open()
            sequence.kv = JobKV(
                self._layout,
                self._arena,
                lent.pages,
                on_layer=lambda *done: self._tell(StageLayerWritten(lent.sequence, *done)),
                on_state=lambda *done: self._tell(StageStateWritten(lent.sequence, *done)),
                loan=StageLoan(self._place, sequence.slot, sequence.number),
            )
        except (OSError, PagesInvalid) as exc:
            self._fail(sequence, exc)

    def _load(self, load: LoadPages) -> None:
        sequence = self._sequences[load.sequence]
        try:
            if not sequence.is_broken:
                assert sequence.kv is not None
                self._share.load(sequence.state, sequence.kv, load.num_tokens)
        except Exception as exc:
            self._fail(sequence, exc)
        self._tell(Done(load.sequence))

    def _compute(self, chunk: SequenceChunk, payload: bytearray) -> None:
        sequence = self._sequences[chunk.sequence]
        output, is_void = None, True
        if not (chunk.is_void or sequence.is_broken):
            try:
                output = self._output(sequence, chunk, payload)
                is_void = False
            except PrefillAborted:
                sequence.is_broken = True
            except Exception as exc:
                self._fail(sequence, exc)
        self._pass_on(
            SequenceChunk(chunk.sequence, chunk.num_tokens, chunk.steps, is_void),
            b"" if output is None else _raw(output),
        )
        if chunk.steps and self._place.behind is None and output is not None:
            self._tell(Logits(chunk.sequence), _raw(output))
        self._tell(Done(chunk.sequence))

    def _output(self, sequence: _Sequence, chunk: SequenceChunk, payload: bytearray) -> torch.Tensor | None:
        share, entry = self._share, self._entry(chunk, payload)
        if chunk.steps:
            return share.decode(sequence.state, entry)
        if not self._place.permits.wants(sequence.slot, sequence.number):
            raise PrefillAborted
        return share.prefill(sequence.state, entry, chunk.num_tokens, sequence.kv)

    def _entry(self, chunk: SequenceChunk, payload: bytearray) -> torch.Tensor:
        if self._place.stage == 0:
            return torch.frombuffer(payload, dtype=torch.int64)
        return torch.frombuffer(payload, dtype=self._share.model.dtype).view(1, chunk.num_tokens, -1)

    def _fail(self, sequence: _Sequence, error: Exception) -> None:
        sequence.is_broken = True
        reason = "pages_invalid" if isinstance(error, PagesInvalid) else "failed"
        # Pages are taken back whenever a client leaves; the engine tells those that still wait.
        if reason == "failed":
            log.error("stage %d: sequence %d: %s", self._place.stage, sequence.number, error, exc_info=error)
        self._tell(StageFailure(sequence.number, reason, f"{type(error).__name__}: {error}"))

    def _pass_on(self, message: StageMessage, payload: memoryview | bytes = b"") -> None:
        if self._place.behind is not None:
            send(self._place.behind, message, payload)

    def _tell(self, message: StageMessage, payload: memoryview | bytes = b"") -> None:
        send(self._place.engine, message, payload)


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    _end_with(args.parent)
    permits = Permits(args.permits_fd, args.stages)
    before, engine = socket.socket(fileno=args.before_fd), socket.socket(fileno=args.engine_fd)
    behind = None if args.behind_fd < 0 else socket.socket(fileno=args.behind_fd)
    place = StagePlace(args.stage, before, behind, engine, permits)
    inbox: queue.SimpleQueue[ToStageFrame] = queue.SimpleQueue()
    threading.Thread(target=_end_with_engine, args=(engine,), name="engine", daemon=True).start()
    try:
        share, ready = _make(args)
    except ModelError as exc:
        send(engine, StageUnfit(str(exc)))
        return 0
    threading.Thread(target=_read, args=(before, inbox), name="before", daemon=True).start()
    try:
        send(engine, ready)
        stage = Stage(share, place)
        while True:
            stage.hear(*inbox.get())
    except OSError:
        return 0  # the engine is gone, or the stage behind, whose end the engine sees


def _make(args: argparse.Namespace) -> tuple[LayerShare, StageReady]:
    """Raises ModelError."""
    torch.set_num_threads(args.threads)
    layers = shares(num_layers_of(args.model), args.stages)[args.stage]
    model = load_share(args.model, layers)
    share = LayerShare(model, layers, identity="", block_size=args.block_size)
    text = model.config.get_text_config(decoder=True)
    ready = StageReady(share.layout.to_json(), context_tokens(model.config, args.max_model_len), int(text.vocab_size))
    return share, ready


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` ends: while it is stopped, no thread of it sees closed sockets."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)
    # Said to all of a terminal, or of a service: the engine ends us, after its streams.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with_engine(engine: socket.socket) -> None:
    """In the middle of a chunk, too. What the engine has had us hold, its connection to the agent, goes with us: so the agent
    learns that its lent pages are not written to any more when that is so, and not when the engine is gone."""
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            data, descriptors, *_ = socket.recv_fds(engine, 1, 1)
            if not data:
                break
            for descriptor in held:
                os.close(descriptor)
            held = descriptors
    os._exit(0)


def _read(before: socket.socket, inbox: "queue.SimpleQueue[ToStageFrame]") -> None:
    try:
        while (frame := receive_to_stage(before)) is not None:
            inbox.put(frame)
    except OSError:
        pass  # as its end
    except ValueError as exc:
        log.error("what the stage before says cannot be read: %s", exc)
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.staged.stage", description="One stage of an engine.")
    parser.add_argument("--model", type=Path, required=True)
    for name in ("--stage", "--stages", "--before-fd", "--behind-fd", "--engine-fd", "--permits-fd", "--parent"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--log-level", default="info")
    return parser


if __name__ == "__main__":
    sys.exit(main())
