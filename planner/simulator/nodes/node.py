"""Prefill and decode nodes under simulation."""

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any

from hybrid_cache.cache.lookup import MISS, PrefixHit
from planner.decisions.estimates.decoding import PrefillShare
from planner.decisions.routing.arrivals import Arrivals, SharedPrefix
from planner.decisions.routing.offload import Route
from planner.decisions.routing.promises import Promises
from planner.decisions.views import NodeView, Role
from planner.model.profile import DecodeProfile
from planner.simulator.loop import Loop
from planner.simulator.nodes.caches import SimulatedCache
from planner.simulator.nodes.standstills import Standstills
from planner.simulator.scenario import Pool
from planner.simulator.sharing import FairShare

NO_HASHES: tuple[Hashable, ...] = ()


class Coming:
    """A job's KVCache on its way to its decode node, and the jobs that wait until it has landed, or will not."""

    __slots__ = ("expected_at", "hashes", "waiting")

    def __init__(self, hashes: tuple[Hashable, ...], expected_at: float) -> None:
        self.hashes = hashes  # of its full blocks
        self.expected_at = expected_at
        self.waiting: list[SimulatedRequest] = []


class SimulatedRequest:
    """One request on its way."""

    __slots__ = (
        "arrived", "beside", "blocks", "cached", "coming", "decode_node", "decode_start", "egress", "est_s", "failed", "flows",
        "forecast", "given", "hashes", "have", "index", "is_lost", "output", "prompt", "queued", "ready_at", "request_id",
        "route", "service_s", "unsent",
    )  # fmt: skip

    def __init__(self, index: int, arrived: float, prompt: int, output: float, hashes: tuple[Hashable, ...]) -> None:
        self.index = index
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.hashes = hashes
        self.blocks = hashes  # those that are full
        self.request_id = ""
        self.cached = 0
        self.queued = 0  # tokens that count as its work on a node
        self.coming: Coming | None = None
        self.have = 0  # tokens of attention that the decode node holds already
        self.ready_at = 0.0  # a fetched prefix is there
        self.flows = 1  # transfers still to be delivered before decode
        self.egress: Any = None
        self.failed: tuple[str, ...] = ()  # prefill nodes that computed it in vain
        self.forecast = 0.0  # when decode was predicted to begin, where that is forecast
        self.is_lost = False  # the transfer was: what its node still computes is wasted
        # Set on the way; a million jobs are made.
        self.route: Route
        self.est_s: float  # predicted prefill time
        self.service_s: float
        self.unsent: float  # bytes that its egress has been promised
        self.decode_node: DecodeNode
        self.decode_start: float
        self.beside: int  # requests that decoded with it when it began, itself included
        self.given: array[float]

    def again(self) -> "SimulatedRequest":
        """The same request, to take another way to its decode node."""
        other = SimulatedRequest(self.index, self.arrived, self.prompt, self.output, self.hashes)
        other.blocks, other.request_id, other.have = self.blocks, self.request_id, self.have
        other.route, other.cached, other.queued = self.route, self.cached, self.queued
        other.coming, other.decode_node, other.forecast = self.coming, self.decode_node, self.forecast
        other.failed = (*self.failed, self.route.prefill_node or "")
        return other


