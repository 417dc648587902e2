"""What a gateway has of its fleet: nothing without `[gateway.fleet]`."""

import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from gateway.auth.keyring import Keyring
from gateway.config.gateway import GatewayConfig
from gateway.fleet.limit_shares import FleetTelemetry, LimitShares
from gateway.ratelimit.limiter import TenantLimiters
from gateway.ratelimit.parts import Standing
from planner.decisions.admission.limits import TenantLimits

SETTLE_S: Final = 3.0  # that a gateway waits for a part of limits before it listens
CALL_S: Final = 2.0  # of etcd, for all endpoints together


class Fleet:
    """What goes on beside requests, and is begun anew if it ends."""

    def __init__(self, limits: LimitShares | None = None) -> None:
        self._limits = limits

    @property
    def chores(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What is to be done for ever."""
        return [self._limits.run] if self._limits is not None else []

    async def settled(self) -> None:
        """Waits until this gateway knows its part, not for ever."""
        if self._limits is not None:
            await self._limits.settled(SETTLE_S)

    def close(self) -> None:
        """After all chores have ended."""
        if self._limits is not None:
            self._limits.close()


def build_fleet(
    config: GatewayConfig,
    duty: Callable[[], bool],
    telemetry: FleetTelemetry,
    clock: Callable[[], float],
    limiters: TenantLimiters,
    keyring: Callable[[], Keyring],
) -> Fleet:
    fleet = config.fleet
    if fleet.etcd is None:
        limiters.stand(None)
        return Fleet()
    from gateway.fleet.claim_store import EtcdClaims  # its messages are loaded where there is an etcd
    from membership.etcd.client import EtcdClient

    def limits() -> Mapping[str, TenantLimits]:
        known = keyring()
        tenants = map(known.named, known.tenants)
        return {tenant.name: tenant.limits for tenant in tenants if tenant.limits.are_any}

    if limiters.standing is None:
        limiters.stand(Standing(at_start=1.0 / fleet.gateways))
    name = fleet.name or f"{socket.gethostname()}-{config.port}"
    store = EtcdClaims(fleet.etcd, EtcdClient(fleet.etcd, call_s=CALL_S))
    return Fleet(LimitShares(name, uuid.uuid4().hex, store, limiters, limits, clock, telemetry, duty))
