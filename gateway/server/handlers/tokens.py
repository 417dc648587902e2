"""Paths that ask a model without generating: tokens, their number, and what other kinds of engines answer whole.

Nothing is routed, there is no KVCache to speak of; but a place among those served is taken. What an engine is given costs its
tenant tokens: as many as its body may have, then as many as the answer counts.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final

import msgspec
from aiohttp import web
from msgspec import Raw

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.api.openai import NOT_JSON, RESERVED, Endpoint, check_text
from gateway.auth.keyring import Tenant
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.errors import ApiError, BadRequest, LegFailed, NoDecodeNode, Unauthorised, Unavailable, unknown_model
from gateway.http.body import BodyReceiver, too_large
from gateway.http.connections import JSON
from gateway.models.served import ModelParts, Models
from gateway.prompt.media import KINDS
from gateway.prompt.media_addresses import check_all_addresses
from gateway.prompt.prompt import PromptMemory, PromptModel
from gateway.prompt.tokenize import MAX_BODY_BYTES, text_of, tokens_of
from gateway.ratelimit.limiter import TenantLimiter, TenantLimiters
from gateway.server.openapi import DETOKENISE, PASSED_ON, TOKENISE, document
from gateway.telemetry.metrics import Metrics
from gateway.upstream.legs import Legs
from planner.decisions.views import Role

ANY_LENGTH: Final = 1 << 62  # of a context
NOT_SERVED: Final = frozenset({404, 405, 501})  # what an engine says of a path that it does not have

BYTES_PER_TOKEN: Final = 4  # of English, and of token ids as JSON
USAGE_BYTES: Final = 4096
_TOTAL_TOKENS: Final = re.compile(rb'"(?:total|prompt)_tokens":\s*(\d{1,12})')

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])


class TokenEndpoints:
    """Answers at once, to callers that `tenant_of` knows."""

    def __init__(
        self,
        *,
        admission: ConcurrencyLimiter,
        receiver: BodyReceiver,
        models: Models,
        clusters: Clusters,
        legs: Legs,
        metrics: Metrics,
        tenant_of: Callable[[Mapping[str, str]], Tenant],
        allowances: TenantLimiters,
        media_domains: frozenset[str] = frozenset(),
    ) -> None:
        self._admission = admission
        self._receiver = receiver
        self._models = models
        self._clusters = clusters
        self._legs = legs
        self._metrics = metrics
        self._tenant_of = tenant_of
        self._allowances = allowances
        self._media_domains = media_domains
        self._documents: dict[tuple[str, ...], bytes] = {}  # by the names in them

    async def document(self, http: web.Request) -> web.Response:
        """The API as an OpenAPI document: for served tenants with the names of the model, once it is known."""
        names: tuple[str, ...] = ()
        with suppress(Unauthorised):
            tenant = self._tenant_of(http.headers)
            names = tuple(name for served in self._models.seen_by(tenant) for name in served.called)
        if names not in self._documents:
            self._documents = {each: document(each) for each in {(), names}}
        return _json(self._documents[names])

    def ways(self) -> dict[str, Handler]:
        """What answers a POST, by path."""
        ways: dict[str, Handler] = {Endpoint.COUNT_TOKENS: self._count}
        ways |= dict.fromkeys(TOKENISE, self._tokenise) | dict.fromkeys(DETOKENISE, self._detokenise)
        return ways | dict.fromkeys(PASSED_ON, self._pass_on)

    async def _count(self, http: web.Request) -> web.Response:
        """How many tokens a message's prompt has, however long a context the model has."""
        with self._counted(http):
            tenant, body = await self._received(http)
            async with self._place(tenant, len(body)), self._model(body, tenant) as (parts, model):
                unbounded = msgspec.structs.replace(model, max_model_len=ANY_LENGTH)
                asked = parts.steps.reader.read(
                    Endpoint.COUNT_TOKENS, body, unbounded, tenant.memory, share=tenant.share
                )
                _, prompt = await asked
        return _json(msgspec.json.encode({"input_tokens": prompt.num_tokens}))

    async def _tokenise(self, http: web.Request) -> web.Response:
        with self._counted(http):
            tenant, body = await self._received(http, MAX_BODY_BYTES)
            async with self._place(tenant, len(body)), self._model(body, tenant) as (parts, model):
                read = partial(tokens_of, body, model, tenant=tenant.memory)
                return _json(await parts.steps.reader.think(read, tenant.share, len(body)))

    async def _detokenise(self, http: web.Request) -> web.Response:
        with self._counted(http):
            tenant, body = await self._received(http, MAX_BODY_BYTES)
            async with self._place(tenant, len(body)), self._model(body, tenant) as (parts, model):

                def read(memory: PromptMemory) -> bytes:
                    return text_of(body, model, memory.tokenizer)

                return _json(await parts.steps.reader.think(read, tenant.share, len(body)))

    async def _pass_on(self, http: web.Request) -> web.Response:
        """What a decode node's engine answers to the same."""
        with self._counted(http):
            tenant, body = await self._received(http)
            taken = _tokens_guessed(body)
            async with (
                self._model(body, tenant) as (parts, model),
                self._place(tenant, len(body)) as allowance,
            ):
                fields = _for_engine(body, model)
                allowance.read(taken, 1)
                used = 0
                try:
                    node = self._node(parts.key, model.names[0])
                    asked = _written(fields, node.info.model_id if node.info is not None else model.names[-1])
                    used = taken  # also of a client that does not wait for the answer
                    status, kind, told = await self._legs.ask(node, http.path, asked)
                    used = _tokens_counted(told, taken) if status == 200 else 0
                except LegFailed as error:
                    used = 0
                    raise Unavailable(f"The engine did not answer: {error.reason}.", "engine_failed") from error
                finally:
                    allowance.settle(used - taken)
                    self._metrics.computed(tenant.name, used)
            if status in NOT_SERVED:
                message = f"The engine of '{model.names[0]}' does not serve {http.path}: it is no model of that kind."
                raise ApiError(404, message, code="endpoint_not_served")
            self._metrics.passed_on(tenant.name, status)
            return web.Response(status=status, body=told, headers={"Content-Type": kind})

    async def _received(self, http: web.Request, max_bytes: int | None = None) -> tuple[Tenant, bytes]:
        """The tenant and the body of a request. Raises ApiError."""
        tenant = self._tenant_of(http.headers)
        self._admission.check(tenant.share)
        body = await self._receiver.receive(http)
        if max_bytes is not None and len(body) > max_bytes:
            raise too_large(max_bytes)
        return tenant, body

    @asynccontextmanager
    async def _model(self, body: bytes, tenant: Tenant) -> AsyncIterator[tuple[ModelParts, PromptModel]]:
        """What serves the model that a body is about, and that model. Raises ApiError."""
        parts = await self._models.asked(body, tenant)
        with parts.used():
            yield parts, self._models.served(parts.key).as_read(media_domains=self._media_domains)

    def _node(self, key: str, name: str) -> ClusterNode:
        """The decode node of a model with the fewest requests. Raises Unavailable."""
        ready = self._clusters.ready(Role.DECODE, model=key)
        if not ready:
            raise NoDecodeNode(name)
        return min(ready, key=lambda node: (node.pending_requests, node.load.running))

    @asynccontextmanager
    async def _place(self, tenant: Tenant, num_bytes: int) -> AsyncIterator[TenantLimiter]:
        """A place among those served, and among the tenant's requests."""
        allowance = self._allowances.enter(tenant)
        try:
            await self._admission.take(tenant.share, num_bytes)
            try:
                yield allowance
            finally:
                self._admission.give_back(tenant.share)
        finally:
            allowance.leave()

    @contextmanager
    def _counted(self, http: web.Request) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            tenant = ""
            with suppress(ApiError):
                tenant = self._tenant_of(http.headers).name
            self._metrics.rejected(error.code or "invalid", error.status, tenant)
            raise


