"""The steps of one request, in order; each step's result is the next one's input.

    receive   the body, at a minimum rate and within bounds                             gateway.http.body
    admit     a place among those being served                                          gateway.admission.concurrency
    read      the body's call, and tokens, block hashes and digest of its prompt        gateway.prompt.reader
    decide    local or remote, and which nodes, by what is known now                    gateway.routing.router
              whether its class would be served as promised                             gateway.admission.slo
    reserve   the decode node makes room and hands out a ticket                         gateway.pipeline.reservations
    run       both legs at once                                                         gateway.pipeline.ticketed
              for SGLang's pairs, without a reservation                                 gateway.pipeline.sglang_pair
    relay     the decode node's bytes, unchanged but for the number of cached tokens    gateway.pipeline.relay
    settle    what it held is freed                                                     gateway.pipeline.settlement

`gateway.server.app` takes a body through the first three; `Pipeline.answer` takes the request through the others.
Decide, reserve and run are done anew when nodes fail: `gateway.pipeline.dispatcher`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.api.usage import Details
from gateway.errors import ApiError, InternalError
from gateway.http.body import BodyReceiver
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.engine_render import EngineReadings
from gateway.pipeline.fanout import AnswerListener
from gateway.pipeline.relay import Relay
from gateway.pipeline.settlement import settle
from gateway.prompt.reader import PromptReader
from gateway.request.request import BrokenOff, Request
from gateway.tasks import TaskSet
from gateway.telemetry.recorder import CLIENT_CLOSED, CLIENT_LEFT, RequestRecorder

Keep = Callable[[Request, Attempt], Details | None]  # pins marked prefixes, and returns their part of the usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What a request walks through, in this order."""

    receiver: BodyReceiver
    admission: ConcurrencyLimiter
    reader: PromptReader
    engine_readings: EngineReadings
    dispatcher: Dispatcher  # decide, reserve, run
    relay: Relay
    accounts: RequestRecorder
    tasks: TaskSet

    async def answer(
        self, listener: web.Request | AnswerListener, request: Request, keep: Keep, kept_bytes: int
    ) -> web.StreamResponse:
        """Has a request that was read and admitted answered to `listener`; its record tells how it ended. Raises ApiError."""
        status, error, code = 500, "internal error", "internal_error"
        response: web.StreamResponse | None = None
        try:
            self.relay.begin(request, kept_bytes)
            async with self.dispatcher.answered(request) as answering:
                details = keep(request, answering.attempt)
                response = await self.relay.send(listener, request, answering, details)
                status, error, code = response.status, "", "none"
                await settle(request, answering.attempt)
            return response
        except ApiError as failure:
            status, error, code = failure.status, failure.message, failure.code or "invalid"
            if isinstance(listener, AnswerListener):
                listener.give_up()
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            if response is None:
                status, error, code = CLIENT_CLOSED, "client disconnected", CLIENT_LEFT
                if isinstance(listener, AnswerListener) and listener.is_given_up:
                    error, code = "another answer to the same request failed", "given_up"
                    request.stream.break_off(BrokenOff(code, error, status))
            raise
        except Exception as failure:
            self.tasks.unforeseen("request", failure)
            if response is None:
                raise InternalError from failure
            return response
        finally:
            self.accounts.closed(request, status, error, code)
