"""The messages on the Unix socket between a node's agent and its engine.

Frames are a 4-byte little-endian length and a msgpack map with a type tag. KVCache bytes never cross it: both processes map
the same page arena, messages name pages.

    engine                                    agent
      | Hello ------------------------------->  |   layout decides page size; the arena outlives the engine
      |  <------------------------------ Welcome |
      | BeginPrefill ------------------------->  |   match, lock, allocate
      |  <-------------------------- JobPages    |   (or Refused)
      | LayerDone* StateDone* ---------------->  |   bytes may leave now
      | PrefillDone -------------------------->  |   commit to the prefix cache
      |  <------------------------- Delivered    |   only with a ticket
      | EndJob ------------------------------->  |   unlock, drop transfer blocks
      |                                          |
      | BeginPrefill(computed=True) … EndJob ->  |   after an answer: its blocks become prefix cache, too
      |                                          |
      | ClaimLanding ------------------------->  |   decode side: wait for a reservation to be complete
      |  <-------------------------- JobPages    |   (or Refused)
      | EndJob(loaded=True) ------------------>  |   pages copied: commit, drop transfer blocks
"""

from typing import Final

import msgspec

MAX_MESSAGE_BYTES: Final = 64 << 20  # a 10M-token prompt has 5 MB of hashes; anything near this is a broken peer


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; `tag=True` writes the class name into the frame."""


class TicketInfo(ControlMessage, frozen=True, kw_only=True):
    """The destination of a prefill's KVCache: proto Ticket as a value. In `kv_transfer_params` it is JSON, bytes in
    base64. The gateway adds the request's `tenant` and its `weight` on a link.
    """

    transfer_id: str
    secret: bytes
    num_tokens: int
    have_tokens: int
    tokens_digest: bytes
    endpoints: tuple[tuple[str, str, str], ...]  # (kind, address, host_id)
    ttl_s: float
    layout_fingerprint: str
    node_id: str
    cluster: str
    tenant: str = ""
    weight: float = 1.0


class BootstrapAddress(msgspec.Struct, frozen=True):
    """The address of an engine that is paired by rooms: proto Rooms as a value. `port` is 0 for one that decodes."""

    host: str = ""
    port: int = 0


class Hello(ControlMessage, frozen=True, kw_only=True):
    """First message of an engine. `layout_json` is ModelLayout.to_json(), `notice` what the node's operator should read.

    `not_done_json` names request fields that the engine ignores, each with the values that ask for nothing.
    `takes_media`: its model accepts images or sounds beside texts. `rooms` is None where it hands KVCache over by
    tickets.
    """

    engine_pid: int
    model_id: str
    layout_json: str
    max_model_len: int
    http_url: str
    notice: str = ""
    not_done_json: str = ""
    takes_media: bool = False
    rooms: BootstrapAddress | None = None


class Welcome(ControlMessage, frozen=True, kw_only=True):
    """Where the arena lies and how it is cut into pages. `block_salts` are what chains of block names may start from."""

    arena_path: str
    page_bytes: int
    num_pages: int
    chunk_tokens: int
    block_salts: tuple[bytes, ...] = ()


class BlockSalts(ControlMessage, frozen=True, kw_only=True):
    """Agent to engine: other `block_salts` than those of Welcome hold, after a rotation of their secret."""

    salts: tuple[bytes, ...]


class BeginPrefill(ControlMessage, frozen=True, kw_only=True):
    """Asks for pages for the first `num_tokens` tokens of a prompt. `hashes`: of its full blocks, concatenated.

    `computed`: the engine holds all of it already, for a prompt and its answer, and offers it as prefix cache. It is not
    awaited, so it is refused at once where there is no room. Later prompts will leave this one at `branch_tokens`;
    `category` is the kind of request, and nothing after `useful_tokens` is expected to be of use again (None: as usual).
    `cached_only`: pages of what is cached of it are wanted, and no others. JobPages then has that many `num_tokens`, maybe none.
    `tenant`: as a part of whose pages; some are left to others.
    """

    job: str
    request_id: str
    hashes: bytes
    num_tokens: int
    tokens_digest: bytes
    ticket: TicketInfo | None = None
    computed: bool = False
    cached_only: bool = False
    branch_tokens: tuple[int, ...] = ()
    category: str = ""
    useful_tokens: int | None = None
    tenant: str = ""


class JobPages(ControlMessage, frozen=True, kw_only=True):
    """Pages of a job.

    `blocks[g][i]` are the pages of block i of group g (empty tuple: not stored, e.g. out of the window, or a state group).
    `states[g][length]` are the pages of the snapshot of group g at that token length.
    Prefill: the engine loads `[0, cached_tokens)`, computes the rest and stores a snapshot at every length of `states` above
    `cached_tokens`. Landing: everything up to `num_tokens` is there to load; unless `exact`, for this request alone: nothing
    that is computed on top of it may become prefix cache.
    """

    job: str
    num_tokens: int
    cached_tokens: int
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    states: tuple[dict[int, tuple[int, ...]], ...]
    exact: bool = True


class Refused(ControlMessage, frozen=True, kw_only=True):
    """The job cannot be served; `reason` is one of the labels that fallbacks are counted under."""

    job: str
    reason: str
    detail: str = ""


class LayerDone(ControlMessage, frozen=True, kw_only=True):
    """Attention KV of `layer` is in its pages up to `num_tokens` (in `group`, should a layer be in two)."""

    job: str
    group: int
    layer: int
    num_tokens: int


class StateDone(ControlMessage, frozen=True, kw_only=True):
    """The snapshot of `layer` in `group` at length `num_tokens` is in its pages."""

    job: str
    group: int
    layer: int
    num_tokens: int


class PrefillDone(ControlMessage, frozen=True, kw_only=True):
    """All layers and states up to `num_tokens` are in their pages, but those of `unfilled`.

    An engine may be unable to keep a state at every length it was offered pages for; `unfilled` are the (group, length)
    of such states and the (group, block) of such window blocks, which must not become prefix cache.
    `computed_tokens` and `compute_s` are what the model did for it, without queueing; None: the engine does not know, and it
    is taken to have computed from the pages' `cached_tokens` on since they were there.
    """

    job: str
    num_tokens: int
    unfilled: tuple[tuple[int, int], ...] = ()
    computed_tokens: int | None = None
    compute_s: float | None = None


class Delivered(ControlMessage, frozen=True, kw_only=True):
    """Outcome of the push of a job with a ticket. Times are seconds after BeginPrefill, on the agent's clock."""

    job: str
    ok: bool
    reason: str = ""
    bytes_total: int = 0
    bytes_before_prefill_end: int = 0
    bytes_saved: int = 0  # of bytes_total, by coding on the way
    codecs: dict[str, int] = {}  # bytes by codec: "plain", "zstd", "int8", ...; empty: coding is off
    prefill_end_s: float = 0.0
    delivered_s: float = 0.0
    link: str = ""  # "shm", "rdma" or "tcp"


