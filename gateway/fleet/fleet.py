"""What a gateway has of its fleet: nothing without `[gateway.fleet]`."""

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol

from gateway.auth.keyring import Keyring
from gateway.cluster.drained_links import DrainedLinks
from gateway.config.gateway import GatewayConfig
from gateway.fleet.limit_shares import FleetTelemetry, LimitShares
from gateway.fleet.link_drains import LinkDrains
from gateway.ratelimit.limiter import TenantLimiters
from gateway.ratelimit.parts import Standing
from planner.decisions.admission.limits import TenantLimits

SETTLE_S: Final = 3.0  # that a gateway waits for a part of limits before it listens
CALL_S: Final = 2.0  # of etcd, for all endpoints together


class FleetWork(Protocol):
    """What goes on beside requests, and is begun anew if it ends."""

    async def run(self) -> None: ...

    async def settled(self, patience_s: float) -> None: ...

    def close(self) -> None: ...


class FleetPart:
    """All of it."""

    def __init__(self, works: Sequence[FleetWork] = ()) -> None:
        self._works = works

    @property
    def chores(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What is to be done for ever."""
        return [work.run for work in self._works]

    async def settled(self) -> None:
        """Waits until this gateway knows what others have decided, not for ever."""
        await asyncio.gather(*(work.settled(SETTLE_S) for work in self._works))

    def close(self) -> None:
        """After all chores have ended."""
        for work in self._works:
            work.close()


def build_fleet(
    config: GatewayConfig,
    duty: Callable[[], bool],
    telemetry: FleetTelemetry,
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
    return FleetPart(
        [
            LimitShares(name, uuid.uuid4().hex, claims, limiters, limits, clock, telemetry, duty),
            LinkDrains(drained, drains, telemetry.fleet_failed, duty),
        ]
    )
