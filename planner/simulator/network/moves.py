"""Prefixes that move between clusters, over the link between them: one way with the KVCache of requests, the other way alone.

A request stands with its node meanwhile, and waits no longer than it has patience (`Route.fetch_limit_s`); then it computes what
it lacks, as at a gateway (`gateway/pipeline/ticketed.py`). Requests for one prefix share one move.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from msgspec import structs

from planner.decisions.estimates.durations import MoveDelays
from planner.decisions.links.paths import PATH_FAILED
from planner.simulator.loop import Loop
from planner.simulator.network.egress import SimulatedEgress
from planner.simulator.nodes.node import DecodeNode, PrefillNode, SimulatedRequest


class SimulatedMove:
    """One move on its way, and the requests that wait for it."""

    __slots__ = ("began", "ends", "expected_s", "key", "size", "source", "target", "waiting")

    def __init__(
        self,
        source: PrefillNode | DecodeNode,
        target: PrefillNode,
        key: tuple[str, Hashable],
        size: float,
        began: float,
    ) -> None:
        self.source = source.node_id
        self.target = target
        self.ends = f"{source.pool.name} to {target.pool.name}"
        self.key = key  # the target, and the last block: equal for moves that bring about the same
        self.size = size
        self.began = began
        self.expected_s = 0.0
        self.waiting: list[SimulatedRequest] = []


class SimulatedMoves:
    """Carries them out. `on_late(reason)` hears of each request that went on without its prefix."""

    def __init__(self, loop: Loop, block_size: int, on_late: Callable[[str], None]) -> None:
        self._loop = loop
        self._block_size = block_size
        self._on_late = on_late
        self._running: dict[tuple[str, Hashable], SimulatedMove] = {}
        self.delays = MoveDelays()
        self.moved_bytes: Counter[str] = Counter()  # by "source cluster to target cluster"

    def fetch(
        self,
        now: float,
        job: SimulatedRequest,
        source: PrefillNode | DecodeNode,
        target: PrefillNode,
        link: SimulatedEgress,
        size: float,
    ) -> None:
        """Has the prefix of a job sent to the node that computes it, over `link`; `size` are the bytes that it lacks."""
        target.expect(job)
        key = target.node_id, job.hashes[max(0, job.route.cached_tokens // self._block_size - 1)]
        move = self._running.get(key)
        if move is None:
            move = self._running[key] = SimulatedMove(source, target, key, size, now)
            move.expected_s = link.view(now).arrives_s(size)
            link.send(now, size, move)
        move.waiting.append(job)
        self._loop.at(now + job.route.fetch_limit_s, self._on_patience, (move, job))

    def on_delivered(self, now: float, move: SimulatedMove) -> None:
        """The prefix is there."""
        del self._running[move.key]
        self.delays.arrived(move.source, move.target.node_id)
        self.moved_bytes[move.ends] += round(move.size)
        waiting, move.waiting = move.waiting, []
        for job in waiting:
            move.target.put(now, job, expected=True)

    def on_lost(self, now: float, move: SimulatedMove) -> None:
        """The link has failed under it. That is no news of the link: gateways hear that of requests and of probes."""
        del self._running[move.key]
        self.delays.failed(move.source, move.target.node_id, move.expected_s, now - move.began, now)
        waiting, move.waiting = move.waiting, []
        for job in waiting:
            self._go_without(now, move, job, PATH_FAILED)

    def _on_patience(self, now: float, waited: tuple[Any, SimulatedRequest]) -> None:
        move, job = waited
        if job in move.waiting:  # the move goes on: others may have a use for it
            move.waiting.remove(job)
            self._go_without(now, move, job, "late")

    def _go_without(self, now: float, move: SimulatedMove, job: SimulatedRequest, reason: str) -> None:
        self._on_late(f"fetch_{reason}")
        job.cached = move.target.match(job.hashes, job.prompt).num_tokens
        job.route = structs.replace(job.route, fetch_from=None)
        move.target.put(now, job, expected=True)
