"""The port of picked requests: OpenAI's routes for a proxy, and legs for other nodes.

proxy, peer ── HTTP/1.1, or mutual TLS by a TlsFront ── rights ── PickedRequests ── the engine, streamed back
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from node.agent import NodeAgent
from node.config import PICKED
from node.control.call_server import Called
from node.errors import BadPickedRequest, UnansweredCall
from node.picked.bodies import CHAT, COMPLETIONS, NOT_JSON, read_body
from node.picked.engine_calls import EngineCalls
from node.picked.handover import PickedRequest, PickedRequests, tenant_of
from node.picked.held_bodies import HeldBodies, HeldBody
from node.picked.legs import LEG_PATH, PLACE_PATH, PrefillAsked
from node.picked.peer_calls import PeerCalls
from node.process.ports import ListenPort
from node.process.tls_front import LOOPBACK, PeerCertificate, TlsFront
from transport.control.proto import node_pb2 as pb
from transport.path.tcp import format_address
from transport.peers.guard import Guard
from transport.peers.name import of_tls
from transport.peers.rights import ASK_LEG, ASK_PICKED, CALL_PICKED, SERVE
from transport.wire.asked_servers import AskedNodes

log = logging.getLogger(__name__)

PREFILLER: Final = "x-prefiller-host-port"
FAIRNESS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
REQUEST_ID: Final = "x-request-id"
MAX_REQUESTS: Final = 4096
BODY_S: Final = 60.0
STALLED_S: Final = 120.0  # a client that reads nothing of its answer for so long has left
RETRY_AFTER_S: Final = 1
OF_PEERS: Final = (LEG_PATH, PLACE_PATH)
WORK: Final = (CHAT, COMPLETIONS, LEG_PATH)  # that a node ends before it drains
PASSED_ON: Final = ("content-type", "retry-after", "x-prfaas-answered")
LENGTH: Final = "content-length"  # of what is passed on as it is
_REQUEST_ID: Final = re.compile(r"[\w.:\-]{1,128}")
_ASKED: Final = msgspec.json.Decoder(PrefillAsked)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServerPage = Callable[[], bytes]


class PickedPort:
    """Listens from `start` to `close`; `url` says where."""

    def __init__(self, agent: NodeAgent, called: Called, page: ServerPage) -> None:
        """`page` is what an endpoint picker reads of a server's load."""
        config = agent.config
        self.url = ""
        self._agent = agent
        self._page = page
        self._engine = EngineCalls(lambda: agent.door.engine_url)
        asked = AskedNodes(config.identity, SERVE) if config.identity is not None else None
        self._peers = PeerCalls(config.known_peers(), asked)
        self._requests = PickedRequests(agent, called, self._engine, self._peers)
        self._runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        self._front: TlsFront | None = None
        self._open = 0
        self.held = HeldBodies()

    async def start(self, port: ListenPort) -> int:
        """The port it listens on. Raises OSError, NodeConfigError."""
        await self._runner.setup()
        identity, guard = self._agent.config.identity, self._agent.guard
        if identity is None or guard is None:
            await web.TCPSite(self._runner, port.host, port.number).start()
            bound: int = self._runner.addresses[0][1]
            self.url = f"http://{format_address(port.host, bound)}"
            return bound
        rights: Guard = guard

        def complaint(shown: PeerCertificate) -> str:
            return rights.refusal(CALL_PICKED, of_tls(shown), port.key)

        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        self._front = front = TlsFront(identity, complaint, protocol="http/1.1", whose="picked requests")
        rights.followers.append(front.check_again)
        self._agent.ended[PICKED] = front.ended
        bound = await front.start(port)
        front.open(f"http://{LOOPBACK}:{self._runner.addresses[0][1]}")
        self.url = front.url
        return bound

    async def close(self) -> None:
        """Ends requests and listens no more."""
        if self._front is not None:
            self._front.shut()
            await self._front.close()
        await self._runner.cleanup()
        await self._peers.close()
        await self._engine.close()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._admitted, _told_errors])
        for path in (CHAT, COMPLETIONS):
            app.router.add_post(path, self._picked)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(PLACE_PATH, self._place)
        app.router.add_post(LEG_PATH, self._leg)
        return app

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Only as many as there are places for, and only those that have the right."""
        if why := self._complaint(request):
            return _error(403, "permission_denied", why)
        if self._open >= MAX_REQUESTS:
            return _error(503, "overloaded", f"{MAX_REQUESTS} requests are under way")
        is_work = request.path in WORK
        self._open += 1
        self._agent.picked.under_way += is_work
        try:
            return await handler(request)
        finally:
            self._open -= 1
            self._agent.picked.under_way -= is_work

    def _complaint(self, request: web.Request) -> str:
        """Why its caller may not ask for that; "": it may."""
        guard, front = self._agent.guard, self._front
        if guard is None or front is None:
            return ""
        at = request.transport.get_extra_info("peername") if request.transport is not None else None
        caller = front.caller_at(format_address(*at[:2])) if at else None
        if caller is None or caller.certificate is None:
            return "it has shown no certificate"
        operation = ASK_LEG if request.path in OF_PEERS else ASK_PICKED
        return guard.refusal(operation, of_tls(caller.certificate), caller.address)

    # For a proxy

    async def _picked(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        async with self._body(request) as body:
            asked = PickedRequest(
                id=_request_id(headers.get(REQUEST_ID, "")),
                body=read_body(request.path, body.whole()),
                prefiller=headers.get(PREFILLER, "").strip(),
                tenant=tenant_of(next((headers[name] for name in FAIRNESS if headers.get(name)), "")),
            )
            async with self._requests.answered(asked) as answer:
                body.let_go()
                return await self._passed_on(request, answer.told, answer.chunks(), asked.id, PASSED_ON)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        request_id = _request_id(request.headers.get(REQUEST_ID, ""))
        async with self._engine.answer(request.path, None, request_id) as answer:
            return await self._passed_on(request, answer, answer.content.iter_any(), request_id, (*PASSED_ON, LENGTH))

    async def _passed_on(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        chunks: AsyncIterator[bytes],
        request_id: str,
        names: Sequence[str],
    ) -> web.StreamResponse:
        """What the engine says, as it comes. A client that has begun to read sees an answer that breaks as broken."""
        named = {name: answer.headers[name] for name in names if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers={**named, REQUEST_ID: request_id})
        try:
            await response.prepare(request)
            async for chunk in chunks:
                async with asyncio.timeout(STALLED_S):
                    await response.write(chunk)
            await response.write_eof()
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:  # of the engine's end, or of the client's
            log.info("id=%s its answer broke off: %r", request_id, exc)
            self._agent.picked.requests["broken"] += 1
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _health(self, request: web.Request) -> web.Response:
        is_ready = self._agent.state() == pb.NODE_STATE_READY
        return web.Response(status=200 if is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        """A node that takes no requests says nothing of its load, so that pickers leave it out."""
        if self._agent.state() != pb.NODE_STATE_READY:
            return web.Response(status=503)
        return web.Response(body=self._page(), headers={"content-type": "text/plain; version=0.0.4"})

    # For other nodes

    async def _place(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode(self._requests.place()))

    async def _leg(self, request: web.Request) -> web.Response:
        async with self._body(request) as body:
            try:
                asked = _ASKED.decode(body.whole())
            except NOT_JSON as exc:
                raise BadPickedRequest(f"no leg: {exc}", code="bad_leg") from exc
            return _json(msgspec.json.encode(await self._requests.run_leg(asked)))

    @asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncIterator[HeldBody]:
        """The body, which counts as held inside the block, or until it is let go. Raises BadPickedRequest."""
        body = HeldBody(self.held)
        try:
            await self._read(request, body)
            yield body
        finally:
            body.let_go()

    async def _read(self, request: web.Request, body: HeldBody) -> None:
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.content.iter_any():
                    body.add(chunk)
        except TimeoutError:
            what = f"the body was not whole after {BODY_S:g} s"
            raise BadPickedRequest(what, code="body_timeout", status=408) from None


@web.middleware
async def _told_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape."""
    try:
        return await handler(request)
    except BadPickedRequest as exc:
        return _error(exc.status, exc.code, str(exc), exc.param)
    except UnansweredCall as exc:
        return _error(503, exc.label, "the engine does not answer")


def _request_id(given: str) -> str:
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _error(status: int, code: str, message: str, param: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    response = _json(msgspec.json.encode(told), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
