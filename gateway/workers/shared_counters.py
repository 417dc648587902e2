"""What the workers of a gateway count together: a file of numbers that every one of them has mapped.

    head    how many workers and nodes · the last record's number · restarts · columns in use · clusters and nodes, each by a
            digest of its name
    rows    one per worker, written by it alone: its state, its places, since when its first request waits for one, how often
            it has said that it is there, and of every node the requests, tokens and bytes that it has under way there, and
            the share of time that it gave it prompts for

A node has a column by its identity, so all workers agree on it in whatever order they hear of nodes. A column that no worker has
a node for goes to the next one that comes.

A reader adds the rows up; a number that is being written is read as it was or as it will be. Only where a bound must hold
exactly is the file locked, for microseconds; the lock goes with its process. The row of a worker that has died is cleared by the
parent, so nothing of it stays.
"""

import logging
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from math import exp
from pathlib import Path
from typing import Final

import numpy as np

from gateway.cluster.node import ClusterNode, NodeWork
from gateway.shared_array import SharedArray
from planner.decisions.admission.places import is_turn
from planner.decisions.estimates.decoding import PREFILL_SHARE_S, PrefillShare

log = logging.getLogger("prfaas.gateway.workers")

HEAD_CELLS: Final = 8
WORKERS, NODES, LAST_SEQ, RESTARTS, COLUMNS = range(5)
MOST_NODES: Final = 4096  # at once; the file is sparse
MOST_CLUSTERS: Final = 64
MORE_CLUSTERS: Final = 8  # than nodes: names that were once a cluster's keep their column
NANOSECONDS: Final = 10**9  # in a second
OWN_CELLS: Final = 6
STATE, IN_FLIGHT, WAITING, BEATS, PLACES_WANTED, FIRST_SINCE = range(OWN_CELLS)


class WorkerState(IntEnum):
    """What a worker does."""

    NONE = 0  # it starts, or is gone
    WITHOUT_NODES = 1
    READY = 2
    DRAINING = 3


