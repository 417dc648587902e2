"""Generation over HTTP: a body comes in, becomes one request or several, and each is answered."""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from gateway.admission.service_classes import Classes
from gateway.api.dialects.translation import telling_of
from gateway.api.openai import Call, Endpoint
from gateway.api.validation import MAX_ANSWERS, too_many
from gateway.auth.keyring import EVERYBODY, Keyring, Tenant
from gateway.auth.oidc import TokenVerifier
from gateway.auth.sessions import OperatorSessions
from gateway.auth.wrong_keys import WrongKeys
from gateway.cluster.registry import Clusters
from gateway.cluster.served_model import others_of
from gateway.config.gateway import GatewayConfig
from gateway.errors import ApiError
from gateway.http.hosts import check_host
from gateway.models.served import ModelParts, Models
from gateway.pipeline.fanout import AnswerListener, Merged, bodies_of, calls_of, check_size
from gateway.pipeline.pipeline import Pipeline
from gateway.prompt.prompt import SEVERAL_PROMPTS
from gateway.ratelimit.limiter import UNLIMITED, TenantLimiter, TenantLimiters
from gateway.request.request import Request, RequestProgress, StreamState, Timeline
from gateway.request.trace_context import TRACEPARENT, TRACESTATE, TraceContext
from gateway.routing.name_rotation import NameRotation
from gateway.server.audit_log import AuditLog
from gateway.server.guards import KeyGuard, OperatorGuard
from gateway.server.handlers.contexts import ContextPinning
from gateway.server.inflight import InflightRequest, InflightRequests
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.otlp import Traces
from gateway.telemetry.recorder import CLIENT_CLOSED, CLIENT_LEFT

log = logging.getLogger("prfaas.gateway.http")

