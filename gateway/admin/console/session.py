"""An operator's browser logs in and out: `POST /prfaas/session` with a key, `DELETE /prfaas/session`, `GET` says who it is.

The key, or the token of an identity provider, is shown once. From then on the browser has a cookie that no script can read
and no other site can have sent.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from gateway.auth.keyring import digest_of, operator_key_in
from gateway.auth.operator import Operator
from gateway.auth.sessions import COOKIE, OperatorSessions
from gateway.errors import BadRequest, Unavailable
from gateway.server.guards import OPERATOR

log = logging.getLogger("prfaas.gateway.sessions")

HEADERS = {"Content-Type": "application/json", "Cache-Control": "no-store"}


class SessionPages:
    """Begins and ends sessions. `check_is_meant` raises ApiError for what a page of another site has a browser ask."""

    def __init__(self, sessions: OperatorSessions, check_is_meant: Callable[[web.Request], None]) -> None:
        self._sessions = sessions
        self._check_is_meant = check_is_meant

    async def who(self, http: web.Request) -> web.Response:
        """Names the operator whose session this is."""
        return _told(http[OPERATOR])

    async def begin(self, http: web.Request) -> web.Response:
        """A cookie for the key or the token that is shown."""
        self._check_is_meant(http)
        key = operator_key_in(http.headers)
        if not key:
            raise BadRequest("A session needs a key: `Authorization: Bearer KEY`.", code="missing_api_key")
        try:
            operator = http[OPERATOR] if http[OPERATOR].issuer else None
            token = self._sessions.begin(digest_of(key), datetime.now(UTC).timestamp(), operator)
        except OSError as error:
            log.error("a session cannot be started: %s", error)
            raise Unavailable("The session cannot be started.", "no_session") from error
        answer = _told(http[OPERATOR])
        _set_cookie(answer, http, token, int(self._sessions.length_s))
        return answer

    async def end(self, http: web.Request) -> web.Response:
        """The session of the cookie is over."""
        self._check_is_meant(http)
        self._sessions.end(http.headers)
        answer = web.Response(status=204, headers={"Cache-Control": "no-store"})
        _set_cookie(answer, http, "", 0)
        return answer


def _set_cookie(answer: web.Response, http: web.Request, token: str, max_age_s: int) -> None:
    # Behind a proxy that ends TLS, what the page's origin says is all that is known of it.
    is_secure = http.secure or http.headers.get("Origin", "").startswith("https://")
    answer.set_cookie(
        COOKIE, token, max_age=max_age_s, path="/", httponly=True, samesite="Strict", secure=is_secure or None
    )


def _told(operator: Operator) -> web.Response:
    return web.Response(body=msgspec.json.encode({"name": operator.name, "role": operator.role}), headers=HEADERS)
