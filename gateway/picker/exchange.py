"""One request as a proxy tells it to a picker: a table of states and messages, and what is answered to each.

    AWAITING     nothing has come
    COLLECTING   a body that passes through us: its headers are answered with the choice, once the body is whole
    BUFFERING    a body that the proxy keeps: its headers were let pass, the choice goes with the body
    CHOOSING     a choice was asked for
    FORWARDED    the choice has been told
    ANSWERING    the response has begun
    OVER         refused: nothing more is answered

Bodies that pass through us (`FULL_DUPLEX`) are given back whole, in parts, to their end: a proxy loses what is not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

from gateway.errors import ExchangeError

PART_BYTES: Final = 62_000  # of a body that is given back: below the window of a fresh HTTP/2 stream, with its frame


class BodyMode(IntEnum):
    """What a proxy does with bodies, by Envoy's numbers."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


class Direction(Enum):
    """Which of the two messages of HTTP is meant."""

    REQUEST = "request"
    RESPONSE = "response"


# What a proxy says


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """The first message. `subset` are the only endpoints that may be chosen; None: any."""

    headers: Mapping[str, str]
    has_ended: bool = False
    request_mode: BodyMode = BodyMode.NONE
    response_mode: BodyMode = BodyMode.NONE
    subset: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class BodyPart:
    """A part of a body, or all of it."""

    direction: Direction
    data: bytes
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    """The end of a message that has trailers."""

    direction: Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """`served` is the endpoint that has answered, where the proxy says it."""

    served: str = ""


ProxyMessage = RequestHead | BodyPart | Trailers | ResponseHead


# What is chosen


@dataclass(frozen=True, slots=True)
class EndpointChoice:
    """The endpoints, best first, and the server that computes the prompt before; "" where the endpoint does."""

    endpoints: tuple[str, ...]
    prefiller: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer to the client in place of a server's. `reason` is the value of `x-llm-d-request-dropped-reason`."""

    status: int
    text: str
    reason: str = ""
    retry_after_s: float = 0.0


# What is answered


@dataclass(frozen=True, slots=True)
class PassHead:
    """Headers go on, with the choice if there is one."""

    direction: Direction
    choice: EndpointChoice | None = None


