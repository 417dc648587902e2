"""The operators' way to the plan service through the gateway: a page in a browser may ask no other server.

GET  /prfaas/plan                                       what the service says of itself, and its last changes
POST /prfaas/plan {"change": "apply", "version": V}     or rollback, pause, resume; its log names "console" and who
"""

import asyncio
from typing import Any, Final, Literal

import aiohttp
import msgspec

from gateway.api.openai import NOT_JSON
from gateway.config.plan import PlanConfig
from gateway.errors import ApiError, BadRequest
from transport.control.bounded import BodyTooLong, read_bounded
from transport.wire.asked_servers import AskedServers, trust_of

TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20
ENTRIES: Final = 20


class PlanChangeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator wants of the plan service; `version` is of the plan to apply, by default the one proposed."""

    change: Literal["apply", "rollback", "pause", "resume"]
    version: int | None = None


class PlanServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """The plan service as it was reached; `status` is `planner.service.status.Status`, `history` entries of its ledger."""

    configured: bool
    url: str = ""
    status: msgspec.Raw | None = None
    history: msgspec.Raw | None = None


_CHANGE: Final = msgspec.json.Decoder(PlanChangeRequest)
_REFUSED: Final = msgspec.json.Decoder(dict[str, str])


class PlanProxy:
    """Asks the plan service that the gateway follows, with the gateway's secret. Raises ApiError for what becomes of that."""

    def __init__(self, config: PlanConfig, servers: AskedServers | None = None) -> None:
        """`servers` knows which certificate a service may have that speaks HTTPS; None: one that this host trusts."""
        self._config = config
        self._servers = servers

    async def standing(self) -> PlanServiceState:
        config = self._config
        if not config.url:
            return PlanServiceState(configured=False)
        async with self._session(config) as http:
            status, history = await asyncio.gather(
                self._asked(http, config, "GET", "/status"),
                self._asked(http, config, "GET", f"/history?limit={ENTRIES}"),
            )
        return PlanServiceState(
            configured=True, url=config.url, status=msgspec.Raw(status), history=msgspec.Raw(history)
        )

    def wanted(self, body: bytes) -> PlanChangeRequest:
        """What `body` asks for. Raises BadRequest."""
        try:
            return _CHANGE.decode(body)
        except NOT_JSON as error:
            raise BadRequest(f"The body does not change a plan: {error}", code="invalid_value") from error

    async def change(self, wish: PlanChangeRequest, operator: str = "") -> msgspec.Raw:
        """The service's status after the change, which its log says that `operator` made."""
        config = self._config
        if not config.url:
            raise ApiError(
                409, "This gateway follows no plan service: its file has no [gateway.plan].", code="no_plan_service"
            )
        asked: dict[str, Any] = {"by": f"console: {operator}" if operator else "console"}
        if wish.version is not None:
            asked["version"] = wish.version
        async with self._session(config) as http:
            return msgspec.Raw(await self._asked(http, config, "POST", f"/{wish.change}", asked))

    def _session(self, config: PlanConfig) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers=config.headers())

    async def _asked(
        self, http: aiohttp.ClientSession, config: PlanConfig, method: str, path: str, body: Any = None
    ) -> bytes:
        url = f"{config.url.rstrip('/')}{path}"
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                http.request(method, url, json=body, allow_redirects=False, ssl=trust_of(self._servers, url)) as answer,
            ):
                found = bytes(await read_bounded(answer.content.iter_any(), MAX_ANSWER_BYTES))
                if answer.status != 200:
                    raise ApiError(
                        409 if answer.status == 409 else 502, _said(found, answer.status), code="plan_service"
                    )
                return found
        except TimeoutError as error:
            raise ApiError(504, "The plan service does not answer in time.", code="plan_service") from error
        except (aiohttp.ClientError, BodyTooLong, OSError) as error:
            message = f"The plan service cannot be asked: {error or type(error).__name__}"
            raise ApiError(502, message, code="plan_service") from error


def _said(answer: bytes, status: int) -> str:
    try:
        return _REFUSED.decode(answer)["error"]
    except (KeyError, *NOT_JSON):
        return f"The plan service answers with status {status}."