def _for_engine(body: bytes, model: PromptModel) -> dict[str, Raw]:
    """The fields of a client's body that an engine is to be given. Raises ApiError."""
    try:
        fields = _FIELDS.decode(body)
        check_text(body)
        name = msgspec.json.decode(fields.get("model", Raw(b"null")), type=str | None)
    except msgspec.ValidationError as error:
        raise BadRequest("The body must be a JSON object, and 'model' a string.", param="model") from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if model.takes_media:
        check_all_addresses(msgspec.json.decode(body), KINDS, model.media_domains, "")
    for reserved in RESERVED:
        if reserved in fields:
            raise BadRequest(f"'{reserved}' cannot be set by a client.", param=reserved, code="unsupported")
    if name is not None and name not in model.names:
        raise unknown_model(name, model.names[0])
    return fields


def _written(fields: Mapping[str, Raw], model_id: str) -> bytes:
    """These, with the name that an engine knows its model by."""
    return msgspec.json.encode({**fields, "model": Raw(msgspec.json.encode(model_id))})


def _tokens_guessed(body: bytes) -> int:
    """An estimate of the tokens in a body that the gateway does not tokenise."""
    return -(-len(body) // BYTES_PER_TOKEN)


def _tokens_counted(told: bytes, guessed: int) -> int:
    """What the usage of an answer counts, which stands at its end or its beginning; else what was guessed."""
    found = _TOTAL_TOKENS.findall(told[-USAGE_BYTES:]) or _TOTAL_TOKENS.findall(told[:USAGE_BYTES])
    return int(found[-1]) if found else guessed


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": JSON})
