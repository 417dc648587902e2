"""Fan-out of node events to watchers, each with a bounded queue of its own."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from transport.control.proto import node_pb2 as pb

MAX_QUEUED_EVENTS = 4096
"""A watcher this far behind is cut off; it watches again and gets a fresh snapshot."""


class WatcherTooSlow(Exception):
    """The watcher's queue overflowed; its stream must end."""


class EventListener(Protocol):
    """Hears events as they are published."""

    def offer(self, event: pb.NodeEvent) -> None: ...


class Watcher:
    """One watcher's queue."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.NodeEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._overflowed = False

    def offer(self, event: pb.NodeEvent) -> None:
        """Queues an event, or marks the watcher as too slow."""
        try:
            self._queue.put_nowait(event)
        except asyncio.QueueFull:
            self._overflowed = True

    async def next(self, timeout_s: float) -> pb.NodeEvent | None:
        """The next event, None after `timeout_s` without one. Raises WatcherTooSlow."""
        if self._overflowed:
            raise WatcherTooSlow
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        return None

    def next_at_once(self) -> pb.NodeEvent | None:
        """The next event if it is there already."""
        return None if self._queue.empty() else self._queue.get_nowait()


class Broadcast:
    """Publishes to all current watchers."""

    def __init__(self) -> None:
        self._watchers: set[EventListener] = set()

    @property
    def watching(self) -> int:
        """How many watch."""
        return len(self._watchers)

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher that hears everything published inside the `with`."""
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def tell(self, listener: EventListener) -> None:
        """Has a listener hear everything from now on."""
        self._watchers.add(listener)

    def forget(self, listener: EventListener) -> None:
        """Undoes `tell`."""
        self._watchers.discard(listener)

    def publish(self, event: pb.NodeEvent) -> None:
        """Offers the event to every watcher; never blocks."""
        for watcher in self._watchers:
            watcher.offer(event)
