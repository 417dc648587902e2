"""The process in which long bodies are read: what takes seconds there would hold the gateway's interpreter for as long.

It finds the tokenizer, a Blueprint, in a file that the gateway has open for all of its processes. It speaks over its
standard input, a socket, until the gateway closes it. Frames are two lengths, of a msgpack header and of what follows
it as it is:

    gateway                                       process
    StartReader ───────────────────────────────►  whether to use the fast encoder, and what is known of it
    ◄───────────────────────────────  ReaderReady  the tokenizer is there
    ReadQuestion · body of the call ───────────►
    ◄───────────────── ReadAnswer · fields of the body, one after the other
                       ReadRefusal · nothing                                    one at a time, for ever
"""

import dataclasses
import io
import mmap
import os
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.api.cache_control import Caching
from gateway.api.openai import Call, Endpoint, call_of
from gateway.errors import ApiError
from gateway.prompt.media import MediaGuess
from gateway.prompt.prompt import BlockNames, Prompt, PromptMemory, PromptModel, RevisionNames, read_call
from hybrid_cache.hashing.block_hash import split_hashes
from prompts.tokens.encoder import EncoderVerdict
from prompts.tokens.tokenizer import Blueprint, TextTokenizer

LENGTHS: Final = struct.Struct("<QQ")


class StartReader(msgspec.Struct, frozen=True, tag="Start"):
    """How the tokenizer is to be used; `known` is what its fast encoder has shown, None: it is not to be used."""

    known: EncoderVerdict | None


class ReaderReady(msgspec.Struct, frozen=True, tag="Ready"):
    """The tokenizer has been loaded."""


class ReadQuestion(msgspec.Struct, frozen=True, tag="Question"):
    """Which call does the body that follows make, and with what prompt?"""

    endpoint: Endpoint
    model: PromptModel
    tenant: bytes
    answered: list[int] = []


class ReadAnswer(msgspec.Struct, frozen=True, tag="Answer"):
    """The prompt; `fields` are name and length, in bytes, of each top-level field that follows. Hashes come put together.

    `endpoint` is where engines are asked, wherever the client has; `why_plain` why the process does not use the fast encoder that
    it was told to use.
    """

    endpoint: Endpoint
    num_tokens: int
    hashes: bytes
    digest: bytes
    how: str
    salt: bytes
    namespace: str
    earlier: BlockNames | None  # its hashes are one, put together; so are those of `others`
    revision: str
    others: tuple[RevisionNames, ...]
    caching: Caching
    adapter: str
    has_media: bool
    guess: MediaGuess | None
    fields: list[tuple[str, int]]
    echo: bytes
    why_plain: str


class ReadRefusal(msgspec.Struct, frozen=True, tag="Refusal"):
    """The client's mistake: an ApiError as a value."""

    status: int
    message: str
    param: str | None
    code: str | None


_BLUEPRINT: Final = msgspec.msgpack.Decoder(Blueprint)
_START: Final = msgspec.msgpack.Decoder(StartReader)
_QUESTION: Final = msgspec.msgpack.Decoder(ReadQuestion)
_ANSWER: Final = msgspec.msgpack.Decoder(ReadAnswer | ReadRefusal)


def header_of(value: msgspec.Struct, size: int = 0) -> bytes:
    """The frame of `value` up to the `size` bytes that follow."""
    header = msgspec.msgpack.encode(value)
    return LENGTHS.pack(len(header), size) + header


def answer_of(header: bytes, data: bytearray, endpoint: Endpoint) -> tuple[Call, Prompt, str]:
    """What an answer says, and why its encoder is not to be believed, if so. Raises ApiError for a refusal."""
    answer = _ANSWER.decode(header)
    if isinstance(answer, ReadRefusal):
        raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code)
    fields, view, start = {}, memoryview(data), 0
    for name, size in answer.fields:
        fields[name] = msgspec.Raw(view[start : start + size])
        start += size
    prompt = Prompt(
        answer.num_tokens,
        split_hashes(answer.hashes),
        answer.digest,
        answer.how,
        answer.salt,
        answer.namespace,
        answer.caching,
        answer.adapter,
        answer.has_media,
        answer.guess,
        _apart(answer.earlier),
        answer.revision,
        tuple(replace(each, names=_apart(each.names), earlier=_apart(each.earlier)) for each in answer.others),
    )
    if endpoint is answer.endpoint:
        return call_of(endpoint, fields), prompt, answer.why_plain
    call = dataclasses.replace(call_of(answer.endpoint, fields), dialect=endpoint, echo=answer.echo)
    return call, prompt, answer.why_plain


def serve(connection: socket.socket, blueprint: int) -> None:
    """Answers questions until the other end closes; `blueprint` is the descriptor of the tokenizer's file."""
    with connection, connection.makefile("rb") as incoming:
        try:
            known = _START.decode(_frame(incoming)[0]).known
            memory = PromptMemory(TextTokenizer.build(replace(_blueprint(blueprint), known=known)))
            connection.sendall(header_of(ReaderReady()))
            while True:
                header, body = _frame(incoming)
                for part in _answer(_QUESTION.decode(header), body, memory):
                    connection.sendall(part)
        except (EOFError, ConnectionError):
            return  # the gateway has no more to ask


def _blueprint(descriptor: int) -> Blueprint:
    with os.fdopen(descriptor, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _BLUEPRINT.decode(data)


def _answer(question: ReadQuestion, body: bytes, memory: PromptMemory) -> Iterable[bytes]:
    try:
        call, prompt = read_call(question.endpoint, body, question.model, memory, question.tenant, question.answered)
    except ApiError as error:
        return [header_of(ReadRefusal(error.status, error.message, error.param, error.code))]
    values = [bytes(raw) for raw in call.fields.values()]
    sizes = [len(value) for value in values]
    answer = ReadAnswer(
        call.endpoint,
        prompt.num_tokens,
        b"".join(prompt.hashes),
        prompt.digest,
        prompt.how,
        prompt.salt,
        prompt.namespace,
        _together(prompt.earlier),
        prompt.revision,
        tuple(replace(each, names=_together(each.names), earlier=_together(each.earlier)) for each in prompt.others),
        prompt.caching,
        prompt.adapter,
        prompt.has_media,
        prompt.guess,
        list(zip(call.fields, sizes, strict=True)),
        call.echo,
        memory.tokenizer.encoder.why_plain,
    )
    return [header_of(answer, sum(sizes)), *values]


def _together(names: BlockNames | None) -> BlockNames | None:
    return None if names is None else replace(names, hashes=[b"".join(names.hashes)])


def _apart(names: BlockNames | None) -> BlockNames | None:
    return None if names is None else replace(names, hashes=split_hashes(*names.hashes))


def _frame(incoming: io.BufferedReader) -> tuple[bytes, bytes]:
    header_size, size = LENGTHS.unpack(_exactly(incoming, LENGTHS.size))
    return _exactly(incoming, header_size), _exactly(incoming, size)


def _exactly(incoming: io.BufferedReader, size: int) -> bytes:
    data = incoming.read(size)
    if len(data) < size:
        raise EOFError
    return data


if __name__ == "__main__":
    serve(socket.socket(fileno=sys.stdin.fileno()), int(sys.argv[1]))