class SharedCounters:
    """The file, as the worker `number` or the parent (None) sees it."""

    def __init__(self, path: Path, number: int | None = None) -> None:
        """Maps a board that has been created. Raises OSError."""
        self._array = SharedArray(path, np.int64)
        self._head, rest = np.split(self._array.cells, [HEAD_CELLS])
        self.workers, nodes = int(self._head[WORKERS]), int(self._head[NODES])
        clusters = _clusters_for(nodes)
        self._clusters, self._nodes, cells = np.split(rest, np.cumsum([clusters, nodes]))
        self._rows = cells.reshape(self.workers, -1)
        # By worker and node: whether it has it; requests and tokens; share of prompts and when, in seconds; promised bytes by
        # cluster.
        widths = np.cumsum([OWN_CELLS, nodes, 2 * nodes, 2 * nodes])
        _, self._has, work, share, promised = np.split(self._rows, widths, axis=1)
        self._work = work.reshape(self.workers, nodes, 2)
        self._share = share.view(np.float64).reshape(self.workers, nodes, 2)
        self._promised = promised.reshape(self.workers, nodes, clusters)
        self._own = number or 0
        self._names: dict[int, str] = {}  # of clusters, by their column
        self._columns: dict[ClusterNode, int] = {}
        self._late: dict[int, list[ClusterNode]] = {}  # that have left with work, and whose column another node has

    @staticmethod
    def create(path: Path, workers: int, nodes: int) -> None:
        """An empty board for so many at once. Raises OSError."""
        clusters = _clusters_for(nodes)
        row = OWN_CELLS + 5 * nodes + nodes * clusters
        head = np.array([workers, nodes], np.int64).tobytes()
        SharedArray.create(path, HEAD_CELLS + clusters + nodes + workers * row, head)

    def close(self) -> None:
        """Lets go of the file; it must not be asked any more."""
        del self._head, self._clusters, self._nodes, self._rows, self._has, self._work, self._share, self._promised
        self._array.close()

    # Workers

    def be(self, state: WorkerState) -> None:
        """This worker's state from now on; said now and then, it says that the worker is there, too."""
        self._rows[self._own, STATE] = state
        self._rows[self._own, BEATS] += 1

    def state(self, number: int) -> WorkerState:
        """What a worker says of itself."""
        return WorkerState(int(self._rows[number, STATE]))

    def beats(self, number: int) -> int:
        """How often a worker has said what it does: another number each time it is looked at, or it is stopped, or stuck."""
        return int(self._rows[number, BEATS])

    def states(self) -> list[WorkerState]:
        """Of all workers."""
        return [self.state(number) for number in range(self.workers)]

    @property
    def restarts(self) -> int:
        """Workers that were started again."""
        return int(self._head[RESTARTS])

    def clear(self, number: int) -> None:
        """The parent's: a worker has ended, and with it all that it had."""
        with self._array.locked():
            self._rows[number] = 0

    def restarted(self) -> None:
        """The parent's: another worker takes the place of one that ended."""
        self._head[RESTARTS] += 1

    # Places and numbers

    def next_seq(self) -> int:
        """A number for a record, which no other worker's record gets."""
        with self._array.locked():
            self._head[LAST_SEQ] += 1
            return int(self._head[LAST_SEQ])

    def last_seq(self) -> int:
        """The number given out last."""
        with self._array.locked():
            return int(self._head[LAST_SEQ])

    def taken(self, kind: int) -> int:
        """Places of a kind that all workers have taken."""
        return sum(self._rows[:, kind].tolist())  # of a few numbers: the library's sum takes longer

    def take(self, kind: int, limit: int) -> bool:
        """Takes a place for this worker, unless all of them have `limit` already."""
        with self._array.locked():
            if self.taken(kind) >= limit:
                return False
            self._rows[self._own, kind] += 1
            return True

    def give_back(self, kind: int) -> None:
        """This worker's place is free."""
        self._rows[self._own, kind] -= 1

    def first_waits(self, since: float | None) -> None:
        """Since when the first request waits that this worker has no place in flight for; None: none waits."""
        self._rows[self._own, FIRST_SINCE] = 0 if since is None else max(1, round(since * NANOSECONDS))

    def take_in_turn(self, limit: int) -> bool:
        """Takes a place in flight for that request, if it is its turn among those of all workers."""
        with self._array.locked():
            if not is_turn(limit, self.taken(IN_FLIGHT), self._rows[:, FIRST_SINCE].tolist(), self._own):
                return False
            self._rows[self._own, IN_FLIGHT] += 1
            return True

    # Work on nodes

    def join(self, nodes: Sequence[ClusterNode]) -> None:
        """What these nodes are given here, all workers see from now on.

        One for which there is no room keeps what it is given to this worker.
        """
        with self._array.locked():
            for node in nodes:
                if (column := self._column_of(node.member_id)) is None:
                    log.error(
                        "%s is counted by each worker alone: there are more than %d nodes", node.id, len(self._nodes)
                    )
                    continue
                self._columns[node] = column
                node.shared = SharedWork(self, column)
                node.prefill_share = SharedShare(self, column)

    def leave(self, node: ClusterNode) -> None:
        """A node has left, and this worker has nothing under way there any more, or waits no longer for its end."""
        column = self._columns.pop(node, None)
        if column is None:
            return
        if column in self._columns.values():  # another one follows it, and has what this one still has
            if node.own_requests:
                self._late.setdefault(column, []).append(node)
            else:
                _alone([node])
            return
        _alone([node, *self._late.pop(column, ())])
        own = self._own
        with self._array.locked():
            self._work[own, column], self._share[own, column], self._promised[own, column] = 0, 0.0, 0
            self._has[own, column] = 0

    def _column_of(self, name: str) -> int | None:
        """The column of a node, which this worker has from now on; None when there are too many. To be called locked."""
        digest, used = _digest(name), int(self._head[COLUMNS])
        found = np.flatnonzero(self._nodes[:used] == digest)
        if not found.size:
            found = np.flatnonzero(self._has[:, :used].sum(axis=0) == 0)
        column = int(found[0]) if found.size else used
        if column == len(self._nodes):
            return None
        self._head[COLUMNS] = max(used, column + 1)
        self._nodes[column] = digest
        self._has[self._own, column] = 1
        return column

    def catch_up(self, nodes: Sequence[ClusterNode]) -> None:
        """What all workers have under way on these nodes, as the next decision is to see it."""
        used, clusters = int(self._head[COLUMNS]), int(np.count_nonzero(self._clusters))
        total = self._work[:, :used].sum(axis=0).tolist()
        promised = self._promised[:, :used, :clusters].sum(axis=0)
        holders: dict[int, ClusterNode] = {}  # of a moving node, the one at the address that decisions know
        for node in nodes:
            if (at := self._columns.get(node)) is not None:
                node.pending_requests, node.pending_tokens = total[at]
                node.promised_bytes.clear()
                holders[at] = node
        for row, column in np.argwhere(promised):
            if (holder := holders.get(int(row))) is not None and (name := self._name(int(column), nodes)):
                holder.promised_bytes[name] = int(promised[row, column])

    def pend(self, column: int, sign: int, work: NodeWork) -> None:
        """Adds work of this worker on a node, or takes it away."""
        cells = self._work[self._own, column]
        cells[0] += sign
        cells[1] += sign * work.tokens
        if work.promised_bytes and (cluster := self._column(work.destination)) is not None:
            self._promised[self._own, column, cluster] += sign * work.promised_bytes

    def give_prompt(self, column: int, seconds: float, now: float) -> None:
        """This worker has given a decode node a prompt to compute."""
        cells = self._share[self._own, column]
        cells[0] = cells[0] * exp((cells[1] - now) / PREFILL_SHARE_S) + seconds / PREFILL_SHARE_S
        cells[1] = now

    def prompt_share(self, column: int, now: float) -> float:
        """The part of its time for which all workers have lately given a node prompts."""
        shares: list[tuple[float, float]] = self._share[:, column].tolist()
        return sum((share * exp((at - now) / PREFILL_SHARE_S) for share, at in shares), 0.0)

    def _column(self, cluster: str) -> int | None:
        """Of a cluster's name; None when too many names have been seen."""
        digest = _digest(cluster)
        if (known := np.flatnonzero(self._clusters == digest)).size:
            return int(known[0])
        with self._array.locked():
            free = np.flatnonzero((self._clusters == 0) | (self._clusters == digest))
            if not free.size:
                return None
            self._clusters[free[0]] = digest
            return int(free[0])

    def _name(self, column: int, nodes: Sequence[ClusterNode]) -> str | None:
        if column not in self._names:
            digest = int(self._clusters[column])
            name = next((node.cluster for node in nodes if _digest(node.cluster) == digest), None)
            if name is None:  # this process has not heard of it yet
                return None
            self._names[column] = name
        return self._names[column]


