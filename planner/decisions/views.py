"""A decision's view of the world: nodes, links, the request.

The rim (gateway or simulator) fills these in for each decision; nothing here is ever changed.
These are msgspec structs, not dataclasses, because a dozen are built per request: six times as fast.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec

CODED_FROM_S: Final = 0.2  # senders code what leaves from a backlog of this length on (`transport.coding.choice`)


class ClusterKind(StrEnum):
    """The kind of a cluster; the values are those of `NodeDescription.cluster_kind`."""

    PRFAAS = "prfaas"
    PD = "pd"


class Role(StrEnum):
    """The role of a node; the values are those of `NodeDescription.role`."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node as seen for one request.

    `cached_tokens` is the longest prefix of this request that all KV cache groups of the node can serve.
    `attention_tokens` is the longest that its full-attention groups alone can serve; a decode node need not receive it
    again. Of attention `landing_tokens` will be there in `landing_s`: they are on their way for another prompt.
    `immovable_tokens` at the end of `cached_tokens` cannot be sent to another node: only the engine's own cache has
    them. `queue_s`, where known, is the predicted time until the node is free; else `queued_tokens` (uncached tokens
    waiting or being computed) is turned into seconds by the prefill cost. `prefill_share` is the part of its time that
    a decode node has lately spent on prompts; one that has not `prefills_alone` decodes what another node has computed,
    and nothing else. `room_tokens`, where known, is for how many tokens of this prompt, beyond its `attention_tokens`,
    it has unused memory. `steps` is what it says of its decode steps: (requests in them, seconds), by rising number;
    empty: nothing.
    """

    node_id: str
    cluster: str
    kind: ClusterKind
    role: Role
    ready: bool = True
    queued_tokens: int = 0
    queue_s: float | None = None
    running: int = 0
    waiting: int = 0
    max_running: int = 1
    cached_tokens: int = 0
    attention_tokens: int = 0
    landing_tokens: int = 0
    landing_s: float = 0.0
    immovable_tokens: int = 0
    prefill_share: float = 0.0
    prefills_alone: bool = True
    room_tokens: int | None = None
    steps: tuple[tuple[float, float], ...] = ()

    @property
    def due_tokens(self) -> int:
        """The longest prefix whose attention it holds, or is about to."""
        held, landing = self.attention_tokens, self.landing_tokens
        return held if held >= landing else landing

    @property
    def movable_tokens(self) -> int:
        """The longest prefix that another node can be sent."""
        return self.cached_tokens - self.immovable_tokens

    @property
    def load(self) -> float:
        """Requests held, as a share of what the node can run at once (above 1: some wait)."""
        return (self.running + self.waiting) / self.max_running


class LinkView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The egress link from a PrfaaS cluster to a PD cluster.

    `available_bytes_per_s` is None while unknown; `budget_bytes_per_s`, where there is one, is the most that may leave
    however much could. `queued_bytes` is KVCache that exists and has still to leave, `promised_bytes` what requests
    that were routed here have yet to compute: paced by their compute they are no sign of congestion. But later bytes
    queue behind them, and on a small budget that is the longer wait. `congested` is the senders' early signal: round
    trips of twice the smallest one of late, or losses; round trips are 0 while unknown. `estimate_error` is the mean
    relative error of the senders' predictions of when a transfer will have arrived. `coded_ratio` is what senders make
    of bytes, coded over plain, while the link is what transfers wait for: below 1 where that has been seen to gain. A
    `drained` link is not up because an operator wants nothing new on it. `cut_off` names senders that cannot use the
    link although others can, `lost` those (sender, receiver) that have no connection although the sender has others.
    `senders` are the same for each sender alone, by name, where each has a budget that no other one can use: what one
    of them sends leaves at its own rate, behind what is its own. Empty: the link is theirs together.
    `lines` are the names of those that are described between its ends.
    """

    source: str
    destination: str
    up: bool = True
    drained: bool = False
    cut_off: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    available_bytes_per_s: float | None = None
    budget_bytes_per_s: float | None = None
    utilisation: float = 0.0
    retransmit_ratio: float = 0.0
    queued_bytes: float = 0.0
    promised_bytes: float = 0.0
    congested: bool = False
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    estimate_error: float = 0.0
    coded_ratio: float = 1.0
    senders: tuple[tuple[str, "LinkView"], ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def rate_bytes_per_s(self) -> float | None:
        """What can leave and may; None while neither is known."""
        if not self.available_bytes_per_s or not self.budget_bytes_per_s:
            return self.available_bytes_per_s or self.budget_bytes_per_s
        return min(self.available_bytes_per_s, self.budget_bytes_per_s)

    @property
    def drain_s(self) -> float:
        """Predicted time until what is queued now has left; 0 while the bandwidth is unknown."""
        return self._sent_s(self.queued_bytes)

    @property
    def backlog_s(self) -> float:
        """Predicted time until what is queued and what is promised have left, were the latter there already."""
        return self._sent_s(self.queued_bytes + self.promised_bytes)

    @property
    def rtt_inflation(self) -> float:
        """Round trip over the smallest one of late; 1 = no queue."""
        return max(1.0, self.rtt_s / self.min_rtt_s) if self.min_rtt_s else 1.0

    def of(self, sender: str) -> "LinkView":
        """The link as that sender has it."""
        return next((own for name, own in self.senders if name == sender), self)

    def carries(self, sender: str, receiver: str) -> bool:
        """Whether anything of that sender's gets to that receiver, as long as the link is up."""
        return sender not in self.cut_off and (sender, receiver) not in self.lost

    def arrives_s(self, num_bytes: float) -> float:
        """When `num_bytes` more will have arrived, as far as the senders' predictions have been right."""
        return (self.sent_s(num_bytes) + self.rtt_s) * (1.0 + min(1.0, self.estimate_error))

    def sent_s(self, num_bytes: float) -> float:
        """When `num_bytes` more will have left, behind what is queued and promised."""
        return self._sent_s(self.queued_bytes + self.promised_bytes + num_bytes)

    def coded_bytes(self, num_bytes: float) -> float:
        """What is predicted to cross the link of `num_bytes` more."""
        rate = self.rate_bytes_per_s
        waiting = self.queued_bytes + self.promised_bytes + num_bytes
        return num_bytes * self.coded_ratio if rate and waiting / rate > CODED_FROM_S else num_bytes

    def _sent_s(self, num_bytes: float) -> float:
        rate = self.rate_bytes_per_s
        if not rate:
            return 0.0
        plain_s = num_bytes / rate
        if self.coded_ratio >= 1 or plain_s <= CODED_FROM_S:
            return plain_s
        return max(CODED_FROM_S, plain_s * self.coded_ratio)


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a request that routing looks at.

    `num_tokens` is the prompt length N. `kv_bytes(n)` is S_kv(n) in bytes (`ModelLayout.kv_bytes`), to predict
    transfers with.
    `tie` in [0, 1) is drawn from a hash of the request id: the only chance that routing knows.
    `home` names the PD cluster that should decode; None lets load decide.
    `answer_tokens` is the predicted length of its answer.
    `unshared` requests have no use for KVCache that was computed for anybody, here or elsewhere.
    """

    num_tokens: int
    kv_bytes: Callable[[int], float] | None = None
    tie: float = 0.0
    answer_tokens: float = 0.0
    home: str | None = None
    unshared: bool = False


def step_at(steps: Sequence[tuple[float, float]], running: float) -> float:
    """Seconds of a decode step of `running` requests, between what was reported of fewer and of more; there is a report.

    Beyond the largest one the last two go on, as far as that is not downwards.
    """
    if running <= steps[0][0] or len(steps) == 1:
        return steps[0][1]
    after = next((i for i in range(1, len(steps)) if steps[i][0] >= running), len(steps) - 1)
    (low, low_s), (high, high_s) = steps[after - 1], steps[after]
    slope = (high_s - low_s) / (high - low)
    return low_s + slope * (running - low) if running <= high else high_s + max(0.0, slope) * (running - high)


def room_beside(free_tokens: int, tokens: int, attention_tokens: int) -> int:
    """`room_tokens` of a node whose free pages hold so many tokens, and with those that eviction would free, `tokens`.

    Most likely no request holds a prompt's own prefix, so that it is among what would be evicted.
    """
    beside = tokens - attention_tokens
    return beside if beside > free_tokens else free_tokens


class PrefillCost:
    """Seconds that a prefill takes, by one rate for all nodes: the estimate of a gateway without profiles."""

    def __init__(self, tokens_per_s: float = 20_000.0, overhead_s: float = 0.0) -> None:
        if tokens_per_s <= 0:
            raise ValueError(f"tokens_per_s={tokens_per_s}: must be above 0")
        self.tokens_per_s = tokens_per_s
        self.overhead_s = overhead_s

    def prefill_s(self, node: NodeView, num_tokens: int, cached_tokens: int) -> float:
        """Time to compute tokens `[cached_tokens, num_tokens)` on `node`, once it starts."""
        return self.overhead_s + max(0, num_tokens - cached_tokens) / self.tokens_per_s

    def queue_s(self, node: NodeView) -> float:
        """Time until `node` would start."""
        if node.queue_s is not None:
            return node.queue_s
        return node.queued_tokens / self.tokens_per_s

    def step_s(self, node: NodeView, running: int) -> float:
        """Time between two tokens of a request that decodes on `node` as one of `running`; 0 while unknown."""
        return step_at(node.steps, running) if node.steps else 0.0

    def queues_s(self, nodes: Sequence[NodeView]) -> list[float]:
        """`queue_s` of each node."""
        return [self.queue_s(node) for node in nodes]

    def steps_s(self, nodes: Sequence[NodeView]) -> list[float]:
        """`step_s` of each node with one request more."""
        return [self.step_s(node, node.running + node.waiting + 1) for node in nodes]
