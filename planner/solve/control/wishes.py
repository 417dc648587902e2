"""How many nodes a site should have in each role, by the load of those that work there: what scalers from outside ask for.

A role's wish depends on its load alone, and not on how many nodes share it. So it stays where it is once nodes are there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import msgspec

from planner.decisions.plans.offered import READY, NodeReport
from planner.decisions.views import ClusterKind, Role

ROUNDING: Final = 1e-9
LEAST_AIM: Final = 1e-3  # a thousand nodes for each request; with much less, numbers of nodes overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAims:
    """The mean loads that nodes should have: requests of a node that prefills, and the share of a decode node's slots."""

    prefill: float = 2.0
    decode: float = 0.7

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if not LEAST_AIM <= getattr(self, name) < float("inf"):
                raise ValueError(f"scale: {name}={getattr(self, name)}: must be at least {LEAST_AIM:g} and finite")


class RoleWish(msgspec.Struct, frozen=True, kw_only=True):
    """`nodes` work, with that `load` in the mean; `wished` nodes would have the load that is aimed at."""

    nodes: int
    load: float
    wished: int
    reason: str


class SiteWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cluster. A role without a node that works is left out: nothing can be said of it."""

    kind: ClusterKind
    prefill: RoleWish | None = None
    decode: RoleWish | None = None


class ScaleWishes(msgspec.Struct, frozen=True, kw_only=True):
    """All sites, by cluster. `at` is when the gateways were last asked, in seconds since the epoch; `model` what they serve."""

    at: float
    reason: str
    sites: Mapping[str, SiteWish]
    model: str = ""


def site_wishes(nodes: Iterable[NodeReport], aims: LoadAims) -> dict[str, SiteWish]:
    """What each cluster should have, by its name."""
    ready = [node for node in nodes if node.state == READY]
    found = {}
    for cluster in sorted({node.cluster for node in ready}):
        own = [node for node in ready if node.cluster == cluster]
        found[cluster] = SiteWish(
            kind=own[0].kind,
            prefill=_wish([node for node in own if node.role is Role.PREFILL], aims.prefill),
            decode=_wish([node for node in own if node.role is Role.DECODE], aims.decode),
        )
    return found


def _wish(nodes: Sequence[NodeReport], aim: float) -> RoleWish | None:
    if not nodes:
        return None
    total = sum(_load(node) for node in nodes)
    mean = total / len(nodes)
    return RoleWish(
        nodes=len(nodes),
        load=mean,
        wished=max(1, ceil(total / aim - ROUNDING)),
        reason=f"mean load {mean:.3g} on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}, {aim:g} is aimed at",
    )


def _load(node: NodeReport) -> float:
    """Requests there; of a node that decodes, over its slots."""
    requests = float(node.running + node.waiting)
    return requests / node.slots if node.role is Role.DECODE else requests
