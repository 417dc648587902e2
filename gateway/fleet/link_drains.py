"""Links that operators drain at one gateway are drained at all, and stay so when all are started anew.

Each gateway keeps its own list, which its workers share (`gateway.cluster.drained_links`); the switch changes it at once, whether
the registry answers or not. Four times a second it is compared with the registry's, and with what both said the last time:

    changed here    the registry is told: now, or when it is back
    changed there   it is drained here, or used again
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from gateway.cluster.drained_links import DrainedLinks, Link
from gateway.fleet.errors import FleetFailed
from membership.backoff import Backoff
from transport.threads import in_daemon_thread

log = logging.getLogger("prfaas.gateway.fleet")

LOOK_S: Final = 0.25
MOST_PAUSE_S: Final = 2.0
NOTHING: Final[frozenset[Link]] = frozenset()


@dataclass(frozen=True, slots=True)
class DrainChanges:
    """What is to be done for two lists to say the same."""

    tell_drained: frozenset[Link] = NOTHING
    tell_used: frozenset[Link] = NOTHING
    drain: frozenset[Link] = NOTHING
    use: frozenset[Link] = NOTHING


def changes_of(own: frozenset[Link], registry: frozenset[Link], both: frozenset[Link] | None) -> DrainChanges:
    """`both` is what they agreed on; None: that is not known, and a drain on either side counts."""
    if both is None:
        both = own & registry
    # Where both have changed a link, they have made the same of it.
    return DrainChanges(
        tell_drained=own - both - registry,
        tell_used=(both - own) & registry,
        drain=registry - both - own,
        use=(both - registry) & own,
    )


class DrainStore(Protocol):
    """The registry's list. Every method may block, and raises FleetFailed."""

    def links(self) -> frozenset[Link]: ...

    def set(self, link: Link, is_drained: bool) -> None: ...

    def close(self) -> None: ...


class LinkDrains:
    """Keeps `own` and the registry's list the same; of several workers, one does."""

    def __init__(
        self,
        own: DrainedLinks,
        store: DrainStore,
        on_failure: Callable[[str, str], None],
        is_on_duty: Callable[[], bool] = lambda: True,
    ) -> None:
        self._own = own
        self._store = store
        self._on_failure = on_failure
        self._is_on_duty = is_on_duty
        self._both: frozenset[Link] | None = None
        self._pauses = Backoff(np.random.default_rng(), LOOK_S, MOST_PAUSE_S)
        self._is_failing = False
        self._has_looked = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:  # noqa: ASYNC110 time is what it waits for
            await asyncio.sleep(await self._pause_s() if self._is_on_duty() else LOOK_S)

    async def settled(self, patience_s: float) -> None:
        """Waits for the first look, where it is ours."""
        if self._is_on_duty():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._has_looked.wait()

    async def step(self) -> None:
        """Compares once. Raises FleetFailed; OSError where workers cannot be told."""
        registry = await in_daemon_thread("drains", self._store.links)
        # From here to the end of what changes here, nothing else runs: the switch is not overtaken.
        own = self._own.links()
        changes = changes_of(own, registry, self._both)
        for link in changes.drain:
            self._own.set(link, True)
        for link in changes.use:
            self._own.set(link, False)
        told = (registry | changes.tell_drained) - changes.tell_used
        if changes.tell_drained or changes.tell_used:
            await in_daemon_thread("drains", lambda: self._tell(changes))
        self._both = told

    def close(self) -> None:
        """After `run` has ended."""
        self._store.close()

    def _tell(self, changes: DrainChanges) -> None:
        for link in changes.tell_drained:
            self._store.set(link, True)
        for link in changes.tell_used:
            self._store.set(link, False)

    async def _pause_s(self) -> float:
        try:
            await self.step()
        except (FleetFailed, OSError) as failure:
            self._on_failure("drains", failure.reason if isinstance(failure, FleetFailed) else "not_shared")
            if not self._is_failing:
                self._is_failing = True
                log.warning("drained links stay as they were; other gateways do not hear of changes: %s", failure)
            return self._pauses.failed()
        self._has_looked.set()
        self._is_failing = False
        self._pauses.succeeded()
        return LOOK_S
