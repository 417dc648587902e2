"""Prefill and decode nodes under simulation."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hybrid_cache.lookup import MISS, PrefixHit
from planner.profile import DecodeProfile
from planner.routing import Route
from planner.simulator.caches import NodeCache
from planner.simulator.loop import Loop
from planner.simulator.scenario import Pool
from planner.simulator.sharing import FairShare
from planner.views import NodeView, Role

NO_HASHES: tuple[bytes, ...] = ()


class Job:
    """One request on its way."""

    __slots__ = (
        "arrived", "cached", "decode_node", "decode_start", "egress", "est_s", "flows", "forecast", "hashes", "index",
        "output", "prompt", "ready_at", "request_id", "route", "service_s", "token_mark",
    )  # fmt: skip

    def __init__(self, index: int, arrived: float, prompt: int, output: float, hashes: tuple[bytes, ...]) -> None:
        self.index = index
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.hashes = hashes
        self.request_id = ""
        self.cached = 0
        self.ready_at = 0.0  # a fetched prefix is there
        self.flows = 1  # transfers still to be delivered before decode
        self.egress: Any = None
        # Set on the way; a million jobs are made.
        self.route: Route
        self.est_s: float  # predicted prefill time
        self.service_s: float
        self.forecast: float
        self.decode_node: DecodeNode
        self.decode_start: float
        self.token_mark: float


class PrefillNode:
    """One request at a time, first come first served. `on_done(now, job)` is called as each prefill ends."""

    def __init__(
        self, node_id: str, pool: Pool, loop: Loop, cache: NodeCache | None, on_start: Callable[[float, Job], None],
        on_done: Callable[[float, Job], None],
    ) -> None:  # fmt: skip
        self.node_id = node_id
        self.pool = pool
        self.cache = cache
        self.match = cache.cache.match if cache is not None else _nothing_cached
        self.ready = True
        self.since = loop.now
        self.busy_s = 0.0
        self._loop = loop
        self._on_start = on_start
        self._on_done = on_done
        self._queue: deque[Job] = deque()
        self._queued_s = 0.0
        self._free_at = 0.0
        self._running = False
        self._view = NodeView(node_id=node_id, cluster=pool.name, kind=pool.kind, role=Role.PREFILL)

    def __len__(self) -> int:
        return len(self._queue) + self._running

    def view(self, cached_tokens: int) -> NodeView:
        # Most prompts find as much as the one before: nothing, or the system prompt.
        if self._view.cached_tokens != cached_tokens:
            self._view = NodeView(
                node_id=self.node_id,
                cluster=self.pool.name,
                kind=self.pool.kind,
                role=Role.PREFILL,
                cached_tokens=cached_tokens,
            )
        return self._view

    def queue_s(self, now: float) -> float:
        """Time until a request that arrives now would start."""
        if not self._running:
            return 0.0
        left_s = self._free_at - now
        return self._queued_s + left_s if left_s > 0 else self._queued_s

    def put(self, now: float, job: Job) -> None:
        if self._running or self.cache is None:  # an idle node's cache knows better
            job.est_s = self.pool.prefill.with_prefix(job.prompt, job.cached)
        if self._running:
            self._queue.append(job)
            self._queued_s += job.est_s
        else:
            self._start(now, job)

    def _start_next(self, now: float) -> None:
        job = self._queue.popleft()
        self._queued_s = self._queued_s - job.est_s if self._queue else 0.0
        self._start(now, job)

    def _start(self, now: float, job: Job) -> None:
        self._running = True
        if self.cache is not None:
            # What was computed while the request waited may have become a prefix; what was promised may be evicted.
            own = self.cache.begin(job.request_id, job.hashes, job.prompt, now)
            job.cached = max(own, job.cached) if job.route.fetch_from else own
            job.est_s = self.pool.prefill.with_prefix(job.prompt, min(job.cached, job.prompt - 1))
        start = max(now, job.ready_at)
        job.service_s = job.est_s
        self.busy_s += job.service_s
        self._free_at = start + job.service_s
        self._loop.at(self._free_at, self._finish, job)
        self._on_start(start, job)

    def _finish(self, now: float, job: Job) -> None:
        self._running = False
        if self.cache is not None:
            self.cache.end(job.request_id, job.prompt, now)
        if self._queue:
            self._start_next(now)
        self._on_done(now, job)


def _nothing_cached(hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
    return MISS


class DecodeNode:
    """A decode batch of at most `max_running`, the rest waits. `on_start` and `on_done` are told of each request."""

    def __init__(
        self, node_id: str, pool: Pool, loop: Loop, on_start: Callable[[float, Job], None],
        on_done: Callable[[float, Job], None],
    ) -> None:  # fmt: skip
        assert pool.decode is not None
        self.node_id = node_id
        self.pool = pool
        self.profile: DecodeProfile = pool.decode
        self.ready = True
        self.since = loop.now
        self.slot_s = 0.0
        self.running = 0
        self.assigned = 0  # running, waiting, or on the way here
        self._loop = loop
        self._on_start = on_start
        self._on_done = on_done
        self._queue: deque[Job] = deque()
        self._flat = self.profile.step_s_per_request == 0
        # By the number of requests in the batch: a step's time, and the tokens per second that each gets.
        self._step_s = [self.profile.at(max(1, running)) for running in range(self.profile.max_running + 1)]
        self._batch = FairShare([1.0 / step_s for step_s in self._step_s].__getitem__)
        # Step times, and the token marks from which on they held.
        self._steps: list[float] = []
        self._marks: list[float] = []
        self.seen: NodeView | None = None  # the view, until something changes

    def assign(self, count: int) -> None:
        """Requests promised to (or, negative, gone from) this node."""
        self.assigned += count
        self.seen = None

    def view(self) -> NodeView:
        if self.seen is None:
            self.seen = NodeView(
                node_id=self.node_id,
                cluster=self.pool.name,
                kind=self.pool.kind,
                role=Role.DECODE,
                running=self.running,
                waiting=self.assigned - self.running,
                max_running=self.profile.max_running,
            )
        return self.seen

    def put(self, now: float, job: Job) -> None:
        if self.running < self.profile.max_running:
            self._start(now, job)
        else:
            self._queue.append(job)

    def _start(self, now: float, job: Job) -> None:
        self.running += 1
        self.seen = None
        job.decode_start = now
        if self._flat:
            self._loop.at(now + job.output * self.profile.step_s, self._finish_flat, job)
        else:
            self._batch.add(now, job.output, job)
            job.token_mark = self._batch.virtual_time(now)
            self._on_batch(now, job.token_mark)
        self._on_start(now, job)

    def _on_batch(self, now: float, mark: float) -> None:
        self._marks.append(mark)
        self._steps.append(self._step_s[len(self._batch)])
        end = self._batch.next_end(now)
        if end is not None:
            self._loop.at(end, self._on_end, self._batch.version)

    def _on_end(self, now: float, version: int) -> None:
        if version != self._batch.version:
            return
        mark = self._batch.virtual_time(now)
        ended = self._batch.pop_ended(now)
        for job in ended:
            self._leave(now, job, self._longest_tenth(job, max(mark, job.token_mark + job.output)))
        if len(self._batch):
            self._on_batch(now, self._batch.virtual_time(now))
        else:
            self._marks.clear()
            self._steps.clear()
        self._fill(now)

    def _longest_tenth(self, job: Job, end_mark: float) -> float:
        """Mooncake's TBT: the mean of the longest tenth of the intervals between a request's tokens."""
        first = max(0, bisect_right(self._marks, job.token_mark) - 1)
        marks, steps = self._marks[first:], self._steps[first:]
        marks[0] = max(marks[0], job.token_mark)
        marks.append(end_mark)
        wanted = left = max(1.0, job.output / 10)
        total = 0.0
        # Two or three periods make up a tenth; sorting all twenty would take longer.
        while left > 0 and (step := max(steps)) >= 0:
            at = steps.index(step)
            steps[at] = -1.0
            tokens = min(left, marks[at + 1] - marks[at])
            total += tokens * step
            left -= tokens
        return total / (wanted - left) if wanted > left else self.profile.at(1)

    def _finish_flat(self, now: float, job: Job) -> None:
        self._leave(now, job, self.profile.step_s)
        self._fill(now)

    def _leave(self, now: float, job: Job, tbt_s: float) -> None:
        self.running -= 1
        self.assigned -= 1
        self.seen = None
        self.slot_s += now - job.decode_start
        job.service_s = tbt_s
        self._on_done(now, job)

    def _fill(self, now: float) -> None:
        while self._queue and self.running < self.profile.max_running:
            self._start(now, self._queue.popleft())