def _alone(nodes: Sequence[ClusterNode]) -> None:
    """What these nodes are given is this worker's own affair from now on."""
    for node in nodes:
        node.shared, node.prefill_share = None, PrefillShare()


def _clusters_for(nodes: int) -> int:
    return min(nodes + MORE_CLUSTERS, MOST_CLUSTERS)


def _digest(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True) or 1


class SharedSlots:
    """Places of all workers."""

    def __init__(self, board: SharedCounters, kind: int) -> None:
        self._board = board
        self._kind = kind

    @property
    def taken(self) -> int:
        return self._board.taken(self._kind)

    def take(self, limit: int) -> bool:
        return self._board.take(self._kind, limit)

    def give_back(self) -> None:
        self._board.give_back(self._kind)


class SharedInFlightSlots(SharedSlots):
    """Those of requests in flight."""

    def __init__(self, board: SharedCounters) -> None:
        super().__init__(board, IN_FLIGHT)

    def first_waits(self, since: float | None) -> None:
        self._board.first_waits(since)

    def take_in_turn(self, limit: int) -> bool:
        return self._board.take_in_turn(limit)


class SharedWork:
    """A node's column."""

    def __init__(self, board: SharedCounters, column: int) -> None:
        self._board = board
        self._column = column

    def pend(self, sign: int, work: NodeWork) -> None:
        self._board.pend(self._column, sign, work)


class SharedShare(PrefillShare):
    """The part of its time that a decode node has lately spent on prompts of any worker."""

    def __init__(self, board: SharedCounters, column: int) -> None:
        super().__init__()
        self._board = board
        self._column = column

    def add(self, seconds: float, now: float) -> None:
        self._board.give_prompt(self._column, seconds, now)

    def at(self, now: float) -> float:
        return self._board.prompt_share(self._column, now)
