"""Kept prefixes: a node holds each for its tenant, for a time that every use begins anew (`node.kvcache.pinned_contexts`).

A prefix is kept where the prompt was computed: that node's cache is what the next prompt with it goes on from, and routing knows.
What a decode node has been sent serves one answer; a hybrid model's state at the prompt's end is no beginning for another one.
A tenant has a prefix once: a later request that marks it lets it live on where it is, whichever node has computed that prompt.

Nodes are the memory. A gateway, and each of its workers, sees what they hold as they tell it; what a node had when it ended is
listed as lost until its time would have been over.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.api.cache_control import TTL_S, Breakpoint
from gateway.api.usage import Details
from gateway.auth.keyring import Tenant
from gateway.cluster.node import ClusterNode
from gateway.cluster.pinned_prefixes import PinnedPrefix, PinState
from gateway.cluster.registry import Clusters
from gateway.errors import AgentCallFailed, ApiError
from gateway.http.connections import JSON
from gateway.pipeline.attempt import Attempt
from gateway.prompt.prompt import Prompt
from gateway.ratelimit.limiter import TenantLimiters
from gateway.request.request import Request
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics

KEPT: Final = "kept"
TOO_SHORT: Final = "shorter_than_a_block"
NOT_SHARED: Final = "unshared"  # an adapter's, or with media: nodes keep no such prefix
# What an engine has computed is prefix cache at its agent a moment later, or (vLLM) once it has been copied.
PAUSES_S: Final = (0.0, 0.02, 0.2)
OUTCOME_WAIT_S: Final = 2.0
NEWS_S: Final = 1.0  # by then, what a node keeps has come to all workers

TenantOf = Callable[[web.Request], Tenant]


@dataclass(frozen=True, slots=True)
class PinOutcome:
    """What became of one marked prefix: `kept` tokens of it are, `added` of them since now; else why not."""

    wish: Breakpoint
    context_id: str = ""
    kept: int = 0
    is_new: bool = False
    reason: str = ""

    def told(self) -> dict[str, Any]:
        """As a client reads it beside its usage."""
        said = {"field": self.wish.field, "ttl": self.wish.ttl, "tokens": self.wish.asked_tokens, "kept": self.kept}
        return (
            said
            | ({"context": self.context_id} if self.kept else {})
            | ({"reason": self.reason} if self.reason else {})
        )


@dataclass(slots=True)
class Keeping:
    """The marked prefixes of one request on their way to being kept."""

    task: "asyncio.Task[list[PinOutcome]]"

    async def details(self, cached_tokens: int) -> dict[str, Any]:
        """What the usage of an answer says of them, where `cached_tokens` of the prompt were read from a cache."""
        if not self.task.done():
            await asyncio.wait([self.task], timeout=OUTCOME_WAIT_S)
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return {"cache_write_tokens": 0}
        return details_of(self.task.result(), cached_tokens)


def details_of(outcomes: list[PinOutcome], cached_tokens: int) -> dict[str, Any]:
    """`prompt_tokens_details` of a prompt with marks. A token is read from a cache or written to one, never both."""
    before, written, by_ttl = cached_tokens, 0, dict.fromkeys(TTL_S, 0)
    for outcome in sorted(outcomes, key=lambda each: each.kept):
        if outcome.kept > before:
            if outcome.is_new:
                written += outcome.kept - before
                by_ttl[outcome.wish.ttl] += outcome.kept - before
            before = outcome.kept
    told = [outcome.told() for outcome in outcomes]
    return {"cache_write_tokens": written, "cache_writes_by_ttl": by_ttl, "breakpoints": told}


@dataclass(slots=True)
class ContextPinning:
    """All of the tenants of a gateway; `clock` is its own."""

    clusters: Clusters
    metrics: Metrics
    tasks: TaskSet
    clock: Callable[[], float]
    allowances: TenantLimiters
    _making: dict[str, asyncio.Lock] = field(
        default_factory=dict
    )  # by tenant: what it may have is asked and taken at once

    def begin(self, request: Request, attempt: Attempt) -> Details | None:
        """Pins what `request` marks once its prompt has been computed. Returns that part of its usage."""
        if not request.asked.caching.breakpoints or attempt.answer.status != 200:
            return None
        served = request.served  # now: a stream may go on in another revision
        if served.revision not in request.asked.revisions:
            return None
        prompt, size = request.asked.within(served.revision), served.layout.block_size
        return Keeping(self.tasks.start(self._keep(request, attempt, prompt, size), "keep")).details

    async def _keep(self, request: Request, attempt: Attempt, prompt: Prompt, size: int) -> list[PinOutcome]:
        """Has the node that computes keep what is marked of `prompt`, by its names there, in blocks of `size` tokens."""
        tenant = request.tenant
        wishes = prompt.caching.breakpoints
        try:
            node = await self._computed(request, attempt)
        except AgentCallFailed as error:
            outcomes = [PinOutcome(wish, reason=error.reason) for wish in wishes]
        else:
            outcomes = [await self._one(node, prompt, tenant, wish, size) for wish in wishes]
        for outcome in outcomes:
            self.metrics.context(outcome.reason or KEPT)
        return outcomes

    async def _computed(self, request: Request, attempt: Attempt) -> ClusterNode:
        """The node that has computed the prompt. Raises AgentCallFailed."""
        if attempt.delivery is not None:
            await attempt.delivery.outcome()
        return self.clusters.by_id(request.progress.prefill_node)

    async def _one(self, node: ClusterNode, prompt: Prompt, tenant: Tenant, wish: Breakpoint, size: int) -> PinOutcome:
        if not prompt.is_plain:
            return PinOutcome(wish, reason=NOT_SHARED)
        blocks = min(wish.tokens // size, len(prompt.hashes))
        if not blocks:
            return PinOutcome(wish, reason=TOO_SHORT)
        hashes, context_id = prompt.hashes[:blocks], id_of(tenant, prompt.hashes[blocks - 1])
        if (holder := self._holder(tenant, context_id, node.revision)) is not None:
            node = holder
        try:
            kept = await self._kept(node, context_id, hashes, blocks * size, tenant, TTL_S[wish.ttl])
        except AgentCallFailed as error:
            return PinOutcome(wish, reason=error.reason)
        reason = "" if kept.num_tokens == wish.asked_tokens // size * size else "partial"
        return PinOutcome(wish, context_id, kept.num_tokens, kept.added_tokens > 0, reason)

    async def _kept(
        self, node: ClusterNode, context_id: str, hashes: list[bytes], num_tokens: int, tenant: Tenant, ttl_s: float
    ) -> PinnedPrefix:
        """What `node` keeps of a prefix now. Raises AgentCallFailed."""
        # Said before it is looked at what there is: of two workers at once, one at least sees what the other one wants.
        others = self._others(tenant, num_tokens) if self._holder(tenant, context_id, node.revision) is None else 0
        failure: AgentCallFailed | None = None
        kept: PinnedPrefix | None = None
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)  # others of the tenant have their turn
            try:
                async with self._making.setdefault(tenant.name, asyncio.Lock()):
                    budget = self._budget(node, tenant, others)
                    found = await node.agent.keep(context_id, hashes, num_tokens, tenant.name, ttl_s, budget)
                    node.contexts.heard(found, self.clock())
            except AgentCallFailed as error:
                failure = error
                if error.reason != "not_cached":
                    break
            else:
                # What an earlier look has added was not kept before, either.
                added_tokens = found.added_tokens + (kept.added_tokens if kept is not None else 0)
                kept = replace(found, added_tokens=added_tokens)
                if kept.num_tokens >= num_tokens:
                    return kept
        if kept is not None:
            return kept
        assert failure is not None
        raise failure

    def _budget(self, node: ClusterNode, tenant: Tenant, others: int) -> int:
        """Tokens that a tenant may have on `node`. Raises AgentCallFailed."""
        elsewhere = sum(each.owned_tokens(tenant.name) for each in self.clusters.nodes if each is not node)
        budget = tenant.pinned_tokens - elsewhere - others
        if budget <= 0:
            raise AgentCallFailed(node.id, "over_budget", f"{elsewhere} tokens are kept on other nodes")
        return budget

    def _others(self, tenant: Tenant, num_tokens: int) -> int:
        """Tokens that other workers are about to have kept for a tenant; they see for a while that this one is, too."""
        if not self.allowances.are_shared:
            return 0
        others = self.allowances.about_to_pin(tenant.name, num_tokens)
        self.tasks.start(self._let_go(tenant, num_tokens), "let_go")
        return others

    async def _let_go(self, tenant: Tenant, num_tokens: int) -> None:
        try:
            await asyncio.sleep(NEWS_S)
        finally:
            self.allowances.about_to_pin(tenant.name, -num_tokens)

    def _holder(self, tenant: Tenant, context_id: str, revision: str) -> ClusterNode | None:
        """The node of that revision that keeps this prefix already: models with the same weights name it alike."""
        now = self.clock()
        for node in self.clusters.nodes:
            kept = node.contexts.get(context_id, now) if node.revision == revision else None
            if kept is not None and kept.owner == tenant.name and node.connected and kept.state is PinState.KEPT:
                return node
        return None

    # What a tenant sees and ends

    def of(self, tenant: Tenant) -> dict[str, Any]:
        """All contexts of a tenant, as a list of OpenAI's kind."""
        now, found, total = self.clock(), [], 0
        for node in self.clusters.nodes:
            total += node.owned_tokens(tenant.name)
            for kept in node.contexts.of(tenant.name, now):
                is_seen = node.connected or kept.state is not PinState.KEPT
                found.append(kept.told(now, kept.state if is_seen else PinState.UNREACHABLE))
        budget = {"kept_tokens": total, "budget_tokens": tenant.pinned_tokens}
        return {"object": "list", "data": sorted(found, key=lambda each: str(each["id"])), **budget}

    async def end(self, tenant: Tenant, context_id: str) -> dict[str, Any]:
        """Ends a context of a tenant, wherever it is. Raises ApiError: 404 for what is no context of its own."""
        now = self.clock()
        holders = [node for node in self.clusters.nodes if _is_owned(node.contexts.get(context_id, now), tenant)]
        if not holders:
            message = f"There is no context '{context_id[:80]}'."
            raise ApiError(404, message, param="context_id", code="context_not_found")
        for node in holders:
            if node.connected:
                try:
                    await node.agent.delete_context(context_id, tenant.name)
                except AgentCallFailed as error:
                    message = f"The node that keeps '{context_id}' does not answer: {error.reason}."
                    raise ApiError(503, message, type="server_error", code="node_unreachable") from error
            node.contexts.forget(context_id)
        return {"id": context_id, "object": "context", "deleted": True}

    def pages(self, tenant_of: TenantOf) -> tuple[Callable[[web.Request], Awaitable[web.Response]], ...]:
        """What answers GET /v1/contexts and DELETE /v1/contexts/{context_id}."""

        async def listed(http: web.Request) -> web.Response:
            return _json(self.of(tenant_of(http)))

        async def ended(http: web.Request) -> web.Response:
            return _json(await self.end(tenant_of(http), http.match_info["context_id"]))

        return listed, ended


def _is_owned(kept: PinnedPrefix | None, tenant: Tenant) -> bool:
    return kept is not None and kept.owner == tenant.name


def id_of(tenant: Tenant, end: bytes) -> str:
    """The name of the prefix that ends with block `end`, for its tenant: the same on every node and in every gateway."""
    return f"ctx_{sha256(tenant.name.encode() + b'/' + end).hexdigest()[:32]}"


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": JSON})
