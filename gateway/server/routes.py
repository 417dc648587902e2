"""The HTTP applications: routes, and the frame around every request."""

import asyncio
import logging

from aiohttp import web

from gateway.api.dialects.translation import error_told
from gateway.api.openai import request_id_or
from gateway.auth.keyring import EVERYBODY
from gateway.auth.rights import right_of
from gateway.errors import ApiError, InternalError, Unauthorised
from gateway.http.body import check_head
from gateway.http.connections import CONTINUE, ClientConnection, error_response, http_error_response
from gateway.routing.router import tie_of
from gateway.server import openapi
from gateway.server.app import REQUEST_ID, GenerationEndpoint, Handler
from gateway.server.handlers.operators import OperatorEndpoints, Page
from gateway.server.handlers.tokens import TokenEndpoints

log = logging.getLogger("prfaas.gateway.http")


def build_app(door: GenerationEndpoint, pages: OperatorEndpoints, desk: TokenEndpoints) -> web.Application:
    """The API application."""

    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _framed(door, request, handler)

    async def expected(http: web.Request) -> web.StreamResponse | None:
        return _continue_or_refuse(door, http)

    app = web.Application(middlewares=[frame], client_max_size=door.config.max_body_bytes)
    for endpoint, handler in door.ways().items():
        app.router.add_post(endpoint, handler, expect_handler=expected)
    app.router.add_get(openapi.PATH, desk.document)
    for path, answer in desk.ways().items():
        app.router.add_post(path, answer, expect_handler=expected)
    listed, ended = door.contexts.pages(lambda http: door.keyring.tenant(http.headers))
    app.router.add_get(openapi.CONTEXTS, listed)
    app.router.add_delete(f"{openapi.CONTEXTS}/{{context_id}}", ended)
    _add(app, pages.for_clients() | pages.health())
    if not door.config.metrics_port:
        _add_operators(app, door, pages)
    return app


def straight_ways(door: GenerationEndpoint) -> dict[str, Handler]:
    """What handles a POST to such a path, spelled exactly so, without the application's routing and middlewares."""

    def straight(handler: Handler) -> Handler:
        async def way(http: web.Request) -> web.StreamResponse:
            return await _framed(door, http, handler)

        return way

    return {endpoint.value: straight(handler) for endpoint, handler in door.ways().items()}


def build_operators_app(door: GenerationEndpoint, pages: OperatorEndpoints) -> web.Application:
    """/metrics and records, for a port that clients do not reach."""

    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _framed(door, request, handler)

    app = web.Application(middlewares=[frame])
    _add(app, pages.health())
    _add_operators(app, door, pages)
    return app


def _add_operators(app: web.Application, door: GenerationEndpoint, pages: OperatorEndpoints) -> None:
    for (method, path), page in pages.by_operators().items():
        app.router.add_route(method, path, door.operators.guarded(right_of(method, path), page))


def _add(app: web.Application, pages: dict[str, Page]) -> None:
    for path, page in pages.items():
        app.router.add_get(path, page)


def _continue_or_refuse(door: GenerationEndpoint, http: web.Request) -> web.StreamResponse | None:
    """What `Expect` gets: `100 Continue`, unless the body is refused before it comes."""
    if http.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed
    tenant = EVERYBODY
    try:
        door.guard.checked(http)
        tenant = door.keyring.tenant(http.headers)
        door.rooms.admission.check(tenant.share)
        check_head(http, door.config.max_body_bytes)
    except ApiError as error:
        door.rooms.accounts.turned_away(error, tenant)
        _begin(http)
        return error_response(error, body=error_told(http.path, error))
    assert http.transport is not None
    http.transport.write(CONTINUE)
    return None


async def _framed(door: GenerationEndpoint, http: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every request its id, and every failure OpenAI's shape."""
    http[REQUEST_ID] = request_id_or(http.headers.get("x-request-id"), f"req-{door.next_id()}")
    try:
        door.check_host(http)
        await door.guard.admit(http)
        response = await handler(http)
    except ApiError as error:
        if isinstance(error, Unauthorised):
            door.guard.refused(http)
        response = error_response(error, tie_of(http[REQUEST_ID]), error_told(http.path, error))
    except web.HTTPException as error:
        response = http_error_response(http, error)
    except ConnectionResetError as error:
        # aiohttp takes a cancellation, and nothing else, for a client that has left; the rest it logs as failures.
        raise asyncio.CancelledError from error
    except Exception:
        log.exception("id=%s failed in an unforeseen way", http[REQUEST_ID])
        door.metrics.upkeep.unforeseen("http")
        response = error_response(InternalError())
    if not response.prepared:
        response.headers["x-request-id"] = http[REQUEST_ID]
        _begin(http)
    return response


def _begin(http: web.Request) -> None:
    """An answer of the server's own is about to be written."""
    assert isinstance(http.protocol, ClientConnection)
    http.protocol.has_begun = True
