"""An attempt: a prefill and a decode leg at once. What they have in common, by tickets or by rooms."""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.links import ClusterLinks, is_path_failure
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.errors import DecodeFailed, KillsEngines, NodeFailure, PrefillFailed
from gateway.pipeline.reservations import DecodeReservation
from gateway.pipeline.retries import Retries
from gateway.request.request import Request
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from gateway.telemetry.recorder import RequestRecorder
from gateway.upstream.legs import DecodeAnswer, Legs
from planner.decisions.failures.retries import FailedStage, FailureKind, Next, may_have_died, tries_of
from planner.decisions.routing.offload import Route


@dataclass(frozen=True, slots=True)
class KvDelivery:
    """KVCache on its way to a decode node. It comes to None where the decode node computes the prompt itself."""

    task: "asyncio.Task[PrefillOutcome | None]"

    async def outcome(self, within_s: float | None = None) -> PrefillOutcome | None:
        """What the prefill reports, a round trip behind the KVCache; None if it failed, or says nothing `within_s`."""
        if not self.task.done():
            await asyncio.wait([self.task], timeout=within_s)
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()


@dataclass(slots=True)
class Attempt:
    """One try at a request that a decode node has begun to answer; `engine` is which process of `decode` was asked."""

    answer: DecodeAnswer
    decode: ClusterNode
    engine: tuple[str, int]
    delivery: KvDelivery | None = None
    hold: DecodeReservation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRunner:
    """Runs single legs, and has the rest of the gateway hear what became of them."""

    clusters: Clusters
    links: ClusterLinks
    legs: Legs
    decider: Router
    accounts: RequestRecorder
    tasks: TaskSet
    retries: Retries

    async def decode(self, request: Request, node: ClusterNode, leg: Awaitable[DecodeAnswer]) -> DecodeAnswer:
        """The answer of `leg`, which `node` has begun. Raises DecodeFailed."""
        engine = node.engine
        try:
            with self.accounts.leg(request):
                return await leg
        except DecodeFailed as error:
            await self._note_death(request, node, engine, error)
            raise

    async def prefill(
        self, request: Request, node: ClusterNode, decode: ClusterNode, leg: Awaitable[PrefillOutcome]
    ) -> PrefillOutcome:
        """What `leg` comes to, by which `node` sends `decode` its KVCache. Raises PrefillFailed."""
        receiver = decode.engine
        engine = node.engine
        try:
            with self.accounts.leg(request):
                outcome = await leg
        except PrefillFailed as error:
            if is_path_failure(error.reason, node, decode, receiver):
                self.links.failed(node, decode)
            await self._note_death(request, node, engine, error)
            raise
        self.links.arrived(node, decode)
        return outcome

    def prefill_failed(
        self, request: Request, node_id: str, error: NodeFailure, failed: Mapping[str, FailureKind]
    ) -> Next:
        """What follows the failure of the prefill at `node_id`, the last of those that `failed`. Raises KillsEngines."""
        noted = self.accounts.doubted if error.failure is FailureKind.REQUEST else self.accounts.fell_back
        noted(request, f"prefill_{error.reason}", error)
        tries = tries_of(failed.values())
        rule = self.retries.rule_after(request, FailedStage.PREFILL, node_id, failed[node_id], tries)
        if rule.next is Next.REFUSE:
            raise KillsEngines(request.progress.deaths)
        return rule.next

    def other_prefill(self, request: Request, chosen: Route, failed: Collection[str]) -> Route | None:
        """Another node to prefill for the decode node of `chosen`, by the plan that is followed now."""
        self.accounts.decides(request, self.decider.plan_version)
        return self.decider.other_prefill(request, chosen, failed)

    async def _note_death(
        self, request: Request, node: ClusterNode, engine: tuple[str, int], error: DecodeFailed | PrefillFailed
    ) -> None:
        """A leg at `node` has failed. If its `engine` died of it, the request keeps that, and an `engine_died` is raised."""
        if may_have_died(error.reason) and await self.clusters.has_died(node, engine):
            self.accounts.died(request, node)
            raise type(error)(node.id, "engine_died") from error


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Ends a task, and waits until it has."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


async def hang_up(asking: "asyncio.Task[DecodeAnswer]") -> None:
    """Ends the decode leg, whether it has answered or not."""
    if asking.done():
        _let_go(asking)
        return
    asking.add_done_callback(_let_go)
    asking.cancel()
    await asyncio.wait([asking])


def _let_go(asking: "asyncio.Task[DecodeAnswer]") -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()