OPERATORS_PATHS: Final = ("/metrics", "/prfaas/", "/console")
REQUEST_ID: Final = web.RequestKey("request_id", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GenerationEndpoint:
    """Takes a request through the rooms, as a task of its own that outlives nothing but its answer."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        models: Models,
        clusters: Clusters,
        rotation: NameRotation,
        metrics: Metrics,
        tasks: TaskSet,
        clock: Callable[[], float],
        allowances: TenantLimiters,
        audit: AuditLog,
        sessions: OperatorSessions,
        traces: Traces | None = None,
    ) -> None:
        self.config = config
        self.traces = traces
        self.models = models
        self.clusters = clusters
        self.rotation = rotation
        self.metrics = metrics
        self.classes = Classes(config.classes, config.admission.default_class)
        self.media_domains = frozenset(config.allowed_media_domains)
        self.tokens = TokenVerifier(config.oidc) if config.oidc.issuer else None
        self.keyring = Keyring(config.tenants, config.all_operators, self.tokens, unix_s, sessions)
        wrong_keys = WrongKeys(config.wrong_keys.divided(config.workers), clock)
        self.guard = KeyGuard(self.keyring, wrong_keys, config.strangers, audit, metrics.upkeep.key_shown)
        self.operators = OperatorGuard(self.keyring, config.strangers, audit)
        self.sessions = sessions
        self.allowances = allowances
        self.contexts = ContextPinning(clusters, metrics, tasks, clock, allowances)
        self._tasks = tasks
        self._clock = clock
        self._boot = uuid.uuid4().hex[:12]
        self._numbers = itertools.count(1)
        self.visits = InflightRequests()

    def configure(self, config: GatewayConfig) -> None:
        """Other classes, tenants and operators from now on."""
        self.classes = Classes(config.classes, config.admission.default_class)
        self.keyring.configure(config.tenants, config.all_operators)

    @property
    def rooms(self) -> Pipeline:
        """The steps of the default model. Receiver, places and relay are those of all models."""
        return self.models.default.steps

    def next_id(self) -> str:
        """An id that no other request of any gateway has."""
        return f"{self._boot}{next(self._numbers):06x}"

    def check_host(self, http: web.Request) -> None:
        """Raises ApiError for a request that a stranger's page may have a browser send to a gateway without keys."""
        if self.keyring.has_tenants or (self.config.open and not self.config.hosts):
            return
        if self.keyring.has_operators and http.path.startswith(OPERATORS_PATHS):
            return
        try:
            check_host(http.headers.get("Host", ""), self.config.hosts)
        except ApiError as error:
            self.metrics.rejected("foreign_host", error.status)
            raise

    def ways(self) -> dict[Endpoint, Handler]:
        """What handles a POST that generates, by path."""
        return {
            Endpoint.CHAT: self.chat,
            Endpoint.COMPLETIONS: self.completions,
            Endpoint.MESSAGES: self.messages,
            Endpoint.RESPONSES: self.responses,
        }

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.CHAT)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.COMPLETIONS)

    async def messages(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.MESSAGES)

    async def responses(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Endpoint.RESPONSES)

    async def _generate(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        arrived = self._clock()
        tenant, allowance = EVERYBODY, UNLIMITED
        try:
            tenant = self.keyring.tenant(http.headers)
            self.rooms.admission.check(tenant.share)
            allowance = self.allowances.enter(tenant)
            visit = InflightRequest(http, endpoint, await self.rooms.receiver.receive(http), arrived, tenant, allowance)
            await self.rooms.admission.take(tenant.share, len(visit.body))
        except BaseException as error:
            allowance.leave()
            if isinstance(error, ApiError):
                self.rooms.accounts.turned_away(error, tenant)
            raise
        # The work is a task of its own: a client that hangs up in the middle ends it, one that has its whole answer does
        # not keep the books from being closed.
        work = self._tasks.start(self._serve(visit), "request", expected=(ApiError, ConnectionResetError))
        work.add_done_callback(lambda _: self._left(tenant, allowance))
        try:
            return await self.visits.until_answered(visit, work)
        finally:
            del work  # as `until_answered` forgets it

    def _left(self, tenant: Tenant, allowance: TenantLimiter) -> None:
        self.rooms.admission.give_back(tenant.share)
        allowance.leave()

    async def understood(self, http: web.Request, endpoint: Endpoint, body: bytes) -> Request:
        """The request that `body` would be at `endpoint`: read as one, but it has no place and is in no book. Raises ApiError."""
        tenant = self.keyring.named(http.query.get("tenant", ""))
        parts = await self.models.asked(body, tenant)
        with parts.used():
            return await self._read(parts, InflightRequest(http, endpoint, body, self._clock(), tenant))

    async def _serve(self, visit: InflightRequest) -> web.StreamResponse:
        try:
            parts = visit.parts = await self.models.asked(visit.body, visit.tenant)
            parts.check_room()
        except ApiError as error:
            self.metrics.rejected(error.code or "invalid", error.status, visit.tenant.name)
            raise
        except asyncio.CancelledError:
            self.metrics.rejected(CLIENT_LEFT, CLIENT_CLOSED, visit.tenant.name)
            raise
        with parts.serving():
            return await self._serve_by(parts, visit)

    async def _serve_by(self, parts: ModelParts, visit: InflightRequest) -> web.StreamResponse:
        try:
            requests = await self._read_all(parts, visit)
            expected = parts.router.answer_tokens()
            taken = _prompt_tokens(requests) + sum(_answer_tokens(request, expected) for request in requests)
            visit.allowance.read(taken, len(requests))
            visit.requests = requests
        except ApiError as error:
            self.metrics.rejected(error.code or "invalid", error.status, visit.tenant.name)
            raise
        except asyncio.CancelledError:
            self.metrics.rejected(CLIENT_LEFT, CLIENT_CLOSED, visit.tenant.name)
            raise
        try:
            if len(requests) == 1:
                return await self._answer(parts, visit.http, requests[0])
            return await self._answer_all(parts, visit)
        finally:
            visit.allowance.settle(_used_tokens(requests) - taken)

    async def _read_all(self, parts: ModelParts, visit: InflightRequest) -> list[Request]:
        """The requests for one answer each that a visit makes, almost always one. Raises ApiError."""
        try:
            request = await self._read(parts, visit)
        except ApiError as error:
            if error.code != SEVERAL_PROMPTS:
                raise
            return await self._read_list(parts, visit)
        n = request.call.options.n or 1
        if n == 1:
            return [request]
        if n > (most := self._most_answers(parts, visit)):
            raise too_many(n, "n", most)
        check_size([request.call] * n, self.config.max_several_bytes)
        return _for_each_answer(request, self.next_id)

    def _most_answers(self, parts: ModelParts, visit: InflightRequest) -> int:
        """How many answers one request may ask for: more would never have a place at once."""
        share, limits = visit.tenant.share, visit.tenant.limits
        at_once = limits.at_once or MAX_ANSWERS
        return min(MAX_ANSWERS, at_once, parts.config.max_in_flight, self.rooms.admission.most_of(share))

    async def _read_list(self, parts: ModelParts, visit: InflightRequest) -> list[Request]:
        """The requests that a completion with a list of prompts makes. Raises ApiError."""
        body, visit.body = visit.body, b""
        bodies = await parts.steps.reader.think(lambda _: bodies_of(body), visit.tenant.share, len(body))
        n, most = bodies.common.options.n or 1, self._most_answers(parts, visit)
        if len(bodies) * n > most:
            raise too_many(len(bodies) * n, "n" if n > 1 else "prompt", most)
        check_size([bodies.whole(prompt) for prompt in bodies.prompts] * n, self.config.max_several_bytes)
        requests: list[Request] = []
        for part in bodies:
            requests += _for_each_answer(
                await self._read(parts, replace(visit, body=part), lambda call: bodies.whole(call.fields["prompt"])),
                self.next_id,
                requests[0].drawn_by if requests else "",
            )
            await asyncio.sleep(0)  # the shortest are read at once
        return requests

    async def _answer_all(self, parts: ModelParts, visit: InflightRequest) -> web.StreamResponse:
        """Answers several requests as one. Raises ApiError."""
        requests = visit.requests
        call, num_prompts = requests[0].call, len({id(request.prompt) for request in requests})
        merged = Merged(
            len(requests),
            len(requests) // num_prompts,
            streams=call.stream,
            with_usage=call.options.wants_usage,
            begin=lambda headers, length: self.rooms.relay.reply(visit.http, 200, headers, length),
        )
        failed: ApiError | None = None
        with ExitStack() as places:
            try:
                parts.check_room(len(requests) - 1)
                places.enter_context(parts.placed(len(requests) - 1))
                for _ in requests[1:]:
                    await self.rooms.admission.take(visit.tenant.share)
                    places.callback(self.rooms.admission.give_back, visit.tenant.share)
            except ApiError as error:
                self.rooms.accounts.turned_away(error, visit.tenant)
                raise
            try:
                async with asyncio.TaskGroup() as group:
                    for number, request in enumerate(requests):
                        group.create_task(self._answer(parts, AnswerListener(merged, number), request))
                        await asyncio.sleep(0)  # others get their turn between two decisions
            except* ConnectionResetError as left:
                raise ConnectionResetError from left
            except* ApiError as failures:
                failed = _first(failures)
            return await (merged.end() if failed is None else merged.fail(failed))

    async def _read(
        self, parts: ModelParts, visit: InflightRequest, whole: Callable[[Call], Call] = lambda call: call
    ) -> Request:
        """The request that a body makes; `whole` makes its call complete. Raises ApiError."""
        headers = visit.http.headers
        tenant = visit.tenant
        service = self.classes.of(headers, tenant.classes)
        served, steps = self.models.served(parts.key), parts.steps
        model = served.as_read(tenant.group, self.media_domains, others_of(self.clusters.revisions, served))
        call, prompt = await steps.reader.read(
            visit.endpoint, visit.body, model, tenant.memory, share=tenant.share, check=visit.allowance.check
        )
        call = whole(call)
        served.not_done.check(call.fields)
        understood = await steps.engine_readings.understood(call, prompt, model, tenant)
        prompt = self.rotation.known(understood.prompt)
        self.metrics.read(prompt.how)
        visit.body = b""
        request_id = visit.http[REQUEST_ID]
        trace, trace_headers = self._trace(headers)
        request = Request(
            id=request_id,
            leg_id=f"{request_id}-{self.next_id()}",
            call=call,
            asked=prompt,
            model=model,
            reading=understood.reading,
            token_ids=understood.token_ids,
            offered=served,
            progress=RequestProgress(Timeline(visit.arrived)),
            service=service,
            tenant=tenant,
            allowance=visit.allowance,
            trace_headers=trace_headers,
            trace=trace,
            telling=telling_of(call, self.next_id(), prompt.num_tokens, unix_s()) if call.dialect else None,
        )
        if understood.fallback:
            steps.accounts.fell_back(request, understood.fallback)
        return request

    def _trace(self, headers: Mapping[str, str]) -> tuple[TraceContext | None, dict[str, str]]:
        """Where a request with these headers stands in a trace, if traces are wanted; and what its legs are told."""
        if self.traces is not None:
            return self.traces.below(headers)
        return None, {name: headers[name] for name in (TRACEPARENT, TRACESTATE) if name in headers}

    async def _answer(
        self, parts: ModelParts, listener: web.Request | AnswerListener, request: Request
    ) -> web.StreamResponse:
        return await parts.steps.answer(listener, request, self.contexts.begin, self.config.kept_answer_bytes)


def _for_each_answer(request: Request, next_id: Callable[[], str], drawn_by: str = "") -> list[Request]:
    """Requests for one answer each, where `request` is for `n`. Raises ApiError.

    All draw one revision of the model: by `drawn_by`, where others are answered with them.
    """
    requests: list[Request] = []
    for call in calls_of(request.call):
        trace, trace_headers = request.trace, request.trace_headers
        if requests and trace is not None:
            trace = trace.beside()
            trace_headers = {**trace_headers, TRACEPARENT: trace.header}
        requests.append(
            replace(
                request,
                call=call,
                leg_id=f"{request.id}-{next_id()}",
                drawn_by=drawn_by or request.leg_id,
                progress=RequestProgress(Timeline(request.progress.timeline.arrived)),
                stream=StreamState(),
                trace=trace,
                trace_headers=trace_headers,
            )
        )
    return requests


def _answer_tokens(request: Request, expected: float) -> int:
    """What an answer takes of its tenant's tokens until it is over: as many as it may have, or as are `expected`."""
    most = request.call.options.output_tokens
    room = request.served.max_model_len - request.asked.num_tokens
    return max(0, min(int(expected if most is None else most), room))


def _prompt_tokens(requests: Sequence[Request]) -> int:
    """Those of each prompt once, as OpenAI counts them, however many answers it has."""
    return sum({id(request.asked): request.asked.num_tokens for request in requests}.values())


def _used_tokens(requests: Sequence[Request]) -> int:
    """What these have cost their tenant; prompts that no engine was given cost nothing."""
    if any(request.has_cost for request in requests):
        return _prompt_tokens(requests) + sum(request.output_tokens for request in requests)
    return 0


def _first(failures: BaseExceptionGroup[ApiError]) -> ApiError:
    """The failure that ended the others."""
    (first, *_) = failures.exceptions
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def unix_s() -> int:
    """Now, as answers are dated."""
    return int(datetime.now(UTC).timestamp())
