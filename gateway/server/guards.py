"""The two checks at the door: addresses that guess keys are held off, and operators do only what their role allows."""

import asyncio
from collections.abc import Callable
from typing import Final

from aiohttp import web

from gateway.auth.keyring import Keyring, KeyStanding
from gateway.auth.oidc import TokenRefused
from gateway.auth.operator import Operator
from gateway.auth.rights import Right
from gateway.auth.wrong_keys import WrongKeys
from gateway.config.gateway import Strangers
from gateway.errors import ApiError, Forbidden, Overloaded, Unauthorised
from gateway.http.connections import ClientConnection
from gateway.server.audit_log import AuditLog, Deed
from gateway.server.handlers.operators import Page

MAX_DELAYED: Final = 64  # answers that wait at once; each holds a connection
FORWARDED: Final = "X-Forwarded-For"
NOTED: Final = web.RequestKey("noted", bool)
OPERATOR: Final = web.RequestKey("operator", Operator)
DEED: Final = web.RequestKey("deed", Deed)  # what a handler found that it was asked to do


def address_of(http: web.BaseRequest, strangers: Strangers) -> str:
    """Where a request comes from: what a proxy says that is trusted, else the other end of the connection."""
    connection = http.protocol
    address = connection.address if isinstance(connection, ClientConnection) else ""
    if address in strangers.trusted_proxies:
        for hop in reversed(",".join(http.headers.getall(FORWARDED, [])).split(",")):
            if (named := hop.strip()[:64]) and named not in strangers.trusted_proxies:
                return named
    return address


class KeyGuard:
    """Counts wrong keys by address, and holds off those that show many. `count` hears what was done."""

    def __init__(
        self,
        keyring: Keyring,
        wrong: WrongKeys,
        strangers: Strangers,
        audit: AuditLog,
        count: Callable[[str], None],
    ) -> None:
        self._keyring = keyring
        self._wrong = wrong
        self._strangers = strangers
        self._audit = audit
        self._count = count
        self._delayed = 0

    async def admit(self, http: web.Request) -> None:
        """Returns at once; for a guess, after a delay. Raises Overloaded where an address has guessed much."""
        if not (delay_s := self.checked(http)):
            return
        if self._delayed >= MAX_DELAYED:
            raise _held_off(delay_s)
        self._count("delayed")
        self._delayed += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._delayed -= 1

    def checked(self, http: web.Request) -> float:
        """How long the answer should wait. Raises Overloaded."""
        address = address_of(http, self._strangers)
        if self._wrong.is_good(address) or not _shows_a_key(http):
            return 0.0
        is_trusted = self._strangers.trusts(address)
        if not is_trusted and (left_s := self._wrong.refused_s(address)):
            self._count("held_off")
            raise _held_off(left_s)
        match self._keyring.standing(http.headers):
            case KeyStanding.RIGHT if not is_trusted:
                self._wrong.right(address)
            case KeyStanding.WRONG:
                self._note(http, address)
                return 0.0 if is_trusted else self._wrong.wrong(address)
        return 0.0

    def refused(self, http: web.Request) -> None:
        """A request was answered with 401. The wrong key of an address that has shown right ones counts, too.

        A token that does not hold counts, and holds nothing off: its signature cannot be guessed.
        """
        if NOTED in http:
            return
        if self._keyring.shows_wrong(http.headers):
            self._note(http, address_of(http, self._strangers))
        elif reason := self._keyring.token_refusal(http.headers):
            self._count("token")
            deed = Deed("show a token", http.path)
            self._audit.refused(None, deed, address_of(http, self._strangers), 401, reason)

    def _note(self, http: web.Request, address: str) -> None:
        http[NOTED] = True
        self._count("wrong")
        self._audit.refused(None, Deed("show a key", http.path), address, 401, "wrong_key")


def _held_off(retry_after_s: float) -> Overloaded:
    return Overloaded(
        "Too many wrong keys came from this address.", "too_many_wrong_keys", retry_after_s=max(1.0, retry_after_s)
    )


def _shows_a_key(http: web.Request) -> bool:
    return "Authorization" in http.headers or "x-api-key" in http.headers


class OperatorGuard:
    """Lets operators use the pages of their role, and writes down what they change and what they may not."""

    def __init__(self, keyring: Keyring, strangers: Strangers, audit: AuditLog) -> None:
        self._keyring = keyring
        self._strangers = strangers
        self._audit = audit

    def guarded(self, right: Right, page: Page) -> Page:
        """`page` for those who have this right."""

        async def looked_at(http: web.Request) -> web.StreamResponse:
            self._check(http, right)
            return await page(http)

        async def done(http: web.Request) -> web.StreamResponse:
            operator = self._check(http, right)
            status, code = 500, "internal_error"
            try:
                answer = await page(http)
                status, code = answer.status, ""
                return answer
            except asyncio.CancelledError:
                status, code = 499, "client_left"
                raise
            except ApiError as error:
                status, code = error.status, error.code or ""
                raise
            finally:
                deed = http.get(DEED) or Deed(right.action)
                self._audit.done(operator, deed, address_of(http, self._strangers), status, code)

        if right.role is None:
            return page
        return done if right.action else looked_at

    def _check(self, http: web.Request, right: Right) -> Operator:
        assert right.role is not None
        try:
            operator = self._keyring.check_operator(http.headers, right.role, f"{http.method} {http.path}")
        except (Unauthorised, Forbidden) as error:
            self._write_down(http, right, error)
            raise
        http[OPERATOR] = operator
        return operator

    def _write_down(self, http: web.Request, right: Right, error: ApiError) -> None:
        """Writes down a refused change, and a page beyond an operator's role. Pages without a key are asked for often."""
        if isinstance(error, TokenRefused):  # `KeyGuard.refused` writes it down
            return
        known = self._keyring.operator(http.headers) if isinstance(error, Forbidden) else None
        if known is None and not right.action:
            return
        deed = Deed(right.action or "look", f"{http.method} {http.path}")
        self._audit.refused(known, deed, address_of(http, self._strangers), error.status, error.code or "")