@dataclass(frozen=True, slots=True)
class PassPart:
    """What the proxy has of a body goes on, with the choice if there is one."""

    direction: Direction
    choice: EndpointChoice | None = None


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A part of a body that passes through us."""

    direction: Direction
    data: bytes
    has_ended: bool


@dataclass(frozen=True, slots=True)
class PassTrailers:
    """Trailers go on."""

    direction: Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceWanted:
    """A choice is wanted: `Exchange.chosen` is to be told it. `body` is None where it is not known."""

    head: RequestHead
    body: bytes | None


ProxyAnswer = PassHead | PassPart | GiveBack | PassTrailers | Refusal


class ExchangeState(Enum):
    """See the module."""

    AWAITING = "awaiting"
    COLLECTING = "collecting"
    BUFFERING = "buffering"
    CHOOSING = "choosing"
    FORWARDED = "forwarded"
    ANSWERING = "answering"
    OVER = "over"


@dataclass(slots=True)
class _Request:
    """What has come of a request."""

    head: RequestHead
    body: bytearray | None = None  # as far as it has come: parts may be many and small
    has_trailers: bool = False
    is_kept: bool = False  # by the proxy, which waits for an answer to the body

    def add(self, data: bytes) -> None:
        if self.body is None:
            self.body = bytearray()
        self.body += data

    @property
    def num_bytes(self) -> int:
        return len(self.body or ())


class Exchange:
    """The state of one request. `on` and `chosen` return what is to be answered, in order."""

    def __init__(self, max_body_bytes: int) -> None:
        self.state = ExchangeState.AWAITING
        self._max_body_bytes = max_body_bytes
        self._request: _Request | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.state.value}, {self.held_bytes} bytes>"

    @property
    def held_bytes(self) -> int:
        """Of the body, until the choice."""
        return self._request.num_bytes if self._request is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be answered."""
        return self.state is ExchangeState.OVER

    @property
    def hears_of_answers(self) -> bool:
        """Whether the proxy ends its stream with the answer. Some do so once they have the choice."""
        if self._request is None:
            return False
        head = self._request.head
        return head.response_mode is not BodyMode.NONE or self._request.is_kept

    def on(self, message: ProxyMessage) -> Sequence[ProxyAnswer | ChoiceWanted]:
        """What follows from a message. Raises ExchangeError for one that cannot come now."""
        direction = getattr(message, "direction", None)
        step = STEPS.get((self.state, type(message), direction))
        if step is None:
            of = f" of the {direction.value}" if direction is not None else ""
            raise ExchangeError(f"{type(message).__name__}{of} while {self.state.value}")
        return step(self, message)

    def chosen(self, found: EndpointChoice | Refusal) -> Sequence[ProxyAnswer]:
        """What follows from a choice that was asked for."""
        request = self._request
        if self.state is not ExchangeState.CHOOSING or request is None:
            raise ExchangeError(f"a choice while {self.state.value}")
        if isinstance(found, Refusal):
            return self._refused(found)
        self.state = ExchangeState.FORWARDED
        answers: list[ProxyAnswer] = []
        if request.is_kept:
            answers.append(PassPart(Direction.REQUEST, found))
        else:
            answers.append(PassHead(Direction.REQUEST, found))
            if request.body is not None:
                answers.extend(given_back(Direction.REQUEST, bytes(request.body), not request.has_trailers))
        if request.has_trailers:
            answers.append(PassTrailers(Direction.REQUEST))
        request.body = None
        return answers

    def _begun(self, head: RequestHead) -> Sequence[ProxyAnswer | ChoiceWanted]:
        self._request = _Request(head)
        if head.has_ended:
            return self._asks(None)
        match head.request_mode:
            case BodyMode.FULL_DUPLEX:
                self.state = ExchangeState.COLLECTING
                return ()
            case BodyMode.BUFFERED | BodyMode.BUFFERED_PARTIAL:
                self.state = ExchangeState.BUFFERING
                self._request.is_kept = True
                return (PassHead(Direction.REQUEST),)
        return self._asks(None)

    def _collected(self, part: BodyPart) -> Sequence[ProxyAnswer | ChoiceWanted]:
        assert self._request is not None
        self._request.add(part.data)
        if self._request.num_bytes > self._max_body_bytes:
            return self._refused(Refusal(status=413, text=f"the body is longer than {self._max_body_bytes} bytes"))
        return self._asks(bytes(self._request.body or b"")) if part.has_ended else ()

    def _buffered(self, part: BodyPart) -> Sequence[ProxyAnswer | ChoiceWanted]:
        assert self._request is not None
        is_whole = part.has_ended or self._request.head.request_mode is BodyMode.BUFFERED
        return self._asks(part.data if is_whole else None)

    def _ended_by_trailers(self, _: Trailers) -> Sequence[ProxyAnswer | ChoiceWanted]:
        assert self._request is not None
        self._request.has_trailers = True
        return self._asks(bytes(self._request.body or b""))

    def _asks(self, body: bytes | None) -> Sequence[ChoiceWanted]:
        assert self._request is not None
        self.state = ExchangeState.CHOOSING
        return (ChoiceWanted(head=self._request.head, body=body),)

    def _refused(self, refusal: Refusal) -> Sequence[Refusal]:
        self.state = ExchangeState.OVER
        self._request = None
        return (refusal,)

    def _went_on(self, part: BodyPart) -> Sequence[ProxyAnswer]:
        assert self._request is not None
        head = self._request.head
        mode = head.request_mode if part.direction is Direction.REQUEST else head.response_mode
        if mode is BodyMode.FULL_DUPLEX:
            return tuple(given_back(part.direction, part.data, part.has_ended))
        return (PassPart(part.direction),)

    def _trailed(self, trailers: Trailers) -> Sequence[ProxyAnswer]:
        return (PassTrailers(trailers.direction),)

    def _answered(self, _: ResponseHead) -> Sequence[ProxyAnswer]:
        self.state = ExchangeState.ANSWERING
        return (PassHead(Direction.RESPONSE),)


def given_back(direction: Direction, data: bytes, has_ended: bool) -> Iterator[GiveBack]:
    """A body in parts that a proxy takes; an empty one that ends is a part, too."""
    if len(data) <= PART_BYTES:
        yield GiveBack(direction, data, has_ended)
        return
    for begin in range(0, len(data), PART_BYTES):
        end = begin + PART_BYTES
        yield GiveBack(direction, data[begin:end], has_ended and end >= len(data))


_Step = Callable[[Exchange, ProxyMessage], Sequence[ProxyAnswer | ChoiceWanted]]


def _table() -> Mapping[tuple[ExchangeState, type, Direction | None], _Step]:
    state, request, response = ExchangeState, Direction.REQUEST, Direction.RESPONSE
    table = {
        (state.AWAITING, RequestHead, None): Exchange._begun,
        (state.COLLECTING, BodyPart, request): Exchange._collected,
        (state.COLLECTING, Trailers, request): Exchange._ended_by_trailers,
        (state.BUFFERING, BodyPart, request): Exchange._buffered,
        # The proxy itself may answer before the body is whole: it gave up waiting for the client.
        (state.COLLECTING, ResponseHead, None): Exchange._answered,
        (state.BUFFERING, ResponseHead, None): Exchange._answered,
        (state.FORWARDED, BodyPart, request): Exchange._went_on,
        (state.FORWARDED, Trailers, request): Exchange._trailed,
        (state.FORWARDED, ResponseHead, None): Exchange._answered,
        # A server may answer before it has read all.
        (state.ANSWERING, BodyPart, request): Exchange._went_on,
        (state.ANSWERING, Trailers, request): Exchange._trailed,
        (state.ANSWERING, BodyPart, response): Exchange._went_on,
        (state.ANSWERING, Trailers, response): Exchange._trailed,
    }
    return MappingProxyType(table)  # type: ignore[arg-type]  # each step takes the message of its row


STEPS: Final = _table()