class EndJob(ControlMessage, frozen=True, kw_only=True):
    """The engine no longer needs the job's pages. On the decode side, `loaded` means that it copied them into the
    model."""

    job: str
    loaded: bool = False
    reason: str = ""


class ClaimLanding(ControlMessage, frozen=True, kw_only=True):
    """Decode side: answer with JobPages once the reservation `transfer_id` is complete, with Refused if it never will be."""

    job: str
    transfer_id: str
    tokens_digest: bytes
    timeout_s: float


class LoadReport(ControlMessage, frozen=True, kw_only=True):
    """Engine to agent, whenever it changes (at most every 50 ms).

    `slots`: sequences that it runs at once; 0: it does not say. `steps`: what its decode steps have taken lately, as
    (sequences in them, seconds), by rising number; empty: it does not know.
    """

    running: int
    waiting: int
    queued_tokens: int
    slots: int = 0
    steps: tuple[tuple[float, float], ...] = ()


class Drain(ControlMessage, frozen=True, kw_only=True):
    """Agent to engine: finish running requests, refuse new ones."""


class Resume(ControlMessage, frozen=True, kw_only=True):
    """Agent to engine: accept new requests again, after a Drain."""


EngineMessage = Hello | BeginPrefill | LayerDone | StateDone | PrefillDone | EndJob | ClaimLanding | LoadReport
AgentMessage = Welcome | BlockSalts | JobPages | Refused | Delivered | Drain | Resume

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_agent_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
# msgspec has no error of its own for invalid UTF-8 or endless nesting.
_NOT_DECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class MessageError(Exception):
    """The peer sent a frame that is too long, cut off, or not one of these messages."""


def encode(message: ControlMessage) -> bytes:
    """One frame: length and msgpack map."""
    return frame(_encoder.encode(message))


def frame(body: bytes) -> bytes:
    """`body` with its length before it, as MessageBuffer reads it."""
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class MessageBuffer:
    """Splits a byte stream into frames. Sans-IO: feed it whatever arrived."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pending = bytearray()

    @property
    def begun_bytes(self) -> int:
        """The full length of the frame that is incomplete, as far as known. 0: no frame has begun."""
        if len(self._pending) < _LENGTH_BYTES:
            return len(self._pending)
        return _LENGTH_BYTES + int.from_bytes(self._pending[:_LENGTH_BYTES], "little")

    def feed(self, data: bytes) -> list[bytes]:
        """The complete frame bodies so far. Raises MessageError for a frame that is too long."""
        self._pending += data
        bodies = []
        while len(self._pending) >= _LENGTH_BYTES:
            length = int.from_bytes(self._pending[:_LENGTH_BYTES], "little")
            if length > self._max_bytes:
                raise MessageError(f"frame of {length} bytes, the limit is {self._max_bytes}")
            if len(self._pending) < _LENGTH_BYTES + length:
                break
            bodies.append(bytes(self._pending[_LENGTH_BYTES : _LENGTH_BYTES + length]))
            del self._pending[: _LENGTH_BYTES + length]
        return bodies


def decode_from_engine(body: bytes) -> EngineMessage:
    """What an agent reads. Raises MessageError."""
    try:
        return _engine_decoder.decode(body)
    except _NOT_DECODABLE as exc:
        raise MessageError(f"not a message of an engine: {exc}") from exc


def decode_from_agent(body: bytes) -> AgentMessage:
    """What an engine reads. Raises MessageError."""
    try:
        return _agent_decoder.decode(body)
    except _NOT_DECODABLE as exc:
        raise MessageError(f"not a message of an agent: {exc}") from exc
