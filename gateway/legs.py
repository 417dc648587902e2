"""The two HTTP legs of a request, to the engines: who is asked for what, and what counts as a failure.

prefill leg    the client's body, max_tokens=1, not streamed, with the ticket   → a PrefillOutcome
decode leg     the client's body, with the transfer id                           → the client's answer, byte for byte
"""

import asyncio
import io
import re
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Raw

from gateway.config import Timeouts
from gateway.errors import DecodeFailed, PrefillFailed
from gateway.node import Node
from gateway.request import PrefillOutcome, Request
from gateway.retries import SAME_EVERYWHERE, Failure
from transport.control.messages import TicketInfo

READ_BUFFER_BYTES: Final = 256 * 1024
MAX_WHOLE_BODY_BYTES: Final = 512 * 1024
MAX_ERROR_BYTES: Final = 64 * 1024
# Fields that ask for more than a prompt's KVCache; the one token that the API makes a prefill ask for is for nobody.
NOT_FOR_PREFILL: Final = frozenset(
    {"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "echo"}
    | {"prompt_logprobs", "suffix", "response_format", "stop", "stop_token_ids"}
)
# The engine's own trouble, not the request's: another node may do better.
RETRYABLE: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
MAX_LABEL_CHARS: Final = 40
# vLLM (uvicorn) closes connections after 5 s without a request. A POST that meets such a close looks like an engine that died
# of it, and cannot be sent again unasked: so we are first, with time for a packet on its way and a busy loop.
KEEP_ALIVE_S: Final = 3.0


class _EngineError(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _EngineErrorBody(msgspec.Struct):
    error: _EngineError = msgspec.field(default_factory=_EngineError)


class _PrefillBody(msgspec.Struct):
    kv_transfer_params: PrefillOutcome | None = None


_UNFIT: Final = re.compile(r"[^A-Za-z0-9_.-]")
_PREFILL: Final = msgspec.json.Decoder(_PrefillBody)
_ERROR: Final = msgspec.json.Decoder(_EngineErrorBody)
_FALSE: Final = Raw(b"false")


class DecodeAnswer:
    """The answer of a decode node that has begun: `first` are its first bytes, all of them if it is not streamed."""

    def __init__(self, node: Node, response: aiohttp.ClientResponse, first: bytes, idle_s: float) -> None:
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.first = first
        self._node = node
        self._response = response
        self._content = response.content
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._waiting_since: float | None = None
        self._look_at_it = self._loop.call_later(idle_s, self._look)

    async def read(self) -> bytes:
        """The next bytes after the first, b"" at the end. Raises DecodeFailed when the stream breaks or goes silent."""
        self._waiting_since = self._loop.time()
        try:
            return await self._content.readany()
        except TimeoutError as error:
            raise DecodeFailed(self._node.id, "stream_idle") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DecodeFailed(self._node.id, "stream_broken", str(error)) from error
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Lets go of the node: it stops if it has more to say."""
        self._look_at_it.cancel()
        self._response.release() if self._content.at_eof() else self._response.close()

    def _look(self) -> None:
        """Bounds the pause between two chunks with one timer, however many chunks there are."""
        now = self._loop.time()
        since = now if self._waiting_since is None else self._waiting_since
        if now - since >= self._idle_s:
            self._content.set_exception(TimeoutError(f"nothing for {self._idle_s} s"))
        else:
            self._look_at_it = self._loop.call_at(since + self._idle_s, self._look)


class Legs:
    """HTTP to the engines, over one bounded pool of connections."""

    def __init__(self, timeouts: Timeouts, max_connections: int) -> None:
        self.timeouts = timeouts
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=KEEP_ALIVE_S),
            # A stream may last for hours; what is bounded is every wait inside it.
            timeout=aiohttp.ClientTimeout(total=None, connect=timeouts.connect_s, sock_connect=timeouts.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),  # an engine's cookies are nobody's
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def prefill(self, node: Node, request: Request, ticket: TicketInfo) -> PrefillOutcome:
        """Has `node` compute the prompt and push its KVCache to the holder of `ticket`. Raises PrefillFailed."""
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "ticket": ticket,
            "salt": request.served.hashing.salt.hex(),
        }
        values = _common(request, params) | {"stream": _FALSE, "max_tokens": 1}
        body = request.call.body(values, drop=NOT_FOR_PREFILL)
        try:
            async with asyncio.timeout(self.timeouts.prefill_s), self._post(node, request, body) as response:
                answer = await response.read()
        except TimeoutError as error:
            raise PrefillFailed(node.id, "timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PrefillFailed(node.id, _reason(error), str(error)) from error
        return _outcome(node, response.status, answer)

    async def decode(self, node: Node, request: Request, transfer_id: str | None) -> DecodeAnswer:
        """The answer of `node`, to be closed, from its first token on. Raises DecodeFailed if none comes.

        Without a `transfer_id` the node computes the prompt itself.
        """
        params: dict[str, Any] = {"salt": request.served.hashing.salt.hex()}
        if transfer_id is not None:
            params |= {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
            params["timeout_s"] = self.timeouts.prefill_s
        body = request.call.body(_common(request, params))
        try:
            async with asyncio.timeout(self._first_bytes_s(request)):
                response = await self._post(node, request, body)
                first = await self._first_bytes(node, request, response)
        except TimeoutError as error:
            raise DecodeFailed(node.id, "timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DecodeFailed(node.id, _reason(error), str(error)) from error
        return DecodeAnswer(node, response, first, self.timeouts.stream_idle_s)

    def _first_bytes_s(self, request: Request) -> float:
        # An answer that is not streamed comes as a whole, so its first byte waits for its last token.
        return self.timeouts.first_token_s if request.call.stream else self.timeouts.answer_s

    async def _first_bytes(self, node: Node, request: Request, response: aiohttp.ClientResponse) -> bytes:
        try:
            if response.status in RETRYABLE:
                error = _error(await response.content.read(MAX_ERROR_BYTES))
                raise DecodeFailed(node.id, _label(error, response.status), error.message)
            if response.status != 200 or not request.call.stream:
                return await response.read()
            if first := await response.content.readany():
                return first
            raise DecodeFailed(node.id, "empty_answer")
        except BaseException:
            response.close()
            raise

    def _post(self, node: Node, request: Request, body: bytes) -> Any:
        assert node.info is not None
        headers = {"Content-Type": "application/json", "X-Request-Id": request.leg_id, **request.trace_headers}
        # aiohttp sends a file in pieces and lets others run in between, bytes all at once.
        data = io.BytesIO(body) if len(body) > MAX_WHOLE_BODY_BYTES else body
        return self._session.post(node.info.engine_url + request.call.endpoint, data=data, headers=headers)


def _common(request: Request, params: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"kv_transfer_params": params}
    if request.call.options.model != request.served.model_id:
        values["model"] = request.served.model_id
    return values


def _outcome(node: Node, status: int, answer: bytes) -> PrefillOutcome:
    if status != 200:
        error = _error(answer)
        code = _label(error, status)
        others_too = status not in RETRYABLE or code in SAME_EVERYWHERE
        raise PrefillFailed(node.id, code, error.message, Failure.REQUEST if others_too else None)
    try:
        outcome = _PREFILL.decode(answer).kv_transfer_params
    except msgspec.MsgspecError as error:
        raise PrefillFailed(node.id, "bad_answer", str(error)) from error
    if outcome is None or not outcome.delivered:
        raise PrefillFailed(node.id, (outcome and outcome.reason) or "not_delivered")
    return outcome


def _error(body: bytes) -> _EngineError:
    try:
        return _ERROR.decode(body).error
    except msgspec.MsgspecError:
        return _EngineError(message=body[:200].decode(errors="replace"))


def _label(error: _EngineError, status: int) -> str:
    """The engine's code as a metric label: short, and of few characters."""
    return _UNFIT.sub("_", str(error.code or status))[:MAX_LABEL_CHARS]


def _reason(error: Exception) -> str:
    return "unreachable" if isinstance(error, aiohttp.ClientConnectorError) else "connection_lost"
