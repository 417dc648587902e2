"""Prefixes that move from a node that has them to one that needs them. No engine takes part.

    target.Reserve(prefix) ──ticket──► source.Load ──bytes, behind those of live requests──► target.Commit: prefix cache

A move only saves work: where one fails, is late or is one too many, the request computes what it lacks. It waits no longer
than it has patience. Every move ends within its own time limit, also when the request that asked for it is gone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.cluster.node import ClusterNode
from gateway.errors import AgentCallFailed
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics

log = logging.getLogger("prfaas.gateway.moves")

OK: Final = "ok"
LATE: Final = "late"  # still under way when the request had no more patience


@dataclass(frozen=True, slots=True)
class PrefixTransfer:
    """The prefix of `num_tokens` tokens that ends with the last of `hashes` goes from one node to another.

    `num_bytes` is what that is at most: the target may have some of it.
    """

    source: ClusterNode
    target: ClusterNode
    hashes: tuple[bytes, ...]
    num_tokens: int
    num_bytes: int
    reason: str = "request"
    tenant: str = ""  # whose request asked for it

    @property
    def key(self) -> tuple[str, bytes]:
        """Equal for moves that bring about the same."""
        return self.target.id, self.hashes[-1]


class PrefixTransfers:
    """Carries moves out, `limit` at a time; the rest is refused.

    `on_moved` hears of each that arrived (bytes sent, seconds), `on_failed` of each that did not (seconds until then),
    `on_ended` of both.
    """

    def __init__(
        self,
        metrics: Metrics,
        tasks: TaskSet,
        clock: Callable[[], float],
        *,
        limit: int,
        timeout_s: float,
        on_moved: Callable[[PrefixTransfer, int, float], None] = lambda move, sent, seconds: None,
        on_failed: Callable[[PrefixTransfer, float], None] = lambda move, seconds: None,
        on_ended: Callable[[PrefixTransfer, str, int, float], None] = lambda move, outcome, sent, seconds: None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._limit = limit
        self._timeout_s = timeout_s
        self._on_moved = on_moved
        self._on_failed = on_failed
        self._on_ended = on_ended
        self._running: dict[tuple[str, bytes], asyncio.Task[str]] = {}
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        """Waits for what is under way."""
        await self._tasks.join(self._timeout_s)

    def left_out(self, move: PrefixTransfer, why: str) -> None:
        """A move that could have been made is not; it is counted."""
        self._metrics.upkeep.moved(move.reason, why)

    async def make(self, move: PrefixTransfer, patience_s: float) -> str:
        """How it ended: OK, LATE, or the reason to count. Requests for one prefix share one move."""
        task = self._running.get(move.key) or self.start(move)
        if task is None:
            return "busy"
        # Not cancelled: the prefix may be of use to others when this request is gone.
        done, _ = await asyncio.wait([task], timeout=patience_s)
        return task.result() if done else LATE

    def start(self, move: PrefixTransfer) -> "asyncio.Task[str] | None":
        """The same without waiting; None if there are too many, or it is under way already."""
        if len(self._running) >= self._limit or move.key in self._running:
            self._metrics.upkeep.moved(move.reason, "busy")
            return None
        self._running[move.key] = task = self._tasks.start(self._run(move), "move")
        return task

    def drop(self, node: ClusterNode, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> None:
        """Has a node give up what is cold of a prefix, without waiting; what comes of it is counted."""
        self._tasks.start(self._drop(node, hashes, keep_tokens, unused_s), "drop")

    async def _drop(self, node: ClusterNode, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> None:
        pages = 0
        try:
            pages = await node.agent.drop_prefix(hashes, keep_tokens, unused_s)
            outcome = OK if pages else "in_use"
        except AgentCallFailed as error:
            outcome = error.reason
        self._metrics.upkeep.dropped(outcome)
        log.info("cold copy dropped node=%s blocks=%d pages=%d outcome=%s", node.id, len(hashes), pages, outcome)

    async def _run(self, move: PrefixTransfer) -> str:
        sent = 0
        began = self._clock()

        def on_sent(num_bytes: int) -> None:
            nonlocal sent
            sent = num_bytes  # whatever becomes of them

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._carry_out(move, on_sent)
            outcome = OK
        except TimeoutError:
            outcome = "timeout"
        except AgentCallFailed as error:
            outcome = error.reason
        finally:
            del self._running[move.key]
        seconds = self._clock() - began
        if outcome == OK:
            self._on_moved(move, sent, seconds)
        else:
            self._on_failed(move, seconds)
        self._on_ended(move, outcome, sent, seconds)
        self._metrics.upkeep.moved(move.reason, outcome, sent)
        self._metrics.sent_for(move.tenant, move.source.cluster, move.target.cluster, "move", sent)
        log.info(
            "prefix moved from=%s to=%s tokens=%d bytes=%d reason=%s outcome=%s seconds=%.3f",
            move.source.id, move.target.id, move.num_tokens, sent, move.reason, outcome, seconds,
        )  # fmt: skip
        return outcome

    async def _carry_out(self, move: PrefixTransfer, on_sent: Callable[[int], None]) -> None:
        name = f"prefix-{move.hashes[-1].hex()[:16]}"
        ticket = await move.target.agent.reserve_prefix(
            name, move.hashes, move.num_tokens, self._timeout_s, move.source.place
        )
        try:
            on_sent(await move.source.agent.load(name, move.hashes, ticket, self._timeout_s))
            await move.target.agent.commit(ticket.transfer_id, self._timeout_s)
        except BaseException:
            self._tasks.start(_abort(move.target, ticket.transfer_id), "abort")
            raise


async def _abort(target: ClusterNode, transfer_id: str) -> None:
    try:
        await target.agent.abort(transfer_id, "prefix_not_moved")
    except AgentCallFailed as error:
        log.warning("abort of %s failed (its lease will end it): %s", transfer_id, error)


def prefix_of(hashes: Sequence[bytes], num_tokens: int, block_size: int) -> tuple[bytes, ...]:
    """The hashes of the full blocks of a prompt's first `num_tokens` tokens."""
    return tuple(hashes[: num_tokens // block_size])
