"""`POST /prfaas/explain`: where a request would go now, and why, by the code that decides; nothing is booked, reserved or sent.

The body is what a client would send, the headers too; `?endpoint=` says to which path, where the body does not show it.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from aiohttp import web

from gateway.api.openai import NOT_JSON, Endpoint
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.errors import ApiError, BadRequest, Overloaded
from gateway.http.body import BodyReceiver
from gateway.models.served import ModelParts, Models
from gateway.request.request import Request
from planner.decisions.routing.explain import Explanation
from planner.decisions.routing.revisions import RevisionChoice, RevisionWeighed

MOST_AT_ONCE: Final = 4  # each is read as a request is, and a gateway has requests to read


class _Shown(msgspec.Struct):
    """What tells one endpoint's body from another's."""

    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_SHOWN: Final = msgspec.json.Decoder(_Shown)


class Understands(Protocol):
    """Reads a body as the request that it would be."""

    async def understood(self, http: web.Request, endpoint: Endpoint, body: bytes) -> Request: ...


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A node that the decision does not see."""

    node: str
    cluster: str
    role: str
    why: str


class AdmissionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the request would be taken. `line_s` is how long it would wait for room first; the rest is of a refusal."""

    accepted: bool
    line_s: float = 0.0
    status: int = 200
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `model` is the one asked for. `decision` is None where no decode node is ready; `verdict` says so.

    It is one within `revision`. Where the model has several, `revisions` says how that was chosen, by shares of `roles`;
    `is_held` is true where another one had been drawn, and this one has more of the prompt.
    """

    model: str = ""
    endpoint: str
    num_tokens: int
    max_output_tokens: int | None
    service_class: str
    is_unshared: bool
    plan: int
    decision: Explanation | None
    verdict: AdmissionVerdict
    left_out: tuple[LeftOut, ...]
    revision: str
    revisions: tuple[RevisionWeighed, ...] = ()
    roles: tuple[str, ...] = ()
    is_held: bool = False


class Explanations:
    """Gives them, a few at once."""

    def __init__(
        self,
        *,
        door: Understands,
        receiver: BodyReceiver,
        clusters: Clusters,
        models: Models,
        clock: Callable[[], float],
    ) -> None:
        self._door = door
        self._receiver = receiver
        self._clusters = clusters
        self._models = models
        self._clock = clock
        self._at_once = 0

    async def asked(self, http: web.Request) -> Explained:
        """What would become of the body of `http`. Raises ApiError."""
        if self._at_once >= MOST_AT_ONCE:
            raise Overloaded(f"{MOST_AT_ONCE} explanations are under way. Please retry.", "too_many_explanations")
        self._at_once += 1
        try:
            body = await self._receiver.receive(http)
            return self.of(await self._door.understood(http, _endpoint(http, body), body))
        finally:
            self._at_once -= 1

    def of(self, request: Request) -> Explained:
        """What would become of `request` now. Raises ApiError."""
        parts = self._models.of(request)
        choice, decision, verdict = _decided(parts, request)
        return Explained(
            model=request.served.name,
            revision=_revision(request, choice),
            revisions=choice.weighed if choice is not None else (),
            roles=choice.roles if choice is not None else (),
            is_held=choice is not None and choice.is_held,
            endpoint=request.call.endpoint,
            num_tokens=request.prompt.num_tokens,
            max_output_tokens=request.call.options.output_tokens,
            service_class=request.service.name,
            is_unshared=request.is_unshared,
            plan=parts.router.plan_version,
            decision=decision,
            verdict=verdict,
            left_out=tuple(
                LeftOut(node=node.id, cluster=node.cluster, role=node.role, why=why)
                for node in self._clusters.nodes
                if (why := self._why_left_out(node, parts.key))
            ),
        )

    def _why_left_out(self, node: ClusterNode, key: str) -> str:
        """Why no decision about a prompt of the model `key` sees a node now; "" for one that decisions see."""
        now = self._clock()
        if node.state != "ready":
            return f"it is {node.state}"
        if node.info is not None and (why := self._clusters.all_served.why_unused(node.info)):
            return why
        if node.model != key:
            return f"it serves the model {self._models.name_of(node.model)!r}"
        if now < node.suspect_until:
            return f"it failed a request: left alone for {node.suspect_until - now:.1f} s more"
        return ""


def _decided(parts: ModelParts, request: Request) -> tuple[RevisionChoice | None, Explanation | None, AdmissionVerdict]:
    """As `Dispatcher` asks: first where to, then whether at all."""
    choice, decision, line_s = None, None, 0.0
    try:
        choice = parts.router.weighed(request)
        decision = parts.router.explain(request, _revision(request, choice))
        if decision.route.prefill_node is not None and len(parts.line):
            line_s = parts.line.expected_s(request.service, request.tenant.share)
        parts.refusals.check(request, decision.route, line_s)
    except ApiError as error:
        return (
            choice,
            decision,
            AdmissionVerdict(
                accepted=False,
                line_s=line_s,
                status=error.status,
                code=error.code or "",
                message=error.message,
                retry_after_s=error.retry_after_s,
            ),
        )
    return choice, decision, AdmissionVerdict(accepted=True, line_s=line_s)


def _revision(request: Request, choice: RevisionChoice | None) -> str:
    return choice.revision if choice is not None else request.served.revision


def _endpoint(http: web.Request, body: bytes) -> Endpoint:
    """The one that the query names, or whose body this looks like. Raises BadRequest."""
    named = http.query.get("endpoint")
    if named is not None:
        try:
            return Endpoint(named)
        except ValueError:
            known = ", ".join(Endpoint)
            raise BadRequest(f"endpoint must be one of {known}.", param="endpoint", code="invalid_value") from None
    try:
        shown = _SHOWN.decode(body)
    except NOT_JSON:
        return Endpoint.CHAT  # whose reading says what is wrong
    if shown.prompt is not msgspec.UNSET:
        return Endpoint.COMPLETIONS
    return Endpoint.CHAT if shown.input is msgspec.UNSET else Endpoint.RESPONSES
