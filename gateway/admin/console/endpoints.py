"""What operators see and do beyond metrics and records: the console, and the questions that it asks."""

from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Final

import msgspec
from aiohttp import web

from gateway.admin.console.link_switch import LinkSwitch
from gateway.admin.console.plan_proxy import PlanProxy
from gateway.admin.console.session import SessionPages
from gateway.admin.console.static import INDEX, LOGIN, File, all_files
from gateway.admin.console_snapshot import ConsoleSnapshots
from gateway.admin.explain import Explanations
from gateway.admin.reload import Reloads
from gateway.auth.keyring import Keyring
from gateway.auth.rights import Route
from gateway.auth.sessions import OperatorSessions
from gateway.errors import ApiError, Unauthorised
from gateway.http.body import BodyReceiver, too_large
from gateway.http.connections import CHALLENGE
from gateway.server.audit_log import Deed
from gateway.server.guards import DEED, OPERATOR
from gateway.server.handlers.operators import News, Page

JSON: Final = "application/json"
MAX_CHANGE_BYTES: Final = 4096


class Console:
    """Its pages, by path."""

    def __init__(
        self,
        *,
        snapshots: ConsoleSnapshots,
        explanations: Explanations,
        desk: PlanProxy,
        switch: LinkSwitch,
        reloads: Reloads,
        receiver: BodyReceiver,
        keyring: Keyring,
        sessions: OperatorSessions,
    ) -> None:
        """Raises OSError when its files are not where they were installed."""
        self._receiver = receiver
        self._keyring = keyring
        self._sessions = SessionPages(sessions, self._check_is_meant)
        self._reloads = reloads
        self._snapshots = snapshots
        self._explanations = explanations
        self._desk = desk
        self._switch = switch
        self._files = all_files()

    def to_get(self, news: News, sequence: Callable[[web.Request, str], int]) -> dict[str, Page]:
        """`news` gives records and flows after a number, which `sequence` reads from the query."""

        async def snapshot(http: web.Request) -> web.Response:
            return _json(await self._snapshots.taken(news, sequence(http, "since")))

        files: dict[str, Page] = {f"/console/{name}": partial(_sent, file) for name, file in self._files.items()}
        return files | {
            "/console": self._index,
            "/prfaas/console": snapshot,
            "/prfaas/plan": self._plan,
            "/prfaas/config": self._config,
            "/prfaas/session": self._sessions.who,
        }

    def to_change(self) -> dict[Route, Page]:
        return {
            ("POST", "/prfaas/explain"): self._explain,
            ("POST", "/prfaas/plan"): self._change_plan,
            ("POST", "/prfaas/links"): self._switch_link,
            ("POST", "/prfaas/config"): self._reload,
            ("POST", "/prfaas/session"): self._sessions.begin,
            ("DELETE", "/prfaas/session"): self._sessions.end,
        }

    async def _index(self, http: web.Request) -> web.Response:
        """The console; for a stranger, a page to log in at."""
        try:
            self._keyring.check_operator(http.headers)
        except Unauthorised:
            answer = self._files[LOGIN].answer(http, status=401)
            answer.headers["WWW-Authenticate"] = CHALLENGE
            return answer
        return self._files[INDEX].answer(http)

    async def _config(self, http: web.Request) -> web.Response:
        """What the file says by now that the gateway does not do."""
        return _json(msgspec.json.encode({"data": self._reloads.pending()}))

    async def _reload(self, http: web.Request) -> web.Response:
        """The same, and what can change has changed."""
        self._check_is_meant(http)
        found = self._reloads.ask()
        http[DEED] = Deed("reload", ", ".join(change.key for change in found))
        return _json(msgspec.json.encode({"data": found}))

    async def _explain(self, http: web.Request) -> web.Response:
        """Where the request in the body would go now, and why."""
        return _json(msgspec.json.encode(await self._explanations.asked(http)))

    async def _plan(self, http: web.Request) -> web.Response:
        return _json(msgspec.json.encode(await self._desk.standing()))

    async def _change_plan(self, http: web.Request) -> web.Response:
        wish = self._desk.wanted(await self._change(http))
        http[DEED] = Deed(f"{wish.change} plan", "" if wish.version is None else f"version {wish.version}")
        return _json(msgspec.json.encode(await self._desk.change(wish, str(http[OPERATOR]))))

    async def _switch_link(self, http: web.Request) -> web.Response:
        wanted = self._switch.wanted(await self._change(http))
        http[DEED] = Deed("drain" if wanted.drained else "undrain", f"{wanted.source}:{wanted.destination}")
        return _json(msgspec.json.encode({"data": self._switch.set(wanted)}))

    async def _change(self, http: web.Request) -> bytes:
        """What an operator wants changed. Raises ApiError."""
        self._check_is_meant(http)
        body = await self._receiver.receive(http)
        if len(body) > MAX_CHANGE_BYTES:
            raise too_large(MAX_CHANGE_BYTES)
        return body

    def _check_is_meant(self, http: web.Request) -> None:
        check_is_meant(http, shows_a_key=self._keyring.is_operator(http.headers))


def check_is_meant(http: web.Request, *, shows_a_key: bool) -> None:
    """Raises ApiError for a change that a page of another site may have a browser ask for.

    Such a page cannot send JSON, unless a name of its own leads here: then the browser says that name, and no operator's key,
    which it keeps by name.
    """
    if http.content_type != JSON:
        raise ApiError(415, f"Content-Type must be {JSON}.", code="unsupported_media_type")
    host = http.host.rpartition(":")[0] if not http.host.endswith("]") and ":" in http.host else http.host
    origin = http.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != http.host:
        raise ApiError(403, "A page of another origin may change nothing here.", code="foreign_origin")
    if origin is not None and not shows_a_key and not _is_own_name(host):
        raise ApiError(
            403,
            f"Without an operator's key, send changes to the gateway's address, not to the name {host!r}: "
            "any site may use that name.",
            code="foreign_host",
        )


def _is_own_name(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


async def _sent(file: File, http: web.Request) -> web.Response:
    return file.answer(http)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": JSON, "Cache-Control": "no-store"})
