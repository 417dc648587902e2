"""One node as the gateway knows it: what its agent says of it, and the work that this gateway has under way there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import BookingsBeside, LinkLoad, NodeInfo, NodeLoad
from gateway.cluster.inflight_prefixes import InflightLanding, InflightPrefixes
from gateway.cluster.pinned_prefixes import PinnedPrefixes
from gateway.cluster.served_model import revision_of
from gateway.config.models import REST
from hybrid_cache.index.index import Holding
from planner.decisions.estimates.decoding import PrefillShare
from planner.decisions.routing.arrivals import Arrivals
from planner.decisions.views import ClusterKind, NodeView, Role, room_beside

KINDS: Final = {
    kind.value: kind for kind in ClusterKind
}  # an enum's own look-up is slow, and every node is viewed per prompt
ROLES: Final = {role.value: role for role in Role}
LATE_S: Final = 5.0  # a word that is older by more is of another process of the node, with another clock
NO_LANDING: Final = (0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """What a request adds to a node: tokens to compute, and KVCache to send to another cluster, in bytes."""

    tokens: int = 0
    destination: str = ""
    promised_bytes: int = 0


class SharedNodeWork(Protocol):
    """Where other processes see what this one has under way on a node."""

    def pend(self, sign: int, work: NodeWork) -> None: ...


class ClusterNode:
    """One node, as its agent last described it, and the work that this gateway has under way on it."""

    def __init__(self, agent: AgentClient, member_id: str = "") -> None:
        """`member_id` is what the registry calls it, "" where it is known by its address alone."""
        self.agent = agent
        self._member_id = member_id
        self.info: NodeInfo | None = None
        self.load = NodeLoad()
        self.reported_at = 0.0
        self.connected = False
        self.suspect_until = float("-inf")
        self.model: str | None = REST  # the key of its model among those of the gateway; None: it has no such model
        self.contexts = PinnedPrefixes()
        self.pending_tokens = 0
        self.pending_requests = 0
        self.prefill_share = PrefillShare()
        self.shared: SharedNodeWork | None = (
            None  # with workers beside this one, whose work is then in these numbers, too
        )
        self._own_requests = self._foreign = self._beyond = 0
        self._beside = BookingsBeside(requests=0, clock_s=0.0)  # the node's newest word
        self.promised_bytes: Counter[str] = Counter()  # by destination cluster, of requests that were sent here
        self.underway = InflightPrefixes()
        self.arrivals: Arrivals[InflightLanding] = Arrivals()
        self.keeps_nothing_until = float("-inf")  # what landed here was not there for the next prompt
        self._landing_tokens = (
            0,
            0,
        )  # that requests sent here since the last report will need, and since the one before
        self._links: tuple[NodeLoad, dict[str, LinkLoad]] = (
            self.load,
            {},
        )  # by peer, of the report that is beside them
        self._viewed: tuple[tuple[Any, ...], NodeView] | None = None  # the last view, and what it was made of

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.role} {self.state}, {self.pending_requests} pending>"

    @property
    def member_id(self) -> str:
        """Its identity, at whatever address it is."""
        return self._member_id or self.agent.address

    @property
    def id(self) -> str:
        return self.info.node_id if self.info else self.member_id

    @property
    def revision(self) -> str:
        """That of the model that it runs; "" before its engine has said, and where no model of the gateway has it."""
        return revision_of(self.info, self.model) if self.info is not None and self.model is not None else ""

    @property
    def own_requests(self) -> int:
        """Requests that this process has under way here."""
        return self._own_requests

    @property
    def role(self) -> str:
        return self.info.role if self.info else "unknown"

    @property
    def cluster(self) -> str:
        return self.info.cluster if self.info else "unknown"

    @property
    def place(self) -> str:
        """As its certificate has it: CLUSTER/NAME; empty before its first description."""
        return f"{self.info.cluster}/{self.info.node_id}" if self.info else ""

    @property
    def state(self) -> str:
        """The node's own state, or `down` while its agent does not answer."""
        return self.info.state if self.connected and self.info else "down"

    @property
    def engine(self) -> tuple[str, int]:
        """Which engine process this is: another value says that the one before is gone."""
        return (self.info.boot_id, self.info.engine_pid) if self.info else ("", 0)

    @property
    def is_paired(self) -> bool:
        """Whether its engine is paired by rooms, and so does nothing alone."""
        return self.info is not None and self.info.rooms is not None

    def owned_tokens(self, owner: str) -> int:
        """What it keeps for a tenant, as far as anybody knows: nothing, while it does not answer."""
        return self.contexts.owned_tokens(owner) if self.connected else 0

    def is_ready(self, now: float) -> bool:
        """Whether new work may be sent here."""
        return self.state == "ready" and now >= self.suspect_until

    def link_to(self, cluster: str) -> LinkLoad | None:
        """What it last said of its egress to a cluster; None if it has sent nothing there yet."""
        if self._links[0] is not self.load:
            self._links = self.load, {link.peer: link for link in reversed(self.load.links)}
        return self._links[1].get(cluster)

    def own_budget_to(self, cluster: str) -> float | None:
        """Its own egress budget to a cluster, whether it has sent anything there or not; 0: none; None: it does not say."""
        budgets = self.load.budgets
        if budgets and (budget := budgets.get(cluster, budgets.get(""))) is not None:
            return budget
        link = self.link_to(cluster)
        return (link.own_budget_bytes_per_s or link.budget_bytes_per_s) if link is not None else None

    def view(
        self,
        holding: Holding,
        max_running: int,
        now: float,
        promised_tokens: int = 0,
        landing_tokens: int = 0,
        landing_s: float = 0.0,
    ) -> NodeView:
        """This node as a decision about a prompt sees it, if it holds `holding` of it; it must have been described.

        Once it has computed what it computes now, it will hold `promised_tokens`; the attention of `landing_tokens` will be
        there in `landing_s`.
        """
        load, share, beside = self.load, self.prefill_share.at(now), self._beside.requests
        made_of = (
            load,
            self.info,
            holding,
            self.pending_tokens,
            self.pending_requests,
            share,
            max_running,
            promised_tokens,
            landing_tokens,
            landing_s,
            self._landing_tokens,
            self._foreign,
            beside,
        )
        # Of two prompts, most nodes hold as much: the system prompt, or nothing.
        if self._viewed is not None and self._viewed[0] == made_of:
            return self._viewed[1]
        assert self.info is not None
        hit = holding.hit
        cached_tokens = max(hit.num_tokens, promised_tokens)
        seen = NodeView(
            node_id=self.info.node_id,
            cluster=self.info.cluster,
            kind=KINDS[self.info.cluster_kind],
            role=ROLES[self.info.role],
            queued_tokens=max(load.queued_tokens, self.pending_tokens),
            running=beside + max(load.running, self.pending_requests + self._foreign - load.waiting),
            waiting=load.waiting,
            max_running=min(max_running, load.slots or max_running),
            cached_tokens=cached_tokens,
            attention_tokens=hit.attention_tokens,
            landing_tokens=landing_tokens,
            landing_s=landing_s,
            immovable_tokens=cached_tokens - holding.movable_tokens,
            prefill_share=share,
            prefills_alone=not self.is_paired,
            room_tokens=self._room_tokens(hit.attention_tokens),
            steps=load.steps,
        )
        self._viewed = made_of, seen
        return seen

    def _room_tokens(self, attention_tokens: int) -> int | None:
        room = self.load.room
        if room is None:
            return None
        return room_beside(room.free_tokens, room.tokens, attention_tokens) - sum(self._landing_tokens)

    def promised_tokens(self, hashes: Sequence[bytes], holding: Holding, now: float) -> int:
        """How much of a prompt it will hold when it has computed what it computes now, 0 for no more than now."""
        self.underway.settle(now)
        size = self.info.block_size if self.info is not None else 0
        return self.underway.longest(hashes, holding.hit.num_tokens // size) * size if size else 0

    def landing(self, hashes: Sequence[bytes], holding: Holding, now: float) -> tuple[int, float]:
        """How much of a prompt is on its way here for others, in tokens, and in how many seconds it is there."""
        size = self.info.block_size if self.info is not None else 0
        if not size or now < self.keeps_nothing_until:
            return NO_LANDING
        shared = self.arrivals.longest(hashes, holding.hit.attention_tokens // size)
        return (shared.blocks * size, max(0.0, shared.first.expected_at - now)) if shared is not None else NO_LANDING

    def expects(self, num_tokens: int) -> None:
        """KVCache of so many tokens will be reserved here: its node's reports do not have it yet."""
        since, before = self._landing_tokens
        self._landing_tokens = since + num_tokens, before

    def reported(self, load: NodeLoad, now: float = 0.0) -> None:
        """What its agent says now; of what it has beyond ours, only what two reports agree on is another gateway's."""
        has = load.running + load.waiting + load.booked_by_own
        beyond = max(0, has - self.pending_requests)  # ours do not end here and there at once
        self.reported_at = now
        self._foreign, self._beyond = min(beyond, self._beyond), beyond
        # The first report after a decision may have been made before the reservation.
        self._landing_tokens = 0, self._landing_tokens[0]
        self.load = load
        word = BookingsBeside(requests=load.booked_by_others, clock_s=load.clock_s)
        if load.clock_s and self.connected:
            self.booked_beside(word)
        else:
            self._beside = word

    def booked_beside(self, word: BookingsBeside) -> None:
        """What other gateways have reserved here, by a report or by the answer to a reservation; they come in any order."""
        if self.connected and not 0 < self._beside.clock_s - word.clock_s < LATE_S:
            self._beside = word

    @property
    def others(self) -> int:
        """Requests here that are not this process's: other workers', other gateways'."""
        return self._foreign + self._beside.requests + max(0, self.pending_requests - self._own_requests)

    def take(self, work: NodeWork) -> None:
        """Counts a request's work here; `give_back` the same when it is over."""
        self._pend(1, work)

    def give_back(self, work: NodeWork) -> None:
        self._pend(-1, work)

    def _pend(self, sign: int, work: NodeWork) -> None:
        self._own_requests += sign
        self.pending_requests += sign
        self.pending_tokens += sign * work.tokens
        if work.promised_bytes:
            self.promised_bytes[work.destination] += sign * work.promised_bytes
            if not self.promised_bytes[work.destination]:
                del self.promised_bytes[work.destination]
        if self.shared is not None:
            self.shared.pend(sign, work)
