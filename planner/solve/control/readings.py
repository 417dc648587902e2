"""Merges the reports of several gateways into one observation for the controller. Values in, values out.

A plan is made in the model's own units (those of its profile). A system that stands in for it at a smaller scale says what it
sees in its own: `Units` is where the two meet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from planner.decisions.plans.live_plan import PlanInputs, PlanSetting
from planner.decisions.plans.offered import CONVERTING, READY, GatewayLoad, LinkReport, NodeReport, Samples, of_kind
from planner.decisions.views import ClusterKind, Role
from planner.solve.control.controller import Observation

MAX_BOOTS: Final = (
    64  # lives of one gateway that are remembered: a few restarts, or as many gateways behind one address
)
FULL: Final = 0.85  # of a link: from here on it shows what it can carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Seconds, tokens and bytes of the running system for one of the model's."""

    time: float = 1.0
    tokens: float = 1.0
    bytes: float = 1.0

    def __post_init__(self) -> None:
        for name in ("time", "tokens", "bytes"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ValueError(f"{name} scale = {getattr(self, name)}: must be above 0")

    def bytes_per_s(self, seen: float) -> float:
        """The model's rate for one that was seen."""
        return seen / self.bytes * self.time

    def threshold(self, planned: float, tie_share: float) -> float:
        """A threshold of the running system, a whole number, as its lengths are."""
        seen = planned * self.tokens
        return float(round(seen) if tie_share == 1 else round(seen, 6))


@dataclass(slots=True)
class Cursors:
    """How far the samples of one gateway have been read. What it had before anybody listened is not new."""

    boot: str = ""
    _read: dict[str, tuple[int, int]] = field(default_factory=dict)

    def query(self) -> dict[str, str]:
        """What to ask for."""
        uncached, outputs = self._read.get(self.boot, (0, 0))
        return {"boot": self.boot, "uncached": str(uncached), "outputs": str(outputs)}

    def new(self, load: GatewayLoad) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The samples of `load` that are new: uncached lengths, lengths of answers."""
        first, self.boot = not self._read, load.boot
        uncached, outputs = self._read.pop(load.boot, (0, 0))
        self._read[load.boot] = (load.uncached.last_seq, load.outputs.last_seq)
        while len(self._read) > MAX_BOOTS:
            del self._read[next(iter(self._read))]
        return ((), ()) if first else (_after(load.uncached, uncached), _after(load.outputs, outputs))


def _after(samples: Samples, seq: int) -> tuple[int, ...]:
    count = min(max(0, samples.last_seq - seq), len(samples.values))
    return samples.values[len(samples.values) - count :]


@dataclass(slots=True)
class Readings:
    """What has been heard since the last observation: of samples the latest ones, as a mere listener observes nothing."""

    units: Units = field(default_factory=Units)
    max_samples: int = 1 << 20
    _cursors: dict[str, Cursors] = field(default_factory=dict)
    _loads: dict[str, GatewayLoad] = field(default_factory=dict)
    _uncached: list[int] = field(default_factory=list)
    _outputs: list[int] = field(default_factory=list)
    _since_s: float | None = None

    def query(self, gateway: str) -> dict[str, str]:
        """What to ask a gateway for."""
        return self._cursors.setdefault(gateway, Cursors()).query()

    def heard(self, gateway: str, load: GatewayLoad) -> None:
        """A gateway has answered."""
        uncached, outputs = self._cursors.setdefault(gateway, Cursors()).new(load)
        self._uncached = [*self._uncached, *uncached][-self.max_samples :]
        self._outputs = [*self._outputs, *outputs][-self.max_samples :]
        self._loads[gateway] = load

    def keep(self, gateways: Iterable[str]) -> None:
        """Forgets all others."""
        kept = set(gateways)
        self._cursors = {name: cursors for name, cursors in self._cursors.items() if name in kept}

    def nodes(self) -> list[NodeReport]:
        """All nodes that gateways see, each once; one that works for any of them works."""
        found: dict[str, NodeReport] = {}
        for load in self._loads.values():
            for node in load.nodes:
                if node.node_id not in found or node.state == READY:
                    found[node.node_id] = node
        return list(found.values())

    def found(self) -> PlanSetting | None:
        """The setting of the first gateway that answered; None: none has."""
        load = next(iter(self._loads.values()), None)
        return None if load is None else PlanSetting(threshold_tokens=load.threshold_tokens, tie_share=load.tie_share)

    def observe(self, at_s: float, setting: PlanSetting) -> tuple[Observation, PlanInputs]:
        """What was heard since the last call, in the model's units for the controller, and as it is for people."""
        nodes, scale = self.nodes(), self.units
        prefills, decodes = (of_kind(nodes, ClusterKind.PD, role) for role in (Role.PREFILL, Role.DECODE))
        prefill_loads = [float(node.running + node.waiting) for node in prefills]
        decode_loads = [(node.running + node.waiting) / node.slots for node in decodes]
        num_prfaas = len(of_kind(nodes, ClusterKind.PRFAAS, Role.PREFILL))
        egress = _egress(link for load in self._loads.values() for link in load.links)
        uncached, outputs = self._uncached, self._outputs
        span_s = at_s - self._since_s if self._since_s is not None else 0.0
        seen = PlanInputs(
            requests=len(uncached),
            offered_req_per_s=len(uncached) / span_s if span_s > 0 else 0.0,
            mean_uncached_tokens=float(np.mean(uncached)) if uncached else 0.0,
            mean_output_tokens=float(np.mean(outputs)) if outputs else 0.0,
            num_prfaas=num_prfaas,
            num_prefill=len(prefills),
            num_decode=len(decodes),
            prefill_load=float(np.mean(prefill_loads)) if prefill_loads else 0.0,
            decode_load=float(np.mean(decode_loads)) if decode_loads else 0.0,
            egress_bytes_per_s=egress,
            gateways=len(self._loads),
            roles={node.node_id: node.role for node in (*prefills, *decodes)},
        )
        observation = Observation(
            at_s=at_s,
            uncached_tokens=[tokens / scale.tokens for tokens in uncached],
            output_tokens=[tokens / scale.tokens for tokens in outputs],
            num_prefill=len(prefills),
            num_decode=len(decodes),
            threshold_tokens=setting.threshold_tokens / scale.tokens,
            tie_share=setting.tie_share,
            prefill_loads=prefill_loads,
            decode_loads=decode_loads,
            num_prfaas=num_prfaas,
            egress_bytes_per_s=None if egress is None else scale.bytes_per_s(egress),
            converting=sum(node.state == CONVERTING for node in nodes),
        )
        self._uncached, self._outputs, self._loads, self._since_s = [], [], {}, at_s
        return observation, seen


def _egress(links: Iterable[LinkReport]) -> float | None:
    """What the links carry, where they show it: several gateways see the same ones. None: they are not full, as far as is seen.

    A link that is down is the short timescale's business; to plan without it would be to follow every outage.
    """
    shown: dict[tuple[str, str], float] = {}
    for link in links:
        if link.up and link.rate_bytes_per_s and (link.congested or link.utilisation >= FULL):
            ends = (link.source, link.destination)
            shown[ends] = min(link.rate_bytes_per_s, shown.get(ends, float("inf")))
    return sum(shown.values()) if shown else None


def quietest(nodes: Iterable[NodeReport], role: Role, preferred: Mapping[str, Role]) -> NodeReport | None:
    """The node of a role that has the least to do: it is the soonest drained. One that `preferred` converts comes first."""
    working = of_kind(nodes, ClusterKind.PD, role)
    chosen = [node for node in working if preferred.get(node.node_id, role) is not role]
    return min(chosen or working, key=lambda node: (node.running + node.waiting, node.node_id), default=None)
