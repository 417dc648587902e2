"""The service's HTTP face, whether it leads or follows.

    GET  /plan?term=T&after=V&leader=L&wait_s=S   the plan in force as soon as it is another one than T, V of L (any leader's
                                         without an L); 204: it still is that one
    GET  /status, /history?limit=N, /health
    GET  /scale                          how many nodes each site should have; 503: no look of late says it
    POST /apply {"version": V}, /rollback, /pause, /resume     with a JSON body that may name the caller: {"by": "ann"}

A POST must be of type application/json: no page in a browser can send that here unasked. Over mutual TLS the caller's
certificate must have the right to read, or to change (`transport.peers.rights`).
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import msgspec
from aiohttp import web

from planner.decisions.plans.live_plan import LivePlan
from planner.errors import ChangeRefused, NothingSeen
from planner.service.status import Status
from planner.solve.control.ledger import Ledger, LedgerEntry
from planner.solve.control.wishes import ScaleWishes
from transport.path.guarded_port import GuardedPort
from transport.peers.guard import Guard
from transport.peers.name import of_der
from transport.peers.rights import CHANGE_PLAN, READ_PLAN

JSON: Final = "application/json"
READING: Final = ("GET", "HEAD")
MAX_BODY_BYTES: Final = 4096
MAX_WAITING: Final = 1024  # questions held open at once
MAX_WAIT_S: Final = 60.0
MAX_ENTRIES: Final = 1000
MAX_HISTORIES: Final = 4  # asked at once: each takes a thread, and waits for the disk or for etcd

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ChangeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a change."""

    by: str = ""
    version: int | None = None


class PlanDesk(Protocol):
    """What answers for the plans: the keeper of a service that leads, or one that follows.

    Changes raise ChangeRefused, `wishes` NothingSeen.
    """

    @property
    def ledger(self) -> Ledger: ...

    def status(self) -> Status: ...

    def wishes(self) -> ScaleWishes: ...

    async def next_plan(self, place: tuple[int, int], wait_s: float, leader: str | None = None) -> LivePlan | None: ...

    async def history(self, limit: int) -> list[LedgerEntry]: ...

    async def apply(self, by: str, version: int | None = None) -> None: ...

    async def roll_back(self, by: str) -> None: ...

    async def pause(self, by: str) -> None: ...

    async def resume(self, by: str) -> None: ...


