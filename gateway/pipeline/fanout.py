"""One request for several answers (a list of prompts, `n`) as that many requests, each decided and routed by itself.

    prompts × n ──► requests of one answer each ──► the corridor, side by side ──► one answer, choices in the order asked for

Engines see requests for one answer: of several that share a transfer of KVCache, only one could have it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec import Raw

from gateway.api.cache_control import CONTROL, KEY, OPTIONS
from gateway.api.dialects.chat import DONE, ChatUsage, Cutter, error_of
from gateway.api.openai import NOT_JSON, Call, Endpoint, parse
from gateway.api.validation import LEAST_SEED, MOST_SEED
from gateway.errors import ApiError, BadRequest
from gateway.http.response import Reply
from gateway.prompt.cache_breakpoints import unmarked

_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_PROMPTS: Final = msgspec.json.Decoder(list[Raw])
_CHOICES: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_USAGE: Final = msgspec.json.Decoder(dict[str, Any] | None)
_OF_SEVERAL: Final = ("n", "best_of")
# Of a completion, all that its tokens and the names of its blocks depend on.
_READ: Final[tuple[str, ...]] = (
    "model", "max_tokens", "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt",
    OPTIONS, KEY, CONTROL,
)  # fmt: skip

SHARED: Final = ("id", "object", "created", "model")  # by all events of one stream
COMMENT: Final = b":\n\n"  # clients of SSE ignore it

Begin = Callable[[Mapping[str, str], int | None], Reply]


@dataclass(frozen=True, slots=True)
class Bodies:
    """A completion with a list of prompts, as bodies of one prompt each. What they have in common is there once.

    A body has only the fields that matter to reading it; `whole` is the call that engines are asked.
    """

    common: Call
    prompts: list[Raw]
    read: Mapping[str, Raw]

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[bytes]:
        for prompt in self.prompts:
            yield msgspec.json.encode({**self.read, "prompt": prompt})

    def whole(self, prompt: Raw) -> Call:
        """The call for one prompt, with all that the client said."""
        return replace(self.common, fields=self.common.fields | {"prompt": prompt})


def bodies_of(body: bytes) -> Bodies:
    """The bodies of a completion with a list of prompts, with one prompt each. Raises BadRequest."""
    call = parse(Endpoint.COMPLETIONS, body)
    fields = call.fields
    common, _ = unmarked(call)
    read = {name: fields[name] for name in _READ if name in fields}
    return Bodies(common, _PROMPTS.decode(fields["prompt"]), read)


def check_size(calls: Iterable[Call], max_bytes: int) -> None:
    """Raises ApiError 413 for calls for one answer each that engines would be sent more than `max_bytes` for."""
    sizes = [call.num_bytes for call in calls]
    if sum(sizes) > max_bytes:
        raise ApiError(
            413,
            f"{len(sizes)} answers take {sum(sizes)} bytes of requests to engines, as each has the body's fields; "
            f"one request may take {max_bytes} (max_several_bytes). Ask for fewer answers, or send a shorter body.",
            code="several_too_large",
        )


def calls_of(call: Call) -> list[Call]:
    """Splits a call for `n` answers into calls for one. Each has a seed of its own if the call has one, as vLLM seeds them."""
    n = call.options.n or 1
    if n > 1 and call.dialect is not None:
        raise BadRequest("'n' is not supported here: each request has one answer.", param="n", code="unsupported")
    fields = {name: raw for name, raw in call.fields.items() if name not in _OF_SEVERAL}
    options = msgspec.structs.replace(call.options, n=None)
    if call.endpoint is Endpoint.COMPLETIONS:
        options = msgspec.structs.replace(options, best_of=None)
    if options.seed is None:
        return [replace(call, fields=fields, options=options)] * n
    seeds = [_seed(options.seed + number) for number in range(n)]
    return [
        replace(
            call,
            fields=fields | {"seed": Raw(b"%d" % seed)},
            options=msgspec.structs.replace(options, seed=seed),
        )
        for seed in seeds
    ]


def _seed(number: int) -> int:
    """The seed that `number` is: after the greatest comes the least."""
    return (number - LEAST_SEED) % (MOST_SEED - LEAST_SEED + 1) + LEAST_SEED


class Merged:
    """One answer out of those to `size` calls, `n` for each prompt; `begin` begins it, with headers and a length."""

    def __init__(self, size: int, n: int, *, streams: bool, with_usage: bool, begin: Begin) -> None:
        self.reply: Reply | None = None
        self.is_given_up = False  # one of the calls has failed, and the others are cancelled for it
        self._bodies: list[dict[str, Raw] | None] = [None] * size
        self._usages: list[dict[str, Any] | None] = [None] * size
        self._n = n
        self._streams = streams
        self._with_usage = with_usage
        self._begin = begin
        self._headers: Mapping[str, str] = {}
        self._shared: dict[str, Raw] = {}  # what all events of a stream have in common

    def part(self, number: int, status: int, headers: Mapping[str, str]) -> "PartReply":
        """Where the answer to call `number` goes."""
        self._headers = self._headers or headers
        return PartReply(self, number, status, streams=self._streams and status == 200)

    def whole(self, number: int, body: bytes) -> None:
        """The answer to call `number` is there. Raises ApiError."""
        fields = self._bodies[number] = _decoded(body)
        self._usages[number] = _usage_in(fields)

    def event(self, number: int, data: bytes) -> bytes:
        """What an event of the answer to call `number` becomes. Raises ApiError for one that tells an error."""
        if data == DONE:
            return b""
        fields = _decoded(data)
        if bytes(fields.get("error", b"null")) != b"null":
            raise error_of(502, data)
        if usage := _usage_in(fields):
            self._usages[number] = usage
        self._shared = self._shared or {name: fields[name] for name in SHARED if name in fields}
        if bytes(fields.get("choices", b"[]")) == b"[]":
            return b""
        if self._with_usage:
            fields["usage"] = Raw(b"null")
        return b"data: %b\n\n" % msgspec.json.encode(fields | self._shared | {"choices": _numbered(fields, number)})

    def offer(self, data: bytes) -> bool:
        """Sends events of a stream, which begins with the first of them."""
        if self.reply is None:
            self.reply = self._begin(self._headers, None)
            self.reply.probed_by(self._probe)
        return self.reply.offer(data)

    def _probe(self) -> None:
        """Events leave whole, so that a comment is never in the middle of one."""
        self.offer(COMMENT)

    async def end(self) -> Reply:
        """Everything has come: the rest is said. Raises ConnectionResetError."""
        usage = self._usage()
        if self._streams:
            last: dict[str, Any] = {**self._shared, "choices": [], "usage": usage}
            told = b"data: %b\n\n" % msgspec.json.encode(last) if self._with_usage else b""
            self.offer(told + b"data: [DONE]\n\n")
            return await self._ended()
        choices = [choice for number, body in enumerate(self._bodies) for choice in _numbered(body or {}, number)]
        merged = (self._bodies[0] or {}) | {"choices": choices, "usage": usage}
        body = msgspec.json.encode(merged)
        self.reply = self._begin(self._headers, len(body))
        await self.reply.write_eof(body)
        return self.reply

    async def fail(self, error: ApiError) -> Reply:
        """A call has failed. Raises `error` if nothing has been said yet, else it is told in the stream."""
        if self.reply is None:
            raise error
        self.reply.offer(b"data: " + error.body() + b"\n\n")
        return await self._ended()

    async def _ended(self) -> Reply:
        assert self.reply is not None
        self.reply.probed_by(None)
        await self.reply.write_eof()
        return self.reply

    def _usage(self) -> dict[str, Any]:
        """Tokens of all answers; those of a prompt are counted once, as OpenAI does it."""
        prompts = [usage or {} for usage in self._usages[:: self._n]]
        prompt = sum(usage.get("prompt_tokens", 0) for usage in prompts)
        completion = sum((usage or {}).get("completion_tokens", 0) for usage in self._usages)
        cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in prompts)
        total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        details = [(usage or {}).get("prompt_tokens_details") or {} for usage in self._usages]
        # Only one answer to a prompt has found what it marks not kept yet.
        written = [each["cache_write_tokens"] for each in details if "cache_write_tokens" in each]
        writes = {"cache_write_tokens": sum(written)} if written else {}
        return total | {"prompt_tokens_details": {"cached_tokens": cached} | writes}


class AnswerListener:
    """Who hears the answer to one of several calls."""

    def __init__(self, merged: Merged, number: int) -> None:
        self._merged = merged
        self._number = number

    @property
    def is_given_up(self) -> bool:
        """Whether another call has failed, and this one is of no use any more."""
        return self._merged.is_given_up

    def give_up(self) -> None:
        """This call has failed, and all others with it."""
        self._merged.is_given_up = True

    def reply(self, status: int, headers: Mapping[str, str]) -> "PartReply":
        """Where the answer goes, which has begun."""
        return self._merged.part(self._number, status, headers)


class PartReply(web.StreamResponse):
    """A reply to the gateway itself: the answer to one of several calls, which becomes a part of one answer."""

    def __init__(self, merged: Merged, number: int, status: int, *, streams: bool) -> None:
        super().__init__(status=status)
        self._merged = merged
        self._number = number
        self._streams = streams
        self._cutter = Cutter()
        self._held = bytearray()

    @property
    def prepared(self) -> bool:
        """The one answer that it is a part of is what the server knows."""
        return True

    def probed_by(self, probe: Callable[[], None] | None) -> None:
        """Who listens is found out for all parts together."""

    def offer(self, data: bytes) -> bool:
        """Takes a part of the answer; whether the client is behind. Raises ConnectionResetError, ApiError.

        An error ends all answers: it is told once the others have ended, as the last event.
        """
        if not self._streams:
            self._held += data
            return False
        events = bytearray()
        try:
            for each in self._cutter.feed(data):
                events += self._merged.event(self._number, each)
        finally:
            is_behind = self._merged.offer(bytes(events)) if events else False
        return is_behind

    async def taken(self) -> None:
        """Waits until the client has taken what was offered, but for some bytes. Raises ConnectionResetError."""
        assert self._merged.reply is not None
        await self._merged.reply.taken()

    async def write_eof(self, data: bytes = b"") -> None:
        """It is complete. Raises ApiError for what an engine refuses."""
        if data:
            self.offer(data)
        if self.status != 200:
            raise error_of(self.status, bytes(self._held))
        if not self._streams:
            self._merged.whole(self._number, bytes(self._held))


def _decoded(data: bytes) -> dict[str, Raw]:
    with _of_engines():
        return _FIELDS.decode(data)


def _usage_in(fields: Mapping[str, Raw]) -> dict[str, Any] | None:
    with _of_engines():
        usage: dict[str, Any] | None = _USAGE.decode(fields.get("usage", Raw(b"null")))
        msgspec.convert(usage, ChatUsage | None)  # its numbers are added up
        return usage


@contextmanager
def _of_engines() -> Iterator[None]:
    """What does not decode inside is an engine's answer. Raises ApiError."""
    try:
        yield
    except NOT_JSON as error:
        raise ApiError(502, "The engine's answer cannot be read.", type="server_error", code="bad_answer") from error


def _numbered(fields: Mapping[str, Raw], number: int) -> list[dict[str, Any]]:
    """The choices of an answer; each becomes choice `number` of all."""
    with _of_engines():
        choices = _CHOICES.decode(fields.get("choices", Raw(b"[]")))
    return [choice | {"index": Raw(b"%d" % number)} for choice in choices]
