"""The model servers that may be chosen, and what is known of each: its own report, and what was sent there since."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.picker.asking import BLOCK_TOKENS, AskedPrompt
from gateway.picker.prefixes import DEFAULT_BLOCKS, SentPrefixes
from membership.documents import OWN_ROLE_LABEL, ROLE_LABEL
from membership.member import Member
from planner.decisions.views import ClusterKind, NodeView, Role

PREFILL_ONLY: Final = ("prefill", "encode-prefill")
# All servers of a kind count as one cluster: there is no line between them. KVCache goes from one kind to the other nowhere.
POOL: Final = "pool"
NODES: Final = "nodes"
LEAST_S: Final = 1e-6
RUNNING_TOKENS: Final = 16  # of prefill, that a request which is being answered costs those that come: it breaks ties
STALE_S: Final = 5.0  # a report that is older says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What a server says of itself, in vLLM's words."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


GIVEN_UP: Final = 3  # reports in a row that did not come
NO_REPORT: Final = ServerReport()


@dataclass(slots=True, eq=False, weakref_slot=True)
class ModelServer:
    """One server. `failures` counts reports in a row that did not come; one that has never reported may be asked.

    `is_node`: it is a PrfaaS node, at its port for picked requests.
    """

    id: str
    address: str
    prefills_only: bool = False
    is_node: bool = False
    report: ServerReport = NO_REPORT
    reported_at: float = float("-inf")
    failures: int = 0
    in_flight: int = 0
    busy_until: float = 0.0  # with prompts that were sent there, as far as it computes at the rate that is assumed
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    models: frozenset[str] = frozenset()  # that it says it serves, adapters too; none: it has not said

    def running(self, now: float) -> int:
        """Requests there that do not wait: those of its report, or those of ours if there are more."""
        return max(self.report_at(now).running, self.in_flight - self.report_at(now).waiting)

    def report_at(self, now: float) -> ServerReport:
        """What it has said of late."""
        return self.report if now - self.reported_at <= STALE_S else NO_REPORT

    def queue_s(self, now: float, tokens_per_s: float, prompt_tokens: float) -> float:
        """When it would begin with a prompt; those that wait there are taken to be of the usual length."""
        behind = self.report_at(now).waiting * prompt_tokens / tokens_per_s
        beside = self.running(now) * RUNNING_TOKENS / tokens_per_s
        return max(self.busy_until - now, behind, 0.0) + beside


class ServerPool:
    """All servers. Those that leave the pool are forgotten, and what is under way there ends by itself."""

    def __init__(
        self, clock: Callable[[], float], *, tokens_per_s: float, max_running: int, max_blocks: int = DEFAULT_BLOCKS
    ) -> None:
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._max_running = max_running
        self._max_blocks = max_blocks
        self._servers: dict[str, ModelServer] = {}
        self._usual_tokens = 256.0

    def __len__(self) -> int:
        return len(self._servers)

    def __iter__(self) -> Iterator[ModelServer]:
        return iter(self._servers.values())

    def follow(self, members: Mapping[str, Member]) -> None:
        """The pool has these members now. One at another address has begun anew."""
        kept = {}
        for member in members.values():
            server = self._servers.get(member.id)
            prefills_only = _role(member) in PREFILL_ONLY
            if server is None or server.address != member.agent:
                server = ModelServer(member.id, member.agent, sent=SentPrefixes(self._max_blocks))
            server.prefills_only = prefills_only
            server.is_node = OWN_ROLE_LABEL in member.labels
            kept[member.id] = server
        self._servers = kept

    def by_id(self, server_id: str) -> ModelServer | None:
        """None for one that has left."""
        return self._servers.get(server_id)

    def has_model(self, model: str) -> bool:
        """Whether some server serves it, ready or not, or has not said what it serves."""
        return any(not server.models or model in server.models for server in self)

    def usable(self, subset: Collection[str] | None = None, model: str = "") -> list[ModelServer]:
        """Those that may be asked for a model ("": any): of a subset, which names addresses, those in it.

        A server that has not said what it serves may be asked for each.
        """
        found = [
            server
            for server in self
            if server.failures < GIVEN_UP and (not model or not server.models or model in server.models)
        ]
        if subset is not None:
            found = [server for server in found if server.prefills_only or is_in(server.address, subset)]
        return found

    def views(self, servers: Iterable[ModelServer], prompt: AskedPrompt) -> list[NodeView]:
        """Servers as decisions see them for a prompt."""
        now = self._clock()
        return [self._view(server, prompt, now) for server in servers]

    def _view(self, server: ModelServer, prompt: AskedPrompt, now: float) -> NodeView:
        report = server.report_at(now)
        cached = min(server.sent.length(prompt.blocks) * BLOCK_TOKENS, max(0, prompt.num_tokens - 1))
        return NodeView(
            node_id=server.id,
            cluster=NODES if server.is_node else POOL,
            kind=ClusterKind.PD,
            role=Role.PREFILL if server.prefills_only else Role.DECODE,
            queue_s=server.queue_s(now, self._tokens_per_s, self._usual_tokens),
            running=server.running(now),
            waiting=report.waiting,
            max_running=self._max_running,
            cached_tokens=cached,
            attention_tokens=cached,
            immovable_tokens=cached,
        )

    def reports(self, servers: Iterable[ModelServer]) -> list[ServerReport]:
        """What these have said of late."""
        now = self._clock()
        return [server.report_at(now) for server in servers]

    def took(self, server: ModelServer, prompt: AskedPrompt, compute_s: float) -> float:
        """A prompt goes there, which it takes so long to compute; when that is predicted to be done."""
        now = self._clock()
        server.busy_until = max(now, server.busy_until) + max(LEAST_S, compute_s)
        server.sent.sent(prompt.blocks)
        self._usual_tokens += 0.05 * (prompt.num_tokens - self._usual_tokens)
        return server.busy_until

    def answered(self, server: ModelServer, compute_s: float, predicted: float) -> None:
        """A prompt has been answered or refused there. What is left of its prediction was too much: bytes are no tokens."""
        server.busy_until -= min(compute_s, max(0.0, predicted - self._clock()))

    def reported(self, server: ModelServer, report: ServerReport) -> None:
        """A server has said how busy it is."""
        server.report, server.reported_at, server.failures = report, self._clock(), 0

    def serves(self, server: ModelServer, models: Collection[str]) -> None:
        """A server has said which models it serves. What was sent to others than these is not there any more."""
        if server.models and server.models != frozenset(models):
            server.sent.clear()
        server.models = frozenset(models)

    def failed(self, server: ModelServer) -> None:
        """A server has not said how busy it is. One that was given up may have begun anew."""
        server.failures = min(GIVEN_UP, server.failures + 1)
        if server.failures == GIVEN_UP:
            server.sent.clear()


def is_in(address: str, subset: Collection[str]) -> bool:
    """Whether a subset names host:port, or the host alone."""
    return address in subset or address.rpartition(":")[0] in subset


def _role(member: Member) -> str:
    return member.role or str(member.labels.get(ROLE_LABEL, ""))