class PlanEndpoints:
    """Answers for the desk of the moment.

    `token` is asked for unless it is empty, and the right of a caller's certificate of `peers`. Plans are for `model`.
    `port` hears of sites whose callers have shown one of these, and says how many connections it has ended.
    """

    def __init__(
        self,
        desk: Callable[[], PlanDesk],
        token: str,
        peers: Guard | None = None,
        model: str = "",
        port: GuardedPort | None = None,
    ) -> None:
        self._port = port
        self._model = model
        self._desk = desk
        self._token = token
        self._peers = peers
        self._waiting = 0
        self._histories = 0

    def app(self) -> web.Application:
        @web.middleware
        async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._framed(request, handler)

        app = web.Application(middlewares=[frame], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(_unnamed)
        app.router.add_get("/plan", self._plan)
        app.router.add_get("/status", self._status)
        app.router.add_get("/scale", self._scale)
        app.router.add_get("/history", self._history)
        app.router.add_get("/health", self._health)
        changes = {"apply": self._apply, "rollback": self._roll_back, "pause": self._pause, "resume": self._resume}
        for name, change in changes.items():
            app.router.add_post(f"/{name}", self._changing(change))
        return app

    async def _framed(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if why := self._refusal(http):
            return _error(403, why)
        if self._token and http.path != "/health" and not self._knows_token(http):
            return _error(401, "the secret of token_file is missing or wrong")
        if self._port is not None and (self._peers is not None or (self._token and http.path != "/health")):
            self._port.knows(http.remote or "")
        try:
            return await handler(http)
        except ChangeRefused as error:
            return _error(409, str(error))
        except NothingSeen as error:
            return _error(503, str(error))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _error(400, str(error))
        except OSError as error:
            return _error(507, f"nothing has changed, as it could not be written down: {error}")

    def _refusal(self, http: web.Request) -> str:
        """Why the certificate of the caller gives no right to this; "": it does, or none is asked for."""
        if self._peers is None:
            return ""
        if http.transport is None:
            return "the connection is closed: its certificate cannot be seen"
        shown = http.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        operation = READ_PLAN if http.method in READING else CHANGE_PLAN
        return self._peers.refusal(operation, of_der(shown), http.remote or "")

    def _knows_token(self, http: web.Request) -> bool:
        shown = http.headers.get("Authorization", "")
        return hmac.compare_digest(shown.encode(errors="surrogateescape"), f"Bearer {self._token}".encode())

    async def _plan(self, http: web.Request) -> web.Response:
        place = (_number(http, "term", 0), _number(http, "after", 0))
        wait_s = float(http.query.get("wait_s", "0"))
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise ValueError(f"wait_s={wait_s}: must be 0 to {MAX_WAIT_S:g}")
        if self._waiting >= MAX_WAITING:
            return _error(503, f"{MAX_WAITING} others wait already")
        self._waiting += 1
        try:
            plan = await self._desk().next_plan(place, wait_s, http.query.get("leader"))
        finally:
            self._waiting -= 1
        return web.Response(status=204) if plan is None else _json(msgspec.structs.replace(plan, model=self._model))

    async def _status(self, http: web.Request) -> web.Response:
        return self._standing()

    async def _scale(self, http: web.Request) -> web.Response:
        return _json(msgspec.structs.replace(self._desk().wishes(), model=self._model))

    def _standing(self) -> web.Response:
        ended = {} if self._port is None else dict(self._port.ended)
        return _json(msgspec.structs.replace(self._desk().status(), turned_away=ended))

    async def _history(self, http: web.Request) -> web.Response:
        limit = min(_number(http, "limit", 20), MAX_ENTRIES)
        if self._histories >= MAX_HISTORIES:
            return _error(503, f"{MAX_HISTORIES} others read the log already")
        self._histories += 1
        try:
            return _json(await self._desk().history(limit))
        finally:
            self._histories -= 1

    async def _health(self, http: web.Request) -> web.Response:
        ledger = self._desk().ledger
        return _json({"status": "ok", "term": ledger.term, "leader": ledger.leader})

    def _changing(self, change: Callable[[ChangeBody], Awaitable[None]]) -> Handler:
        async def answer(http: web.Request) -> web.Response:
            if http.content_type != JSON:
                return _error(415, f"the body must be {JSON}")
            await change(msgspec.json.decode(await http.read() or b"{}", type=ChangeBody))
            return self._standing()

        return answer

    async def _apply(self, asked: ChangeBody) -> None:
        await self._desk().apply(_who(asked), asked.version)

    async def _roll_back(self, asked: ChangeBody) -> None:
        await self._desk().roll_back(_who(asked))

    async def _pause(self, asked: ChangeBody) -> None:
        await self._desk().pause(_who(asked))

    async def _resume(self, asked: ChangeBody) -> None:
        await self._desk().resume(_who(asked))


def _who(asked: ChangeBody) -> str:
    """The name for the log, which is read on terminals, line by line."""
    return "".join(each if each.isprintable() else "?" for each in asked.by[:80]) or "somebody"


async def _unnamed(_: web.BaseRequest, response: web.StreamResponse) -> None:
    """No answer names the server's software and its version."""
    response.headers.pop("Server", None)


def _number(http: web.Request, name: str, default: int) -> int:
    value = int(http.query.get(name, str(default)))
    if value < 0:
        raise ValueError(f"{name}={value}: must not be negative")
    return value


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=JSON)


def _error(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)
