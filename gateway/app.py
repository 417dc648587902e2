"""The HTTP face: routes, the frame around every request, and the relay of bytes to the client."""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec
from aiohttp import web

from gateway.clusters import Clusters
from gateway.config import GatewayConfig
from gateway.dispatch import Answer, Dispatcher
from gateway.errors import ApiError, BadRequest, DecodeFailed, Overloaded, Unavailable
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.openai import Endpoint, parse, request_id_or
from gateway.records import Records
from gateway.request import Request, Timeline
from gateway.tasks import TaskSet
from gateway.usage import completion_tokens

log = logging.getLogger("prfaas.gateway.http")

CLOSE_S: Final = 1.0
CLIENT_CLOSED: Final = 499  # nginx's status for a client that did not wait
TRACE_HEADERS: Final = ("traceparent", "tracestate")
EVENT_END: Final = b"\n\n"
JSON: Final = "application/json"
REQUEST_ID: Final = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FrontDoor:
    """What the handlers share. `is_draining`: running requests end in peace, new ones are refused."""

    def __init__(
        self,
        config: GatewayConfig,
        clusters: Clusters,
        dispatcher: Dispatcher,
        metrics: Metrics,
        records: Records,
        clock: Callable[[], float],
        started_at: int,
    ) -> None:
        self.config = config
        self.clusters = clusters
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.records = records
        self.clock = clock
        self.started_at = started_at
        self.is_draining = False
        self._boot = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self.in_flight = 0
        self._work = TaskSet()
        self._serving: dict[str, tuple[Request, asyncio.Task[web.StreamResponse]]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def close(self) -> None:
        """Waits until every request's account is closed."""
        await self._work.join(CLOSE_S)

    def next_id(self) -> str:
        """An id that no other request of any gateway has."""
        return f"{self._boot}{next(self._numbers):06x}"

    async def drained(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        except TimeoutError:
            return False
        return True

    async def wait_idle(self) -> None:
        """Waits until no request is in flight."""
        await self._idle.wait()

    # Generation

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.CHAT)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.COMPLETIONS)

    async def _generate(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        try:
            self._admit()
            with ExitStack() as place:
                place.enter_context(self._in_flight())
                request = await self._receive(http, endpoint)
                # The work is a task of its own: a client that hangs up in the middle ends it, one that has its whole
                # answer does not keep the accounts from being closed.
                work = self._work.start(self._serve(http, request))
                work.add_done_callback(_closing(place.pop_all()))
        except ApiError as error:
            self.metrics.rejected(error.code or "invalid", error.status)
            raise
        self._serving[request.leg_id] = (request, work)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not request.is_answered:
                work.cancel()
            raise
        finally:
            del self._serving[request.leg_id]

    def end_stalled(self, now: float) -> None:
        """Ends streams whose client has stopped reading: they hold a place on a decode node."""
        for request, work in self._serving.values():
            since = request.writing_since
            if since is not None and now - since > self.config.timeouts.client_stall_s:
                request.stream_error = "client stalled"
                work.cancel()

    def _admit(self) -> None:
        if self.is_draining:
            raise Unavailable("The gateway is shutting down.", "draining")
        if self.in_flight >= self.config.max_in_flight:
            raise Overloaded(self.config.max_in_flight)

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        self.in_flight += 1
        self.metrics.in_flight.inc()
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.dec()
            if not self.in_flight:
                self._idle.set()

    async def _receive(self, http: web.Request, endpoint: Endpoint) -> Request:
        arrived = self.clock()
        if http.content_type not in (JSON, "application/octet-stream"):  # the second: no header at all
            raise ApiError(415, f"Content-Type must be {JSON}, not {http.content_type}.", code="unsupported_media_type")
        try:
            async with asyncio.timeout(self.config.timeouts.body_s):
                body = await http.read()
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="request_timeout") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(
                413, f"The body is larger than {self.config.max_body_bytes} bytes.", code="request_too_large"
            ) from error
        request_id = http[REQUEST_ID]
        return Request(
            id=request_id,
            leg_id=f"{request_id}-{self.next_id()}",
            call=parse(endpoint, body),
            timeline=Timeline(arrived),
            trace_headers={name: http.headers[name] for name in TRACE_HEADERS if name in http.headers},
        )

    async def _serve(self, http: web.Request, request: Request) -> web.StreamResponse:
        status, error, code = 500, "internal error", "internal_error"
        try:
            async with self.dispatcher.serve(request) as answer:
                response = await self._relay(http, request, answer)
                status, error = answer.status, ""
            return response
        except ApiError as failure:
            status, error, code = failure.status, failure.message, failure.code or "invalid"
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            status, error, code = CLIENT_CLOSED, "client disconnected", "client_closed"
            raise
        finally:
            self.records.add(request, status, request.stream_error or error)
            self.metrics.finished(request, status, code)

    async def _relay(self, http: web.Request, request: Request, answer: Answer) -> web.StreamResponse:
        headers = {"x-request-id": request.id, "Content-Type": answer.content_type, **answer.headers}
        if answer.read is None:
            request.completion_tokens = completion_tokens(answer.body)
            response = web.Response(status=answer.status, body=answer.body, headers=headers)
            await response.prepare(http)
            await response.write_eof()
            request.timeline.last_token = self.clock()
            return response
        headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        stream = web.StreamResponse(status=answer.status, headers=headers)
        await stream.prepare(http)
        try:
            while chunk := await answer.read():
                request.events += chunk.count(EVENT_END)
                request.writing_since = self.clock()
                await stream.write(chunk)
                request.writing_since = None
        except DecodeFailed as error:
            request.stream_error = str(error)
            await stream.write(_error_event(error))
        await stream.write_eof()
        request.timeline.last_token = self.clock()
        return stream

    # Everything else

    async def models(self, http: web.Request) -> web.Response:
        served = self.clusters.served
        data = [self._model(served.name, served.max_model_len)] if served else []
        return _json({"object": "list", "data": data})

    async def model(self, http: web.Request) -> web.Response:
        served, name = self.clusters.served, http.match_info["name"]
        if served is None or name not in (served.name, served.model_id):
            raise ApiError(404, f"The model '{name}' does not exist.", param="model", code="model_not_found")
        return _json(self._model(served.name, served.max_model_len))

    def _model(self, name: str, max_model_len: int) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "prfaas",
            "max_model_len": max_model_len,
        }

    async def alive(self, http: web.Request) -> web.Response:
        """Whether this process answers."""
        return _json({"status": "ok"})

    async def ready(self, http: web.Request) -> web.Response:
        """Whether a request would be served: health that says up while every chat fails helps nobody."""
        if self.is_draining:
            raise Unavailable("The gateway is shutting down.", "draining")
        if not self.clusters.is_ready:
            raise Unavailable("No decode node is ready.", "no_decode_node")
        states = {node.id: node.state for node in self.clusters.nodes}
        return _json({"status": "ok", "nodes_ready": list(states.values()).count("ready"), "nodes": states})

    async def prometheus(self, http: web.Request) -> web.Response:
        self._observe_nodes()
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    def _observe_nodes(self) -> None:
        self.metrics.nodes.clear()
        self.metrics.egress.clear()
        for node in self.clusters.nodes:
            cluster = node.info.cluster if node.info else "unknown"
            self.metrics.nodes.labels(cluster, node.role, node.state).inc()
            self.metrics.egress.labels(cluster, node.id).set(node.load.egress_bytes_total)

    async def requests(self, http: web.Request) -> web.Response:
        """Finished requests as JSON lines: those after `?since=SEQ`, those with `?id=ID`."""
        since, wanted = http.query.get("since", "0"), http.query.get("id")
        if not since.isdecimal():
            raise BadRequest("since must be the seq of a record.", param="since", code="invalid_value")
        records = [record for record in self.records.since(int(since)) if wanted in (None, record.id)]
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        return web.Response(body=lines, headers={"Content-Type": "application/jsonl"})


