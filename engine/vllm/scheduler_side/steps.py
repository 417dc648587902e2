"""Messages between the scheduler's side of the connector and the workers: the work of a step, and its progress.

scheduler ── ForwardStep, with the metadata of a forward pass ───────────► every rank
scheduler ◄── RankHello, LayerWritten, StateWritten, StepWritten, LetGo … ── every rank     (a local socket)
scheduler ── Release ────────────────────────────────────────────────────► every rank
"""

from dataclasses import dataclass

import msgspec

from transport.control.messages import ControlMessage, JobPages, MessageError


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """A page arena to map. `generation` counts the agents that this engine has had."""

    path: str
    page_bytes: int
    num_pages: int
    generation: int


@dataclass(frozen=True, slots=True)
class StateOffer:
    """By the end of a step vLLM's block has a request's state after `length` tokens. `table`: its group."""

    table: int
    block: int
    length: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Tokens [start, stop) of a request go into the job's pages, and its states after `states` tokens.

    `tables`: its block ids, one tuple per group of vLLM. `offers`: blocks that this step puts a state into which is not that
    of its end; the table does not say which. `is_drafted`: its last state is one before drafts of this step.
    """

    job: str
    start: int
    stop: int
    states: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    offers: tuple["StateOffer", ...] = ()
    is_drafted: bool = False


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """The job's pages for tokens [start, stop) go into the blocks of a request that waits for them."""

    request_id: str
    job: str
    start: int
    stop: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Everything about one forward pass. `grants` are pages that the workers have not heard of yet; an idle one computes
    nothing."""

    socket: str = ""
    arena: ArenaRef | None = None
    grants: tuple[JobPages, ...] = ()
    saves: tuple[SaveBlocks, ...] = ()
    loads: tuple[LoadBlocks, ...] = ()
    is_idle: bool = False


class RankHello(ControlMessage, frozen=True, kw_only=True):
    """First message of a rank."""

    rank: int


class LayerWritten(ControlMessage, frozen=True, kw_only=True):
    """The rank's part of a layer is in the job's pages up to `num_tokens`."""

    job: str
    group: int
    layer: int
    num_tokens: int


class StateWritten(ControlMessage, frozen=True, kw_only=True):
    """The rank's part of a layer's state after `num_tokens` tokens is in the job's pages."""

    job: str
    group: int
    layer: int
    num_tokens: int


class StepWritten(ControlMessage, frozen=True, kw_only=True):
    """Everything of the job up to `num_tokens` that this rank has to write is in its pages."""

    job: str
    num_tokens: int


class SaveFailed(ControlMessage, frozen=True, kw_only=True):
    """The rank could not write what it should have."""

    job: str
    reason: str


class LetGo(ControlMessage, frozen=True, kw_only=True):
    """The rank neither reads nor writes the job's pages any more, and never will."""

    job: str


class Release(ControlMessage, frozen=True, kw_only=True):
    """To a rank: let go of the job's pages and answer with LetGo."""

    job: str


RankMessage = RankHello | LayerWritten | StateWritten | StepWritten | SaveFailed | LetGo

_from_rank: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)
_to_rank: msgspec.msgpack.Decoder[Release] = msgspec.msgpack.Decoder(Release)


def decode_from_rank(body: bytes) -> RankMessage:
    """What the scheduler's side reads. Raises MessageError."""
    try:
        return _from_rank.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise MessageError(f"not a message of a rank: {exc}") from exc


def decode_to_rank(body: bytes) -> Release:
    """What a rank reads. Raises MessageError."""
    try:
        return _to_rank.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise MessageError(f"not a message to a rank: {exc}") from exc
