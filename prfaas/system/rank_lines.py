"""What the nodes of one group of ranks tell each other through the process that has started them (`node.process.rank_group`)."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Final, Self

from node.process.rank_group import DRAINED, ENGINE_ENDED, HEARD, LINE_VARIABLE, MAY_END, START_ANEW, STARTS_ANEW

MOST_WORDS: Final = 64  # in one read


class RankTalk:
    """Decides what each rank is told; ranks are numbers from 0."""

    def __init__(self, count: int) -> None:
        self._running = set(range(count))
        self._busy = set(range(count))
        # Ranks that were told to start anew: what they say of their engine until they do so is about the same death.
        self._told = set[int]()

    def heard(self, rank: int, word: bytes) -> Iterator[tuple[int, bytes]]:
        """The rank and the word of each message that follows from this one."""
        if word == ENGINE_ENDED:
            yield rank, HEARD
            yield from self._has_ended(rank)
        if word == STARTS_ANEW:
            self._told.discard(rank)
        if word == DRAINED:
            yield from self._has_drained(rank)

    def gone(self, rank: int) -> Iterator[tuple[int, bytes]]:
        """The messages that follow from the end of a rank's process."""
        self._running.discard(rank)
        self._told.discard(rank)
        yield from self._has_drained(rank)

    def _has_ended(self, rank: int) -> Iterator[tuple[int, bytes]]:
        if rank not in self._told:
            others = self._running - {rank} - self._told
            self._told |= others
            yield from ((other, START_ANEW) for other in sorted(others))

    def _has_drained(self, rank: int) -> Iterator[tuple[int, bytes]]:
        self._busy.discard(rank)
        if not self._busy:
            yield from ((other, MAY_END) for other in sorted(self._running))


class RankLines:
    """A socket to each rank's node; empty where the ranks form no group."""

    def __init__(self, count: int) -> None:
        self._talk = RankTalk(count)
        pairs = [socket.socketpair() for _ in range(count)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        for ours in self._ours:
            ours.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, ours in enumerate(self._ours):
            self._forget(rank)
            ours.close()
        for theirs in self._theirs:
            theirs.close()

    def descriptors(self, rank: int) -> tuple[int, ...]:
        """What the rank's process inherits."""
        return (self.theirs(rank).fileno(),) if self._theirs else ()

    def environment(self, rank: int) -> dict[str, str]:
        """Where that process finds it."""
        return {LINE_VARIABLE: str(self.theirs(rank).fileno())} if self._theirs else {}

    def theirs(self, rank: int) -> socket.socket:
        """The node's end of the line."""
        return self._theirs[rank]

    def started(self, rank: int) -> None:
        """The rank's process has its end of the line: from now on we listen at ours."""
        if self._ours:
            self._theirs[rank].close()
            asyncio.get_running_loop().add_reader(self._ours[rank], self._hear, rank)

    def not_started(self, rank: int) -> None:
        """The rank gets no process: none waits for it."""
        if self._ours:
            self._theirs[rank].close()
            self._tell(self._talk.gone(rank))

    def _hear(self, rank: int) -> None:
        words = b""
        with contextlib.suppress(OSError):
            words = self._ours[rank].recv(MOST_WORDS)
        for word in words:
            self._tell(self._talk.heard(rank, bytes([word])))
        if not words:
            self._forget(rank)
            self._tell(self._talk.gone(rank))

    def _forget(self, rank: int) -> None:
        if self._ours[rank].fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._ours[rank])

    def _tell(self, words: Iterator[tuple[int, bytes]]) -> None:
        for rank, word in words:
            with contextlib.suppress(OSError):  # it has just ended
                self._ours[rank].send(word)
