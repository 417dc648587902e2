"""The two HTTP legs of a request, to the engines: which engine is asked for what, and what counts as a failure.

prefill leg    the client's body, max_tokens=1, not streamed, with the ticket   → a PrefillOutcome
decode leg     the client's body, with the transfer id                           → the client's answer, byte for byte

Engines that are paired by rooms are both sent the client's body with the room: what is sampled by the one that prefills is the
first token of the answer.
"""

import re
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.api.bodies import Body
from gateway.api.openai import NOT_JSON
from gateway.api.sse import DATA, ERROR
from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.node import ClusterNode
from gateway.config.gateway import GatewayConfig
from gateway.config.timeouts import Timeouts
from gateway.errors import DecodeFailed, LegFailed, PrefillFailed
from gateway.request.request import Request
from gateway.upstream.http1 import NODE_SILENT, EngineAnswer
from gateway.upstream.pool import EnginePool
from gateway.upstream.sglang_bootstrap import BootstrapRoom, label_in
from planner.decisions.failures.retries import SAME_EVERYWHERE, FailureKind
from transport.control.messages import TicketInfo
from transport.peers.guard import Guard
from transport.wire.identity import Identity

MAX_ERROR_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 64 << 20  # of what is no generation
# Fields that ask for more than a prompt's KVCache; the one token that the API makes a prefill ask for is not used.
NOT_FOR_PREFILL: Final = frozenset(
    {"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "echo"}
    | {"prompt_logprobs", "suffix", "response_format", "stop", "stop_token_ids"}
)
# Of a request that is sampled from the first token on, all counts but how it is told.
NOT_FOR_PAIRED_PREFILL: Final = frozenset({"stream_options"})
# The engine's own trouble, not the request's: another node may do better.
RETRYABLE: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_LABEL_CHARS: Final = 40
MAX_TOLD_BYTES: Final = 200  # of an invalid answer, in a log
CHOICES: Final = b'"choices"'
FIELDS: Final = (DATA, b":", b"event:")  # with which a stream of events begins (WHATWG HTML §9.2.5)
STREAM_REASONS: Final = {"timeout": "stream_idle", NODE_SILENT: NODE_SILENT}
LEGS: Final = 2  # of a request at once
# vLLM (uvicorn) closes connections after 5 s without a request. A POST that meets such a close looks like an engine that died
# of it, and cannot be sent again unasked: so we are first, with time for a packet on its way and a busy loop.
KEEP_ALIVE_S: Final = 3.0


class _EngineError(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _EngineErrorBody(_EngineError):
    """OpenAI's shape; SGLang tells what is in `error` beside it."""

    error: _EngineError | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _UsageBody(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _PrefillBody(msgspec.Struct):
    kv_transfer_params: PrefillOutcome | None = None


_UNFIT: Final = re.compile(r"[^A-Za-z0-9_.-]")
_PREFILL: Final = msgspec.json.Decoder(_PrefillBody)
_ERROR: Final = msgspec.json.Decoder(_EngineErrorBody)
_USAGE: Final = msgspec.json.Decoder(_UsageBody)
_FALSE: Final = Raw(b"false")


class DecodeAnswer:
    """The answer of a decode node that has begun: `first` are its first bytes, all of them if it is not streamed."""

    def __init__(self, node: ClusterNode, answer: EngineAnswer, first: bytes) -> None:
        self.status = answer.status
        self.content_type = answer.content_type
        self.not_resumable = _fit(answer.not_resumable.decode("ascii", "replace"))
        self.first = first
        self._node = node
        self._answer = answer

    async def read(self) -> bytes:
        """The next bytes after the first, b"" at the end. Raises DecodeFailed when the stream breaks or goes silent."""
        try:
            return await self._answer.read()
        except LegFailed as error:
            reason = STREAM_REASONS.get(error.reason, "stream_broken")
            raise DecodeFailed(self._node.id, reason, str(error)) from error

    def when_whole(self, tell: Callable[[], None]) -> None:
        """Has `tell` called once the node has said all, though its client may not have read that; at once if it has."""
        self._answer.when_whole(tell)

    def close(self) -> None:
        """Lets go of the node: it stops if it has more to say."""
        self._answer.close()


class Legs:
    """HTTP to the engines, over one bounded pool of connections."""

    def __init__(
        self,
        timeouts: Timeouts,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`identity` is what engines behind mutual TLS are shown, `guard` knows which of them are nodes'."""
        self.timeouts = timeouts
        self._clock = clock
        self._pool = EnginePool(LEGS * max_in_flight, timeouts.connect_s, KEEP_ALIVE_S, identity, guard)

    def configure(self, config: GatewayConfig) -> None:
        """As many connections from now on as its requests take."""
        self._pool.resize(LEGS * config.max_in_flight)

    def close(self) -> None:
        self._pool.close()

    def give_up(self, engine_url: str, quiet_s: float) -> None:
        """Waits no more for what an engine has said nothing about for `quiet_s`."""
        self._pool.give_up(engine_url, quiet_s)

    async def prefill(self, node: ClusterNode, request: Request, ticket: TicketInfo) -> PrefillOutcome:
        """Has `node` compute the prompt and push its KVCache to the holder of `ticket`. Raises PrefillFailed."""
        share = request.tenant.share
        params = _hints(request) | {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "ticket": replace(ticket, tenant=share.flow, weight=share.weight) if share.flow else ticket,
            "salt": request.prompt.salt.hex(),
        }
        if request.progress.answered:
            params["answered"] = request.progress.answered
        values = _common(request, node, params) | {"stream": _FALSE, "max_tokens": 1}
        if "truncate_prompt_tokens" in request.call.fields:  # to which length may depend on what else is asked for
            values["truncate_prompt_tokens"] = request.asked.num_tokens
        body = request.call.written(values, drop=NOT_FOR_PREFILL)
        return _outcome(node, *await self._prefill(node, request, body))

    async def _prefill(self, node: ClusterNode, request: Request, body: Body) -> tuple[int, bytes]:
        try:
            answer = await self._post(node, request, body, self.timeouts.prefill_s)
            try:
                return answer.status, await answer.whole()
            finally:
                answer.close()
        except LegFailed as error:
            raise PrefillFailed(node.id, error.reason, str(error)) from error

    async def decode(self, node: ClusterNode, request: Request, transfer_id: str | None) -> DecodeAnswer:
        """The answer of `node`, to be closed, from its first token on. Raises DecodeFailed if none comes.

        Without a `transfer_id` the node computes the prompt itself. What another node has answered is not answered again.
        """
        params: dict[str, Any] = _hints(request) | {"salt": request.prompt.salt.hex()}
        if transfer_id is not None:
            params |= {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
            params["timeout_s"] = self.timeouts.prefill_s
        if request.stream.kept_bytes:
            params["resumable"] = True
        if request.progress.answered:
            params["answered"] = request.progress.answered
        return await self._decode(node, request, request.call.written(_common(request, node, params)))

    async def _decode(self, node: ClusterNode, request: Request, body: Body) -> DecodeAnswer:
        try:
            answer = await self._post(node, request, body, self._first_bytes_s(request))
            try:
                first = await self._first_bytes(node, request, answer)
            except BaseException:
                answer.close()
                raise
        except LegFailed as error:
            raise DecodeFailed(node.id, error.reason, str(error)) from error
        return DecodeAnswer(node, answer, first)

    async def prefill_in(self, node: ClusterNode, request: Request, room: BootstrapRoom) -> PrefillOutcome:
        """Has `node` compute the prompt and hand it to the server that asks for `room`. Raises PrefillFailed."""
        began = self._clock()
        body = request.call.written(_paired(request, node, room) | {"stream": _FALSE}, drop=NOT_FOR_PAIRED_PREFILL)
        told = await self._prefill_paired(node, request, body)
        return _paired_outcome(node, request, told, self._clock() - began)

    async def _prefill_paired(self, node: ClusterNode, request: Request, body: Body) -> bytes:
        status, told = await self._prefill(node, request, body)
        if status != 200:
            failed = _error(told)
            others_too = status not in RETRYABLE
            reason = _told_by_us(failed, status) or _label(failed, status)
            raise PrefillFailed(node.id, reason, failed.message, FailureKind.REQUEST if others_too else None)
        return told

    async def decode_in(self, node: ClusterNode, request: Request, room: BootstrapRoom) -> DecodeAnswer:
        """The answer of `node` to what another node prefills in `room`, as of `decode`. Raises DecodeFailed."""
        return await self._decode(node, request, request.call.written(_paired(request, node, room)))

    async def ask(
        self, node: ClusterNode, path: str, body: Body | bytes, max_bytes: int = MAX_ANSWER_BYTES
    ) -> tuple[int, str, bytes]:
        """Status, type and body of what `node` answers at `path`, which is no leg of a generation. Raises LegFailed."""
        assert node.info is not None
        answer = await self._pool.post(
            node.info.engine_url,
            path,
            "",
            body,
            self.timeouts.answer_s,
            name=node.agent.certified_name,
            place=node.place,
        )
        try:
            return answer.status, answer.content_type, await answer.whole(max_bytes)
        finally:
            answer.close()

    def _first_bytes_s(self, request: Request) -> float:
        # An answer that is not streamed comes as a whole, so its first byte waits for its last token.
        return self.timeouts.first_token_s if request.call.stream else self.timeouts.answer_s

    async def _first_bytes(self, node: ClusterNode, request: Request, answer: EngineAnswer) -> bytes:
        if answer.status in RETRYABLE:
            error = _error(await answer.whole(MAX_ERROR_BYTES))
            told = _told_by_us(error, answer.status) if node.is_paired else None
            raise DecodeFailed(node.id, told or _label(error, answer.status), error.message)
        if request.progress.answered:
            await _check_goes_on(node, request, answer)
        if answer.status != 200:
            return _in_openai_shape(await answer.whole())
        if not request.call.stream:
            whole = await answer.whole()
            if not (whole.startswith(b"{") and CHOICES in whole):
                raise DecodeFailed(node.id, "bad_answer", _beginning(whole))
            return whole
        answer.bound_silence(self.timeouts.stream_idle_s)
        first = await answer.read()
        if not first:
            raise DecodeFailed(node.id, "empty_answer")
        if first.startswith(ERROR) and node.is_paired:  # to a stream SGLang says 200 first
            error = _error(first.partition(b"\n")[0].removeprefix(DATA))
            if told := _told_by_us(error, error.code if isinstance(error.code, int) else 500):
                raise DecodeFailed(node.id, told, _beginning(first))
        if first.startswith(ERROR) or not (first.startswith(FIELDS) or DATA.startswith(first)):
            raise DecodeFailed(node.id, "bad_answer", _beginning(first))
        return first

    async def _post(self, node: ClusterNode, request: Request, body: Body, within_s: float) -> EngineAnswer:
        assert node.info is not None
        headers = "".join(f"{name}: {value}\r\n" for name, value in request.trace_headers.items())
        return await self._pool.post(
            node.info.engine_url,
            request.call.endpoint,
            f"X-Request-Id: {request.leg_id}\r\n{headers}",
            body,
            within_s,
            name=node.agent.certified_name,
            place=node.place,
        )


async def _check_goes_on(node: ClusterNode, request: Request, answer: EngineAnswer) -> None:
    """Raises DecodeFailed if `answer` is invalid, or would begin again what the client has a part of."""
    if answer.status != 200:
        error = _error(await answer.whole(MAX_ERROR_BYTES))
        raise DecodeFailed(node.id, _label(error, answer.status), error.message)
    if answer.answered != str(len(request.progress.answered)).encode():
        raise DecodeFailed(node.id, "not_resumable", "the engine would start the answer again")


def _beginning(told: bytes) -> str:
    return repr(told[:MAX_TOLD_BYTES])


def _common(request: Request, node: ClusterNode, params: dict[str, Any]) -> dict[str, Any]:
    share = request.tenant.share
    if share.flow:  # engines take turns by it; those that do not know it pass over it
        params |= {"tenant": share.flow, "weight": share.weight}
    if request.token_ids is not None:  # an engine's own: vLLM takes them in the place of the messages
        params["prompt_token_ids"] = request.token_ids
    return {"kv_transfer_params": params} | _named(request, node)


def _paired(request: Request, node: ClusterNode, room: BootstrapRoom) -> dict[str, Any]:
    return room.fields() | _named(request, node)


def _named(request: Request, node: ClusterNode) -> dict[str, Any]:
    """The model's name and the cache's, as the engine of `node` knows them: two of a model may be called differently."""
    values: dict[str, Any] = {}
    if request.prompt.namespace:  # of caches that engines keep for themselves
        values["cache_salt"] = request.prompt.namespace
    model_id = node.info.model_id if node.info is not None else request.served.model_id
    if not request.prompt.adapter and request.call.options.model != model_id:
        values["model"] = model_id
    return values


def _hints(request: Request) -> dict[str, Any]:
    """What engines' agents should know of the prompt for later ones."""
    return request.asked.caching.hints(request.served.layout.block_size)


def _outcome(node: ClusterNode, status: int, answer: bytes) -> PrefillOutcome:
    if status != 200:
        error = _error(answer)
        code = _label(error, status)
        others_too = status not in RETRYABLE or code in SAME_EVERYWHERE
        raise PrefillFailed(node.id, code, error.message, FailureKind.REQUEST if others_too else None)
    try:
        outcome = _PREFILL.decode(answer).kv_transfer_params
    except NOT_JSON as error:
        raise PrefillFailed(node.id, "bad_answer", str(error)) from error
    if outcome is None or not outcome.delivered:
        raise PrefillFailed(node.id, (outcome and outcome.reason) or "not_delivered")
    return outcome


def _paired_outcome(node: ClusterNode, request: Request, answer: bytes, seconds: float) -> PrefillOutcome:
    """What is known of a leg in a room: whole pages of all of its prompt have left, at some time before its answer."""
    try:
        usage = _USAGE.decode(answer).usage
    except NOT_JSON as error:
        raise PrefillFailed(node.id, "bad_answer", str(error)) from error
    layout = request.served.layout
    num_tokens = usage.prompt_tokens or request.prompt.num_tokens
    pages = -(-num_tokens // layout.block_size)
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return PrefillOutcome(
        delivered=True,
        num_tokens=num_tokens,
        cached_tokens=cached,
        bytes_total=int(layout.kv_bytes(pages * layout.block_size)),
        bytes_before_prefill_end=None,
        prefill_end_s=seconds,
        delivered_s=seconds,
    )


def _in_openai_shape(body: bytes) -> bytes:
    """An error as clients expect it; SGLang tells it without the object around it."""
    try:
        told = _ERROR.decode(body)
    except NOT_JSON:
        return body
    if told.error is not None or not told.message:
        return body
    return msgspec.json.encode({"error": msgspec.json.decode(body)})


def _error(body: bytes) -> _EngineError:
    try:
        told = _ERROR.decode(body)
        return told.error or told
    except NOT_JSON:
        return _EngineError(message=body[:200].decode(errors="replace"))


def _told_by_us(error: _EngineError, status: int) -> str | None:
    """Our backend's reason in an error of SGLang's; in what it says against a request may stand whatever a client has written."""
    return label_in(error.message) if status in RETRYABLE else None


def _label(error: _EngineError, status: int) -> str:
    """The engine's code as a metric label."""
    return _fit(str(error.code or status))


def _fit(reason: str) -> str:
    """A reason of an engine's as a metric label: short, and of few characters."""
    return _UNFIT.sub("_", reason)[:MAX_LABEL_CHARS]
