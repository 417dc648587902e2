"""Requests being answered, and those that the gateway must cut off: a client that does not read; all, when it stops."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from gateway.api.openai import Endpoint
from gateway.auth.keyring import Tenant
from gateway.models.served import ModelParts
from gateway.ratelimit.limiter import UNLIMITED, TenantLimiter
from gateway.request.request import BrokenOff, Request
from gateway.telemetry.recorder import CLIENT_CLOSED

STALLED: Final = BrokenOff("client_stalled", "client stalled", CLIENT_CLOSED)
SHUT_DOWN: Final = BrokenOff("shutdown", "the gateway was shut down", 503)


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A body that has been given a place; `requests` once it has been read: one for each answer."""

    http: web.Request
    endpoint: Endpoint
    body: bytes
    arrived: float
    tenant: Tenant
    allowance: TenantLimiter = UNLIMITED
    parts: ModelParts | None = None  # what serves the model that it is for, once that is known
    requests: list[Request] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return bool(self.requests) and all(request.is_answered for request in self.requests)

    def breaks_off(self, why: BrokenOff) -> None:
        """Those of its answers that are not over end here."""
        for request in self.requests:
            if not request.is_answered:
                request.stream.break_off(why)


class InflightRequests:
    """The visits under way, with the tasks that answer them."""

    def __init__(self) -> None:
        self._works: dict[InflightRequest, asyncio.Task[web.StreamResponse]] = {}

    async def until_answered(
        self, visit: InflightRequest, work: "asyncio.Task[web.StreamResponse]"
    ) -> web.StreamResponse:
        """The answer that `work` comes to. It ends with a client that hangs up in the middle."""
        self._works[visit] = work
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not visit.is_answered:
                work.cancel()
            raise
        finally:
            del self._works[visit]
            del work  # an error knows this frame and the task that error: together they would keep the body

    def end_stalled(self, now: float, stall_s: float) -> None:
        """Ends answers whose client has not read for `stall_s`: they hold a place on a decode node."""
        for visit, work in self._works.items():
            offered = [request.stream.writing_since for request in visit.requests]
            if any(since is not None and now - since > stall_s for since in offered):
                visit.breaks_off(STALLED)
                work.cancel()

    def end_all(self) -> None:
        """Ends what is not over: the gateway does not live to see its end, and no client is to blame for that."""
        for visit, work in self._works.items():
            if not visit.is_answered:
                visit.breaks_off(SHUT_DOWN)
                work.cancel()
