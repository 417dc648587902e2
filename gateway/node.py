"""One node as the gateway knows it: what its agent says of it, and the work that this gateway has under way there."""

from collections import Counter
from dataclasses import dataclass

from gateway.agent import AgentClient, LinkLoad, NodeInfo, NodeLoad
from planner.decisions.estimates import PrefillShare


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request adds to a node: tokens to compute, and KVCache to send to another cluster, in bytes."""

    tokens: int = 0
    destination: str = ""
    promised_bytes: int = 0


class Node:
    """One node, as its agent last described it, and the work that this gateway has under way on it."""

    def __init__(self, agent: AgentClient) -> None:
        self.agent = agent
        self.info: NodeInfo | None = None
        self.load = NodeLoad()
        self.connected = False
        self.suspect_until = float("-inf")
        self.pending_tokens = 0
        self.pending_requests = 0
        self.prefill_share = PrefillShare()
        self.promised_bytes: Counter[str] = Counter()  # by destination cluster, of requests that were sent here

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.role} {self.state}, {self.pending_requests} pending>"

    @property
    def id(self) -> str:
        return self.info.node_id if self.info else self.agent.address

    @property
    def role(self) -> str:
        return self.info.role if self.info else "unknown"

    @property
    def cluster(self) -> str:
        return self.info.cluster if self.info else "unknown"

    @property
    def state(self) -> str:
        """The node's own state, or `down` while its agent does not answer."""
        return self.info.state if self.connected and self.info else "down"

    @property
    def engine(self) -> tuple[str, int]:
        """Which engine process this is: another value says that the one before is gone."""
        return (self.info.boot_id, self.info.engine_pid) if self.info else ("", 0)

    def is_ready(self, now: float) -> bool:
        """Whether new work may be sent here."""
        return self.state == "ready" and now >= self.suspect_until

    def link_to(self, cluster: str) -> LinkLoad | None:
        """What it last said of its egress to a cluster; None if it has sent nothing there yet."""
        return next((link for link in self.load.links if link.peer == cluster), None)

    def take(self, work: Work) -> None:
        """Counts a request's work here; `give_back` the same when it is over."""
        self._pend(1, work)

    def give_back(self, work: Work) -> None:
        self._pend(-1, work)

    def _pend(self, sign: int, work: Work) -> None:
        self.pending_requests += sign
        self.pending_tokens += sign * work.tokens
        if work.promised_bytes:
            self.promised_bytes[work.destination] += sign * work.promised_bytes
            if not self.promised_bytes[work.destination]:
                del self.promised_bytes[work.destination]
