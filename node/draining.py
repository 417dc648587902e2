"""A node that refuses new requests: until an operator undoes it, or for good before it ends."""

import asyncio
import logging
from collections.abc import Callable

from node.errors import NodeRefusal

log = logging.getLogger(__name__)

POLL_S = 0.02


class Draining:
    """Whether a node drains (`is_on`); `on_changed` is called with it at each change."""

    def __init__(
        self, node_id: str, now: Callable[[], float], is_idle: Callable[[], bool], on_changed: Callable[[bool], None]
    ) -> None:
        self.is_on = False
        self._is_ending = False
        self._node_id = node_id
        self._now = now
        self._is_idle = is_idle
        self._on_changed = on_changed

    async def begin(self, timeout_s: float, by: str) -> bool:
        """Refuses what is new and waits for what runs. True if all ended in time and no `undo` came."""
        log.info("draining node=%s by=%s", self._node_id, by)
        self.is_on = True
        self._on_changed(True)
        deadline = self._now() + timeout_s
        while self.is_on and not self._is_idle() and self._now() < deadline:  # noqa: ASYNC110 many owners, and no hurry
            await asyncio.sleep(POLL_S)
        return self.is_on and self._is_idle()

    async def for_good(self, timeout_s: float) -> bool:
        """The same before the node ends."""
        self._is_ending = True
        return await self.begin(timeout_s, "its own end")

    def undo(self, by: str) -> None:
        """Takes what is new again. Raises NodeRefusal when the node is about to end."""
        if self._is_ending:
            raise NodeRefusal("draining", f"{self._node_id} is about to end")
        if not self.is_on:
            return
        log.info("taking requests again node=%s by=%s", self._node_id, by)
        self.is_on = False
        self._on_changed(False)