class PrefillNode:
    """One request at a time, first come first served. `on_done(now, job)` is called as each prefill ends."""

    def __init__(
        self, node_id: str, pool: Pool, loop: Loop, cache: SimulatedCache | None,
        on_start: Callable[[float, SimulatedRequest], None], on_done: Callable[[float, SimulatedRequest], None],
    ) -> None:  # fmt: skip
        self.node_id = node_id
        self.pool = pool
        self.cache = cache
        self.match = cache.match if cache is not None else _nothing_cached
        self.ready = True
        self.since = loop.now
        self.busy_s = 0.0
        self._loop = loop
        self._on_start = on_start
        self._on_done = on_done
        self._queue: deque[SimulatedRequest] = deque()
        self._queued_s = 0.0
        self._free_at = 0.0
        self._running = False
        self._expected = 0  # jobs that wait for a prefix
        self.queued_tokens = 0  # that wait or are computed
        self._promises = Promises()
        self._view = NodeView(node_id=node_id, cluster=pool.name, kind=pool.kind, role=Role.PREFILL)

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run. Not its length: an idle node is no less of one."""
        return len(self._queue) + self._running + self._expected

    def view_for(self, job: SimulatedRequest) -> NodeView:
        """As this prompt sees it: what will have been computed when its turn comes counts, but cannot be sent yet."""
        held = self.match(job.hashes, job.prompt).num_tokens
        # All that is promised runs, waits or is expected.
        if not (self._running or self._expected) or self.cache is None:
            seen = self._view
            return seen if seen.cached_tokens == held and not seen.immovable_tokens else self.view(held)
        size = self.cache.layout.block_size
        promised = self._promises.longest(job.blocks, held // size) * size
        return self.view(promised, promised - held)

    def view(self, cached_tokens: int, immovable_tokens: int = 0) -> NodeView:
        # Most prompts find as much as the one before: nothing, or the system prompt.
        seen = self._view
        if seen.cached_tokens != cached_tokens or seen.immovable_tokens != immovable_tokens:
            self._view = NodeView(
                node_id=self.node_id,
                cluster=self.pool.name,
                kind=self.pool.kind,
                role=Role.PREFILL,
                cached_tokens=cached_tokens,
                immovable_tokens=immovable_tokens,
            )
        return self._view

    def queue_s(self, now: float) -> float:
        """Time until a request that arrives now would start."""
        if not self._running:
            return 0.0
        left_s = self._free_at - now
        return self._queued_s + left_s if left_s > 0 else self._queued_s

    def expect(self, job: SimulatedRequest) -> None:
        """A job comes as soon as it has the prefix it waits for; it is work of this node already."""
        self._expected += 1
        self._book(job)

    def expect_no_more(self, job: SimulatedRequest) -> None:
        """An expected job comes now, or goes another way."""
        self._expected -= 1
        self.queued_tokens -= job.queued
        self._promises.remove(job.blocks)

    def _book(self, job: SimulatedRequest) -> None:
        job.queued = job.prompt - job.cached
        self.queued_tokens += job.queued
        self._promises.add(job.blocks)

    def put(self, now: float, job: SimulatedRequest, *, expected: bool = False) -> None:
        if expected:
            self._expected -= 1
            self.queued_tokens += job.prompt - job.cached - job.queued
            job.queued = job.prompt - job.cached
        else:
            self._book(job)
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

    def _start(self, now: float, job: SimulatedRequest) -> None:
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
        if start > now:
            self._loop.at(start, self._on_start, job)
        else:
            self._on_start(now, job)

    def _finish(self, now: float, job: SimulatedRequest) -> None:
        self._running = False
        self.queued_tokens -= job.queued
        self._promises.remove(job.blocks)
        if self.cache is not None:
            self.cache.end(job.request_id, job.prompt, now)
        if self._queue:
            self._start_next(now)
        self._on_done(now, job)


def _standing(requests: int) -> float:
    """The speed of a batch while its GPUs compute a prompt."""
    return 0.0


def _nothing_cached(hashes: Sequence[Hashable], num_tokens: int) -> PrefixHit:
    return MISS


class DecodeNode:
    """A decode batch of at most `max_running`, the rest waits. `on_start` and `on_done` are told of each request.

    It computes prompts, too, one after the other: the batch stands still meanwhile, except during the server's part of
    a prefill (the time of a prompt of no tokens), which needs no GPU.
    """

    def __init__(
        self, node_id: str, pool: Pool, loop: Loop, on_start: Callable[[float, SimulatedRequest], None],
        on_done: Callable[[float, SimulatedRequest], None], cache: SimulatedCache | None = None, computes: bool = False,
    ) -> None:  # fmt: skip
        assert pool.decode is not None
        self.node_id = node_id
        self.pool = pool
        self.profile: DecodeProfile = pool.decode
        self.cache = cache
        self.match = cache.match if cache is not None else _nothing_cached
        self.arrivals: Arrivals[Coming] = Arrivals()
        self.ready = True
        self.since = loop.now
        self.slot_s = 0.0
        self.prefill_s = 0.0
        self.running = 0
        self.assigned = 0  # running, waiting, or on the way here
        self._loop = loop
        self._on_start = on_start
        self._on_done = on_done
        self._queue: deque[SimulatedRequest] = deque()
        self._free_at = 0.0  # from prompts
        self._stalls = 0  # prompts under way or waiting
        self._stands = Standstills()
        self.queued_tokens = 0  # of those
        self._share = PrefillShare()
        # Ends of requests are known when they start, unless the batch's speed changes.
        self._flat = self.profile.step_s_per_request == 0 and not computes
        # By the number of requests in the batch: a step's time, and the tokens per second that each gets.
        self._step_s = [self.profile.at(max(1, running)) for running in range(self.profile.max_running + 1)]
        self._speed = [1.0 / step_s for step_s in self._step_s].__getitem__
        self._batch = FairShare(self._speed)
        # Tokens that each request in the batch has been given so far, by the size that the batch had: bounded however
        # long it stays busy. What one request got is the difference between two moments.
        self._given = array("d", bytes(8 * (self.profile.max_running + 1)))
        self._given_until = 0.0  # in the batch's virtual time
        self._largest = 0  # that the batch has been since all were 0
        self.seen: NodeView | None = None  # the view of a prompt with nothing cached, until something changes

    @property
    def num_jobs(self) -> int:
        """Requests that decode, wait, or are on the way here."""
        return self.assigned

    def compute(
        self, now: float, job: SimulatedRequest, on_computed: Callable[[float, SimulatedRequest], None]
    ) -> None:
        """Prefills a prompt here, after those that came before it."""
        gpu_s = self.pool.prefill(job.prompt) - self.pool.prefill(job.cached)
        start = max(now, self._free_at)
        self._free_at = start + gpu_s
        self.prefill_s += gpu_s
        job.service_s = gpu_s
        self._share.add(gpu_s, now)
        self.seen = None
        job.queued = job.prompt - job.cached
        self.queued_tokens += job.queued
        self._stalls += 1
        if self._stalls == 1:
            self._stands.begin(now)
        if self._stalls == 1 and not self._flat:
            self._change_speed(now, _standing)
        self._loop.at(self._free_at, self._on_stalled, job.queued)
        self._loop.at(start + self.pool.prefill.with_prefix(job.prompt, job.cached), on_computed, job)

    @property
    def first_token_s(self) -> float:
        """Until the first token of a request that has just joined: a step, after half of the one under way in the mean."""
        return self._step_s[self.running] * (1.0 if self.running == 1 else 1.5)

    def queue_s(self, now: float) -> float:
        """Time until a prompt that comes now would be computed here."""
        return max(0.0, self._free_at - now)

    def _on_stalled(self, now: float, queued_tokens: int) -> None:
        self._stalls -= 1
        self.queued_tokens -= queued_tokens
        if not self._stalls:
            self._stands.end(now, [job.decode_start for job in self._batch.items()])
        if not self._stalls and not self._flat:
            self._change_speed(now, self._speed)

    def _change_speed(self, now: float, speed: Callable[[int], float]) -> None:
        self._batch.change_speed(now, speed)
        if len(self._batch):
            self._expect(now)

    def assign(self, count: int) -> None:
        """Requests promised to (or, negative, gone from) this node."""
        self.assigned += count
        self.seen = None

    def view(self) -> NodeView:
        """As a prompt sees it that can have nothing cached."""
        if self.seen is None:
            self.seen = self._view(0, 0, 0.0)
        return self.seen

    def view_for(self, hashes: Sequence[Hashable], num_tokens: int, now: float) -> NodeView:
        """As this prompt sees it."""
        hit = self.match(hashes, num_tokens)
        cached = min(hit.num_tokens, num_tokens - 1)
        share = self._share.at(now) if self.prefill_s else 0.0  # most decode nodes compute no prompts
        if not self.arrivals or self.cache is None:
            return self._view(cached, hit.attention_tokens, share)
        size = self.cache.layout.block_size
        shared = self.arrivals.longest(hashes[: num_tokens // size], hit.attention_tokens // size)
        if shared is None:
            return self._view(cached, hit.attention_tokens, share)
        landing_s = max(0.0, shared.first.expected_at - now)
        return self._view(cached, hit.attention_tokens, share, shared.blocks * size, landing_s)

    def comes(self, job: SimulatedRequest, expected_at: float) -> None:
        """A job's KVCache is on its way here, until `arrived`."""
        if self.cache is not None and job.blocks:
            job.coming = Coming(job.blocks, expected_at)
            self.arrivals.add(job.coming)

    def arrived(self, job: SimulatedRequest) -> list[SimulatedRequest]:
        """It has landed, or will not; the jobs that have waited for that."""
        coming, job.coming = job.coming, None
        if coming is None:
            return []
        self.arrivals.remove(coming)
        return coming.waiting

    def shared_with(self, job: SimulatedRequest) -> SharedPrefix[Coming] | None:
        """What was on its way here before a job, and has more of its prompt than the node holds."""
        if job.coming is None or self.cache is None:
            return None
        held = self.match(job.hashes, job.prompt).attention_tokens // self.cache.layout.block_size
        return self.arrivals.longest(job.blocks, held, before=job.coming)

    def _view(
        self,
        cached_tokens: int,
        attention_tokens: int,
        prefill_share: float,
        landing_tokens: int = 0,
        landing_s: float = 0.0,
    ) -> NodeView:
        return NodeView(
            node_id=self.node_id,
            cluster=self.pool.name,
            kind=self.pool.kind,
            role=Role.DECODE,
            running=self.running,
            waiting=self.assigned - self.running,
            max_running=self.profile.max_running,
            cached_tokens=cached_tokens,
            attention_tokens=attention_tokens,
            landing_tokens=landing_tokens,
            landing_s=landing_s,
            prefill_share=prefill_share,
            room_tokens=self.cache.room_tokens(attention_tokens) if self.cache is not None else None,
        )

    def put(self, now: float, job: SimulatedRequest) -> None:
        if self.running < self.profile.max_running:
            self._start(now, job)
        else:
            self._queue.append(job)

    def _start(self, now: float, job: SimulatedRequest) -> None:
        self.running += 1
        self.seen = None
        job.decode_start, job.beside = now, self.running
        if self._flat:
            self._loop.at(now + job.output * self.profile.step_s, self._finish_flat, job)
        else:
            self._count(now)
            self._batch.add(now, job.output, job)
            self._largest = max(self._largest, len(self._batch))
            job.given = self._given[:]
            self._expect(now)
        self._on_start(now, job)

    def _count(self, now: float) -> None:
        """Notes the tokens given since the batch last changed."""
        mark = self._batch.virtual_time(now)
        self._given[len(self._batch)] += mark - self._given_until
        self._given_until = mark

    def _expect(self, now: float) -> None:
        end = self._batch.next_end(now)
        if end is not None and end != inf:
            self._loop.at(end, self._on_end, self._batch.version)

    def _on_end(self, now: float, version: int) -> None:
        if version != self._batch.version:
            return
        self._count(now)
        ended = self._batch.pop_ended(now)
        for job in ended:
            self._leave(now, job, self._longest_tenth(job))
        self._given_until = self._batch.virtual_time(now)
        if len(self._batch):
            self._expect(now)
        else:
            self._given = array("d", bytes(8 * (self.profile.max_running + 1)))
            self._largest = 0
        self._fill(now)

    def _longest_tenth(self, job: SimulatedRequest) -> float:
        """Mooncake's TBT: the mean of the longest tenth of the intervals between a request's tokens.

        While the batch stands still for a prompt, one interval of each of its requests goes on.
        """
        wanted = left = max(1.0, job.output / 10)
        total = stood_s = self._stands.longest_s(job.decode_start, wanted)
        # The fuller the batch, the longer its steps.
        given, given_before = self._given, job.given
        for size in range(self._largest, 0, -1):
            tokens = given[size] - given_before[size]
            if tokens > 0:
                tokens = min(left, tokens)
                total += tokens * self._step_s[size]
                left -= tokens
                if left <= 0:
                    break
        return total / (wanted - left) if wanted > left else self.profile.at(1) + stood_s

    def _finish_flat(self, now: float, job: SimulatedRequest) -> None:
        self._leave(now, job, self.profile.step_s)
        self._fill(now)

    def _leave(self, now: float, job: SimulatedRequest, tbt_s: float) -> None:
        self.running -= 1
        self.assigned -= 1
        self.seen = None
        if self.cache is not None:
            self.cache.let_go(job.request_id, now)
        self.slot_s += now - job.decode_start
        job.service_s = tbt_s
        self._on_done(now, job)

    def _fill(self, now: float) -> None:
        while self._queue and self.running < self.profile.max_running:
            self._start(now, self._queue.popleft())
