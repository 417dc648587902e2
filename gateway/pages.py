"""What a gateway shows to operators, and tells of tokens: its pages, its console, and the parts that they are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.admin.console.endpoints import Console
from gateway.admin.console.link_switch import LinkSwitch
from gateway.admin.console.plan_proxy import PlanProxy
from gateway.admin.console_snapshot import ConsoleSnapshots
from gateway.admin.explain import Explanations
from gateway.admin.reload import Reloads
from gateway.config.gateway import GatewayConfig
from gateway.fleet.usage.keeper import FleetUsage
from gateway.models.load_report import LoadReporter
from gateway.models.served import Models
from gateway.parts import NodeAccess
from gateway.server.app import GenerationEndpoint
from gateway.server.handlers.operators import OperatorEndpoints
from gateway.server.handlers.tokens import TokenEndpoints
from gateway.workers.peers import NumberedRing, WorkerPeers
from gateway.workers.process_scope import SingleProcess, WorkerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownParts:
    """The parts of a gateway that operators' pages and the console show, and act on."""

    config: GatewayConfig
    clock: Callable[[], float]
    seat: SingleProcess | WorkerProcess
    seen: NodeAccess
    models: Models
    door: GenerationEndpoint
    reloads: Reloads


def operator_pages(
    shown: ShownParts,
    kept: Mapping[str, NumberedRing],
    siblings: WorkerPeers | None,
    usage: FleetUsage | None = None,
) -> OperatorEndpoints:
    """What operators are shown: `kept` page by page, what `siblings` know as well, and the `usage` of all gateways."""
    seat, seen = shown.seat, shown.seen
    return OperatorEndpoints(
        clusters=seen.clusters,
        roster=seen.roster,
        rotation=seen.rotation,
        models=shown.models,
        links=seen.links,
        admission=shown.door.rooms.admission,
        metrics=seat.metrics,
        usage=usage,
        kept=kept,
        load=LoadReporter(seen.clusters, seen.links, shown.config.routing.decode_slots),
        seat=seat,
        siblings=siblings,
        console=_console(shown),
        clock=shown.clock,
        keyring=shown.door.keyring,
        started_at=int(datetime.now(UTC).timestamp()),
    )


def _console(shown: ShownParts) -> Console:
    seen, steps, door = shown.seen, shown.door.rooms, shown.door
    snapshots = ConsoleSnapshots(
        config=shown.config,
        clusters=seen.clusters,
        roster=seen.roster,
        rotation=seen.rotation,
        links=seen.links,
        models=shown.models,
        admission=steps.admission,
        classes=lambda: door.classes,
        tenants=lambda: door.keyring.tenants,
        seat=shown.seat,
        clock=shown.clock,
    )
    return Console(
        snapshots=snapshots,
        explanations=Explanations(
            door=door,
            receiver=steps.receiver,
            clusters=seen.clusters,
            models=shown.models,
            clock=shown.clock,
        ),
        desk=PlanProxy(shown.config.plan, shown.config.plan.asked(shown.config.identity)),
        switch=LinkSwitch(seen.links, seen.drained),
        reloads=shown.reloads,
        receiver=steps.receiver,
        keyring=door.keyring,
        sessions=door.sessions,
    )


def token_endpoints(*, seen: NodeAccess, door: GenerationEndpoint) -> TokenEndpoints:
    """What counts and names tokens for clients, without an answer."""
    return TokenEndpoints(
        admission=door.rooms.admission,
        receiver=door.rooms.receiver,
        models=door.models,
        clusters=seen.clusters,
        legs=seen.legs,
        metrics=door.metrics,
        tenant_of=door.keyring.tenant,
        allowances=door.allowances,
        media_domains=door.media_domains,
    )
