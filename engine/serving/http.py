"""The HTTP surface: OpenAI's routes on aiohttp, thin over `serving`."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from engine.errors import EngineError, RequestError
from engine.openai.answers import AnswerShape, TokenUsage, error_body
from engine.openai.api import (
    ANSWERED_HEADER,
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    answered_tokens,
    check_supported,
    parse_request,
    prompt_tokens,
    sampling_params,
    transfer_of,
)
from engine.runtime.scheduler import NewToken
from engine.serving.serving import GenerationService, ServedRequest
from prompts.tokens.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 10 << 20
LONG_BODY_BYTES: Final = 16 << 10  # beyond it, parsing and tokenising leave the event loop
RETRY_AFTER_S: Final = 1
REQUEST_ID_HEADER: Final = "x-request-id"
REQUEST_ID: Final = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[\w.:\-]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _Parsed:
    body: OpenAIRequest
    request: ServedRequest
    shape: AnswerShape


class OpenAIServer:
    """Routes of one model. Its owner runs the app and drains the service."""

    def __init__(
        self,
        service: GenerationService,
        tokenizer: TextTokenizer,
        model_name: str,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_body_bytes = max_body_bytes
        self._created_s = _unix_time()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[_request_ids, _errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render_chat)
        app.router.add_post("/v1/completions/render", self._render_completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # Generation

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, ChatRequest)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, CompletionRequest)

    async def _serve(self, http: web.Request, kind: type[ChatRequest] | type[CompletionRequest]) -> web.StreamResponse:
        arrived_s = self._service.clock()
        data = await http.read()
        if len(data) > LONG_BODY_BYTES:
            parsed = await asyncio.to_thread(self._parse, data, kind, http[REQUEST_ID], arrived_s)
        else:
            parsed = self._parse(data, kind, http[REQUEST_ID], arrived_s)
        if parsed.request.transfer.ticket is not None:
            return await self._prefill_leg(parsed)
        if parsed.body.stream:
            return await self._stream(http, parsed)
        return await self._whole(parsed)

    def _parse(
        self, data: bytes, kind: type[ChatRequest] | type[CompletionRequest], request_id: str, arrived_s: float
    ) -> _Parsed:
        body: OpenAIRequest = parse_request(data, kind)
        self._check_model(body.model)
        check_supported(body)
        transfer = transfer_of(body.kv_transfer_params)
        engine = self._service.engine
        prompt = prompt_tokens(body, self._tokenizer, engine.vocab_size)
        if transfer.ticket is not None:
            body = _as_leg(body)
        params = sampling_params(body, len(prompt), engine.max_model_len, engine.vocab_size, secrets.randbits(63))
        answered = answered_tokens(body, params, engine.vocab_size)
        request = ServedRequest(
            id=request_id,
            prompt=[*prompt, *answered] if answered else prompt,
            params=None if transfer.ticket is not None else params,
            transfer=transfer,
            arrived_s=arrived_s,
            num_answered=len(answered),
        )
        return _Parsed(body, request, AnswerShape(body, request_id, _unix_time(), self._tokenizer, answered))

    def _check_model(self, model: str) -> None:
        if model != self._model_name:
            raise RequestError(
                f"The model `{model}` does not exist; this engine serves `{self._model_name}`.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _render_chat(self, http: web.Request) -> web.Response:
        """The tokens that a chat stands for, as vLLM says them."""
        return _json({"token_ids": await self._rendered(http, ChatRequest)})

    async def _render_completion(self, http: web.Request) -> web.Response:
        """The same of a text, in a list of one."""
        return _json([{"token_ids": await self._rendered(http, CompletionRequest)}])

    async def _rendered(self, http: web.Request, kind: type[ChatRequest] | type[CompletionRequest]) -> list[int]:
        data = await http.read()
        if len(data) > LONG_BODY_BYTES:
            return await asyncio.to_thread(self._tokens_of, data, kind)
        return self._tokens_of(data, kind)

    def _tokens_of(self, data: bytes, kind: type[ChatRequest] | type[CompletionRequest]) -> list[int]:
        body: OpenAIRequest = parse_request(data, kind)
        self._check_model(body.model)
        check_supported(body)
        return prompt_tokens(body, self._tokenizer, self._service.engine.vocab_size)

    async def _prefill_leg(self, parsed: _Parsed) -> web.Response:
        request = parsed.request
        if not request.prefill_tokens:
            raise RequestError("a prompt of one token leaves nothing to transfer", param="prompt")
        delivery = await self._service.prefill_leg(request)
        usage = TokenUsage(len(request.prompt), 0, request.cached_tokens)
        return _json(parsed.shape.whole("", [], "length", usage, request.prompt, delivery.to_dict()))

    async def _whole(self, parsed: _Parsed) -> web.Response:
        request = parsed.request
        async with aclosing(self._service.tokens(request)) as tokens:
            events = [event async for event in tokens]
        text = "".join(event.text for event in events)
        sampled = [event.sampled for event in events]
        reason = events[-1].finish_reason or "stop"
        answer = parsed.shape.whole(text, sampled, reason, _usage(request), request.prompt, _recomputed(request))
        return _json(answer)

    async def _stream(self, http: web.Request, parsed: _Parsed) -> web.StreamResponse:
        async with aclosing(self._service.tokens(parsed.request)) as tokens:
            # The status line waits for the first token: until then every error can still be told as one.
            first = await anext(tokens)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            response.headers[REQUEST_ID_HEADER] = parsed.request.id
            if parsed.request.num_answered:
                response.headers[ANSWERED_HEADER] = str(parsed.request.num_answered)
            try:
                await response.prepare(http)
                await self._write_events(response, parsed, first, tokens)
            except ConnectionError:
                log.info("client gone id=%s tokens=%d", parsed.request.id, parsed.request.tokens_out)
        return response

    async def _write_events(
        self, response: web.StreamResponse, parsed: _Parsed, first: NewToken, rest: AsyncIterator[NewToken]
    ) -> None:
        try:
            await response.write(_sse(self._chunk(parsed, first)))
            async for event in rest:
                await response.write(_sse(self._chunk(parsed, event)))
            last = parsed.shape.usage_chunk(_usage(parsed.request), _recomputed(parsed.request))
            if last is not None:
                await response.write(_sse(last))
        except EngineError as exc:
            await response.write(_sse(error_body(_as_request_error(exc))))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _chunk(self, parsed: _Parsed, event: NewToken) -> dict[str, Any]:
        recomputed = _recomputed(parsed.request) if event.finish_reason else None
        return parsed.shape.chunk(event.text, [event.sampled], event.finish_reason, recomputed)

    # What the engine is

    async def _models(self, http: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._check_model(http.match_info["model"])
        return _json(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "prfaas",
            "max_model_len": self._service.engine.max_model_len,
        }

    async def _health(self, http: web.Request) -> web.Response:
        service = self._service
        state = "draining" if service.draining else "ok" if service.model.alive else "model thread has ended"
        agent = None if service.link is None else service.link.connected
        body = {"status": state, "agent_connected": agent, "active_requests": service.active}
        return _json(body, status=200 if state == "ok" else 503)

    async def _metrics(self, http: web.Request) -> web.Response:
        self._service.report_load()
        return web.Response(body=self._service.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


@web.middleware
async def _request_ids(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
    response = await handler(request)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reports every error in OpenAI's shape."""
    try:
        return await handler(request)
    except EngineError as exc:
        return _error_response(_as_request_error(exc))
    except web.HTTPRequestEntityTooLarge as exc:
        return _error_response(RequestError(exc.text or exc.reason, status=413, code="request_too_large"))
    except web.HTTPException as exc:
        return _error_response(
            RequestError(exc.reason, status=exc.status, code="not_found" if exc.status == 404 else None)
        )
    except Exception:
        log.exception("request %s", request[REQUEST_ID])
        return _error_response(RequestError("internal error", status=500, kind="server_error"))


def _error_response(error: RequestError) -> web.Response:
    response = _json(error_body(error), status=error.status)
    if error.status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _as_request_error(error: EngineError) -> RequestError:
    if isinstance(error, RequestError):
        return error
    return RequestError(str(error), status=500, kind="server_error")


def _as_leg(body: OpenAIRequest) -> OpenAIRequest:
    """A prefill leg needs room for one token only, whatever the client asked for."""
    if isinstance(body, ChatRequest):
        return msgspec.structs.replace(body, max_tokens=1, max_completion_tokens=None)
    return msgspec.structs.replace(body, max_tokens=1)


def _usage(request: ServedRequest) -> TokenUsage:
    """Usage as the client counts it: another engine's tokens count as answer, not as prompt."""
    asked = len(request.prompt) - request.num_answered
    return TokenUsage(asked, request.num_answered + request.tokens_out, min(asked, request.cached_tokens))


def _recomputed(request: ServedRequest) -> dict[str, Any] | None:
    return None if request.recomputed is None else {"recomputed": True, "reason": request.recomputed}


def _json(body: dict[str, Any] | list[dict[str, Any]], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _unix_time() -> int:
    return int(time.time())  # noqa: TID251  `created` is a date, not a duration
