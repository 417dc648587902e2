"""A scenario to simulate: clusters with nodes, links with a capacity over time, and the policies in charge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hybrid_cache.eviction import POLICIES
from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.placement import PLACERS
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.demand.slo import TtftTarget
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.simulator.policies import Estimates
from planner.solve.control.controller import ControllerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One cluster. `cache_bytes` is the prefix cache of each node; 0 means none, an infinite one never evicts."""

    name: str
    kind: ClusterKind
    num_prefill: int
    num_decode: int = 0
    prefill: PrefillCurve
    decode: DecodeProfile | None = None
    cache_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 0:
            raise InputError(f"{self.name}: num_prefill={self.num_prefill}, num_decode={self.num_decode}: negative")
        if self.num_decode and self.decode is None:
            raise InputError(f"{self.name}: num_decode={self.num_decode} without a decode profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """An egress link. `capacity` are steps (from time s, bytes per s), the first at 0; a step of 0 is a link that is down.

    With several `senders` each has a part of its own; with one, all transfers share all of it. With
    `shares_egress`, what one of them does not need of its part is lent to the others, as gateways deal it out.
    """

    source: str
    destination: str
    capacity: Sequence[tuple[float, float]]
    rtt_s: float = 0.0
    senders: int = 1
    shares_egress: bool = False

    def __post_init__(self) -> None:
        times = [time for time, _ in self.capacity]
        if not times or times[0] != 0 or times != sorted(times):
            raise InputError(f"link {self.source} to {self.destination}: capacity must start at 0 s and go forward")
        if self.senders < 1:
            raise InputError(f"link {self.source} to {self.destination}: senders={self.senders}: must be at least 1")
        if self.rtt_s < 0 or any(rate < 0 for _, rate in self.capacity):
            raise InputError(f"link {self.source} to {self.destination}: neither capacity nor rtt_s may be negative")

    def with_outage(self, outage: "Outage") -> "Wire":
        """The link as thin as an outage makes it, if that is one of this link."""
        if (outage.source or self.source, outage.destination or self.destination) != (self.source, self.destination):
            return self
        edges = sorted({0.0, outage.from_s, outage.until_s, *(at for at, _ in self.capacity)})
        steps = [(at, self._at(at) * (outage.share if outage.from_s <= at < outage.until_s else 1.0)) for at in edges]
        return replace(self, capacity=[step for step in steps if step[0] < inf])

    def _at(self, time_s: float) -> float:
        return [rate for at, rate in self.capacity if at <= time_s][-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which a link has only `share` of its capacity, 0 when it is down; without names it is every link's."""

    from_s: float
    until_s: float
    share: float = 0.0
    source: str = ""
    destination: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.until_s or not 0 <= self.share <= 1:
            raise InputError(
                f"from {self.from_s:g} s until {self.until_s:g} s, share {self.share:g}: the end must come after the "
                "beginning, and the share be in [0, 1]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """SLOs of one request: TTFT, and TBT as the mean of its longest tenth of token intervals (Mooncake §7.1).

    A request that is among those of `some` has the least of their TTFTs instead.
    """

    ttft_s: float = 30.0
    tbt_s: float = 0.1
    some: tuple[TtftTarget, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipTimes:
    """What a change of role takes beside ending what runs: flip and verification, log-normal by its median and P90.

    The defaults are those of 200 changes of emulated nodes under a trace on two busy cores (`make test-flips`): 27 and 64 ms.
    An engine that answers its verification prompt by a model takes as long as that prompt. A node has `drain_timeout_s`, and
    a share of them, `failing`, turns out unfit for the new role and keeps the old one.
    """

    median_s: float = 0.027
    p90_s: float = 0.064
    drain_timeout_s: float = 60.0
    failing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.median_s <= self.p90_s:
            raise InputError(f"flips: median_s={self.median_s:g}, p90_s={self.p90_s:g}: need 0 < median <= P90")
        if not self.drain_timeout_s > 0 or not 0 <= self.failing <= 1:
            raise InputError(f"{self}: need drain_timeout_s > 0 and failing in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """The room of decode nodes, and the line for it: `landings` are requests that a node takes beyond those it
    decodes."""

    landings: int
    max_waiting: int = 256
    room_s: float = 30.0
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        if self.landings < 0 or min(self.max_waiting, self.room_s, self.ageing_s) <= 0:
            raise InputError(f"{self}: limits must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole system and its policies.

    `tail_share` is the part of a remote KVCache that leaves only after the prefill has ended: 1 transfers after computing
    (the published TTFTs), 1/layers is layer-wise streaming. With `counts_first_step` TTFT has the decode step that computes a
    prompt's last token, and what is left of the step before; without, as in plans, it ends where decode begins.
    `classes` are what requests were promised, by shares of them; without any, all of them the `targets`. With `line`, decode
    nodes have room for so many, and who finds none waits as at a gateway; without, they take everybody.
    Senders give a peer up after `peer_timeout_s` of silence, and so many nodes compute a prompt's KVCache in vain before its
    decode node does (`max_attempts`): a sender's and a gateway's defaults.
    `homes` are shares of requests that must be decoded in a PD cluster, as if each had a gateway of its own; without any, load
    decides.
    """

    pools: Sequence[Pool]
    wires: Sequence[Wire] = ()
    kv: KvSize
    routing: RoutingPolicy
    placer: str = DEPLOYED.placement
    admission: AdmissionPolicy = AdmissionPolicy.ACCEPT_ALL
    targets: Targets = field(default_factory=Targets)
    tail_share: float = 1.0
    counts_first_step: bool = False
    eviction: str = "lru"
    controller: ControllerConfig | None = None
    flips: FlipTimes = field(default_factory=FlipTimes)
    estimates: Estimates = Estimates.LEARNED
    classes: Mapping[ServiceClass, float] = field(default_factory=dict)
    line: LineLimits | None = None
    peer_timeout_s: float = 5.0
    max_attempts: int = DEPLOYED.max_attempts
    homes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.placer not in PLACERS:
            raise InputError(f"placement={self.placer!r}: must be one of {', '.join(PLACERS)}")
        if self.eviction not in POLICIES:
            raise InputError(f"eviction={self.eviction!r}: must be one of {', '.join(POLICIES)}")
        if not 0 < self.tail_share <= 1:
            raise InputError(f"tail_share={self.tail_share}: must be in (0, 1]")
        if any(not share > 0 for share in self.classes.values()):
            raise InputError("classes: every share must be above 0")
        homes = {pool.name for pool in self.pools if pool.num_decode}
        if strangers := self.homes.keys() - homes:
            raise InputError(f"homes: no node decodes in {', '.join(sorted(strangers))}")
        for wire in self.wires:
            sending = sum(pool.num_prefill for pool in self.pools if pool.name == wire.source)
            if 1 < wire.senders < sending:
                raise InputError(
                    f"link {wire.source} to {wire.destination}: senders={wire.senders}: {sending} nodes prefill there, and "
                    "each has a part of the line"
                )
        if not any(pool.num_decode for pool in self.pools):
            raise InputError("no decode instance could answer: give a pd cluster at least one")