def _closing(held: ExitStack) -> Callable[[object], None]:
    return lambda _: held.close()


def build_app(door: FrontDoor) -> web.Application:
    """The API application."""

    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _framed(door, request, handler)

    app = web.Application(middlewares=[frame], client_max_size=door.config.max_body_bytes)
    app.router.add_post(Endpoint.CHAT, door.chat)
    app.router.add_post(Endpoint.COMPLETIONS, door.completions)
    app.router.add_get("/v1/models", door.models)
    app.router.add_get("/v1/models/{name:.+}", door.model)
    for path in ("/livez", "/liveness", "/ping"):
        app.router.add_get(path, door.alive)
    for path in ("/health", "/healthz", "/readyz", "/readiness"):
        app.router.add_get(path, door.ready)
    app.router.add_get("/metrics", door.prometheus)
    app.router.add_get("/prfaas/requests", door.requests)
    return app


def build_metrics_app(door: FrontDoor) -> web.Application:
    """/metrics alone, for a port that clients do not reach."""
    app = web.Application()
    app.router.add_get("/metrics", door.prometheus)
    return app


async def _framed(door: FrontDoor, http: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every request its id, and every failure OpenAI's shape."""
    http[REQUEST_ID] = request_id_or(http.headers.get("x-request-id"), f"req-{door.next_id()}")
    try:
        response = await handler(http)
    except ApiError as error:
        response = _error_response(error)
    except web.HTTPException as error:
        response = _error_response(_from_http(http, error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except ConnectionResetError as error:
        # aiohttp takes a cancellation, and nothing else, for a client that has left; the rest it logs as failures.
        raise asyncio.CancelledError from error
    except Exception:
        log.exception("id=%s failed in a way nobody thought of", http[REQUEST_ID])
        response = _error_response(ApiError(500, "Internal error.", type="server_error", code="internal_error"))
    if not response.prepared:
        response.headers["x-request-id"] = http[REQUEST_ID]
    return response


def _from_http(http: web.Request, error: web.HTTPException) -> ApiError:
    match error.status:
        case 404:
            return ApiError(404, f"Unknown URL: {http.method} {http.path}", code="unknown_url")
        case 405:
            return ApiError(405, f"{http.method} is not allowed for {http.path}.", code="method_not_allowed")
        case _:
            return ApiError(error.status, error.reason, code=error.reason.lower().replace(" ", "_"))


def _error_response(error: ApiError) -> web.Response:
    headers = {"Content-Type": JSON}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status in (429, 503) and error.code:
        headers["x-prfaas-rejected"] = error.code
    return web.Response(status=error.status, body=error.body(), headers=headers)


def _error_event(error: DecodeFailed) -> bytes:
    failure = ApiError(502, f"The decode node failed: {error.reason}.", type="server_error", code=error.reason)
    return b"data: " + failure.body() + EVENT_END


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": JSON})
