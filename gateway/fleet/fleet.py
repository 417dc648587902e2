"""What a gateway has of its fleet: nothing without `[gateway.fleet]`."""

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from gateway.auth.keyring import Keyring
from gateway.cluster.drained_links import DrainedLinks
from gateway.config.gateway import GatewayConfig
from gateway.fleet.limit_shares import LimitShares
from gateway.fleet.link_drains import LinkDrains
from gateway.fleet.usage.board import UsageBoard
from gateway.fleet.usage.keeper import FleetUsage, UsageClocks, UsageDuty
from gateway.ratelimit.limiter import TenantLimiters
from gateway.ratelimit.parts import Standing
from gateway.telemetry.metrics import Metrics
from planner.decisions.admission.limits import TenantLimits

SETTLE_S: Final = 3.0  # that a gateway waits for a part of limits before it listens
CALL_S: Final = 2.0  # of etcd, for all endpoints together


class FleetWork(Protocol):
    """What goes on beside requests, and is begun anew if it ends."""

    async def run(self) -> None: ...

    async def settled(self, patience_s: float) -> None: ...

    def close(self) -> None: ...


class FleetPart:
    """All of it. `usage`: what all gateways have counted together."""

    def __init__(self, works: Sequence[FleetWork] = (), usage: FleetUsage | None = None) -> None:
        self._works = works
        self.usage = usage

    @property
    def chores(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What is to be done for ever."""
        chores = [work.run for work in self._works]
        return [*chores, self.usage.run] if self.usage is not None else chores

    async def settled(self) -> None:
        """Waits until this gateway knows what others have decided, not for ever."""
        await asyncio.gather(*(work.settled(SETTLE_S) for work in self._works))

    async def farewell(self) -> None:
        """After all requests have ended: the last that was counted of them."""
        if self.usage is not None:
            await self.usage.farewell()

    def close(self) -> None:
        """After all chores have ended."""
        for work in self._works:
            work.close()
        if self.usage is not None:
            self.usage.close()


def build_fleet(
    config: GatewayConfig,
    duty: UsageDuty,
    metrics: Metrics,
    board: UsageBoard,
    clock: Callable[[], float],
    limiters: TenantLimiters,
    keyring: Callable[[], Keyring],
    drained: DrainedLinks,
) -> FleetPart:
    fleet = config.fleet
    if fleet.etcd is None:
        limiters.stand(None)
        return FleetPart()
    # Its messages are loaded where there is an etcd.
    from gateway.fleet.claim_store import EtcdClaims
    from gateway.fleet.drain_store import EtcdDrains
    from gateway.fleet.usage.store import EtcdUsage
    from membership.etcd.client import EtcdClient

    def limits() -> Mapping[str, TenantLimits]:
        known = keyring()
        tenants = map(known.named, known.tenants)
        return {tenant.name: tenant.limits for tenant in tenants if tenant.limits.are_any}

    if limiters.standing is None:
        limiters.stand(Standing(at_start=1.0 / fleet.gateways))
    name = fleet.name or f"{socket.gethostname()}-{config.port}"
    claims = EtcdClaims(fleet.etcd, EtcdClient(fleet.etcd, call_s=CALL_S))
    drains = EtcdDrains(fleet.etcd, name, EtcdClient(fleet.etcd, call_s=CALL_S))
    usage = FleetUsage(
        name=name,
        store=EtcdUsage(fleet.etcd, EtcdClient(fleet.etcd, call_s=CALL_S)),
        board=board,
        counted=metrics.spent,
        clocks=UsageClocks(now=clock, unix_s=lambda: datetime.now(UTC).timestamp()),
        telemetry=metrics.upkeep,
        duty=duty,
    )
    telemetry = metrics.upkeep
    return FleetPart(
        [
            LimitShares(name, uuid.uuid4().hex, claims, limiters, limits, clock, telemetry, duty),
            LinkDrains(drained, drains, telemetry.fleet_failed, duty),
        ],
        usage,
    )
