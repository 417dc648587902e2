"""What gateways far away hear of a node: its description, its load now and then, and a digest of its cache.

One digest serves all of them. It is kept only while some of them watch.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hybrid_cache.cache.events import BlocksStored, CacheEvent, Medium
from hybrid_cache.hashing.block_hash import split_hashes
from hybrid_cache.index.digest import NAME_BYTES, WHOLE_NAMES, CacheDigest, DigestCleared, DigestEvent
from node.control.broadcast import Broadcast, Watcher
from transport.control.proto import node_pb2 as pb

TELL_S: Final = 1.0  # between two words of what has changed
PART_NAMES: Final = 65_536  # of a digest in one message
MOST_CHANGES: Final = 65_536  # of names, before they are told whether asked for or not
MEDIA: Final = {pb.MEDIUM_SSD: Medium.SSD, pb.MEDIUM_ENGINE: Medium.ENGINE}  # anything else is memory


class Summaries:
    """Listens to a node's events for watchers far away."""

    def __init__(
        self,
        events: Broadcast,
        snapshot: Callable[[], Iterable[CacheEvent]],
        full_groups: Callable[[], Collection[int]],
        now: Callable[[], float],
    ) -> None:
        """`full_groups` are those of the layout, once there is one: of their blocks only some have names."""
        self._events = events
        self._snapshot = snapshot
        self._full_groups = full_groups
        self._now = now
        self._far = Broadcast()
        self._digest = CacheDigest()
        self._unread: Iterator[CacheEvent] | None = None  # what is cached, as far as it is not in the digest yet
        self._told_at = float("-inf")

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """A watcher of everything that is told from now on; `whole` is what there is, once it is `read`."""
        if not self._far.watching:
            self._digest = CacheDigest()
            self._events.tell(self)  # what changes while the snapshot is read is heard, too: the last word counts
            self._unread = iter(self._snapshot())
        else:
            self._tell_changes()  # so that all who watch have been told the same
        with self._far.watch() as watcher:
            try:
                yield watcher
            finally:
                if self._far.watching == 1:
                    self._events.forget(self)
                    self._digest, self._unread = CacheDigest(), None

    async def read(self) -> None:
        """Takes in what is cached, part by part, between which the loop goes on. All who watch take part in it."""
        while self._unread is not None:
            self._read_part()
            await asyncio.sleep(0)

    def _read_part(self) -> None:
        assert self._unread is not None
        part = next(self._unread, None)
        if isinstance(part, BlocksStored):
            self._stored(part.group, part.hashes, part.medium)
        elif part is None:
            self._unread = None
        self._digest.take()  # everyone who watches is told all of it

    def whole(self, most_names: int = WHOLE_NAMES) -> Iterator[pb.NodeEvent]:
        """The digest, in messages that are made when they are asked for."""
        while self._unread is not None:
            self._read_part()
        parts = self._digest.whole(most_names)
        while True:
            self._tell_changes()  # a part counts on it
            if (event := next(parts, None)) is None:
                return
            yield from messages([event])

    def tell(self) -> None:
        """Tells all who watch what has changed, if the last word is TELL_S old."""
        if self._now() - self._told_at >= TELL_S:
            self._tell_changes()

    def _tell_changes(self) -> None:
        if self._unread is not None:
            return  # no watcher was told anything yet
        self._told_at = self._now()
        for message in messages(self._digest.take()):
            self._far.publish(message)

    def offer(self, event: pb.NodeEvent) -> None:
        """Hears an event of the node. Reports of its load are left out: each watcher has one now and then."""
        match event.WhichOneof("event"):
            case "stored":
                stored = event.stored
                self._stored(stored.group, split_hashes(stored.hashes), _medium(stored.medium))
            case "removed":
                removed = event.removed
                hashes = split_hashes(removed.hashes)
                is_sampled = removed.group in self._full_groups()
                self._digest.removed(removed.group, hashes, _medium(removed.medium), is_sampled=is_sampled)
            case "cleared":
                every = event.cleared.medium == pb.MEDIUM_UNSPECIFIED
                self._digest.clear(None if every else _medium(event.cleared.medium))
            case "load":
                pass
            case _:
                self._far.publish(event)
        if self._digest.num_changes >= MOST_CHANGES:
            self._tell_changes()

    def _stored(self, group: int, hashes: Sequence[bytes], medium: Medium) -> None:
        self._digest.stored(group, hashes, medium, is_sampled=group in self._full_groups())


def messages(events: list[DigestEvent]) -> list[pb.NodeEvent]:
    """Events of a digest as they are sent, none of them long."""
    found: list[pb.NodeEvent] = []
    step = PART_NAMES * NAME_BYTES
    for event in events:
        if isinstance(event, DigestCleared):
            found.append(pb.NodeEvent(digest=pb.CacheDigest(anew=True)))
            continue
        added, removed = b"".join(event.added), b"".join(event.removed)
        medium = pb.MEDIUM_ENGINE if event.medium is Medium.ENGINE else pb.MEDIUM_MEMORY
        for start in range(0, max(len(added), len(removed)), step):
            part = pb.DigestPart(
                group=event.group,
                medium=medium,
                added=added[start : start + step],
                removed=removed[start : start + step],
            )
            found.append(pb.NodeEvent(digest=pb.CacheDigest(parts=[part])))
    return found


def _medium(medium: pb.Medium) -> Medium:
    return MEDIA.get(medium, Medium.MEMORY)
