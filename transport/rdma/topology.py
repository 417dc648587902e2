"""Which NICs serve which memory, and which pairs of NICs of two hosts make a rail (Mooncake §3.2.3).

A host's topology matrix names, for each memory location ("cpu:0": the memory of NUMA node 0), the NICs to prefer and
those to use when none of the preferred ones works:

    cpu:0   preferred mlx5_0 mlx5_1    secondary mlx5_2 mlx5_3
    cpu:1   preferred mlx5_2 mlx5_3    secondary mlx5_0 mlx5_1

Two NICs can reach each other when they are on one fabric. What /sys and the kernel say is read in `read_nics`; the rest
is pure.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from transport.errors import RemoteProtocolError

ANY_NODE: Final = -1  # what /sys says where there is one node, or none is nearer
MAX_NICS: Final = 16
MAX_RAILS: Final = 16
_NAME: Final = re.compile(r"[\w.:/-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One port of an RDMA device. `fabric` is equal for NICs that reach each other."""

    name: str
    fabric: str
    numa_node: int = ANY_NODE
    preferred: bool = True  # for the memory that is spoken of


@dataclass(frozen=True, slots=True)
class RailPlan:
    """A pair of NICs. Tier 0 is preferred at both ends; tier 1 is for when nothing of tier 0 works."""

    local: str
    remote: str
    fabric: str
    tier: int


def judged(nics: Iterable[Nic], numa_node: int) -> tuple[Nic, ...]:
    """The NICs, marked as preferred or not for memory of `numa_node`. Where none is near, all are."""
    nics = tuple(nics)
    near = {nic.name for nic in nics if ANY_NODE in (nic.numa_node, numa_node) or nic.numa_node == numa_node}
    return tuple(replace(nic, preferred=nic.name in near or not near) for nic in nics)


def matrix(nics: Sequence[Nic]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The topology matrix: (preferred, secondary) NICs by memory location."""
    nodes = sorted({nic.numa_node for nic in nics if nic.numa_node != ANY_NODE}) or [0]
    rows = {f"cpu:{node}": judged(nics, node) for node in nodes}
    return {
        location: (tuple(n.name for n in row if n.preferred), tuple(n.name for n in row if not n.preferred))
        for location, row in rows.items()
    }


def plan_rails(local: Sequence[Nic], remote: Sequence[Nic]) -> tuple[RailPlan, ...]:
    """Pairs NICs of a common fabric, preferred ones with preferred ones; every NIC is in at least one pair."""
    plans: list[RailPlan] = []
    for fabric in sorted({nic.fabric for nic in local} & {nic.fabric for nic in remote}):
        ours = _preferred_first(nic for nic in local if nic.fabric == fabric)
        theirs = _preferred_first(nic for nic in remote if nic.fabric == fabric)
        for i in range(max(len(ours), len(theirs))):
            near, far = ours[i % len(ours)], theirs[i % len(theirs)]
            plans.append(RailPlan(near.name, far.name, fabric, 0 if near.preferred and far.preferred else 1))
    # Where preferred NICs of both ends share no fabric, the rest is as good as it gets.
    return tuple(sorted(plans, key=lambda plan: plan.tier)[:MAX_RAILS])


def _preferred_first(nics: Iterable[Nic]) -> list[Nic]:
    return sorted(nics, key=lambda nic: (not nic.preferred, nic.name))


def fabrics_of(nics: Iterable[Nic]) -> frozenset[str]:
    return frozenset(nic.fabric for nic in nics)


def format_nics(nics: Iterable[Nic]) -> str:
    """For the wire: "name fabric node preferred", one NIC a line."""
    return "\n".join(f"{nic.name} {nic.fabric} {nic.numa_node} {int(nic.preferred)}" for nic in nics)


def parse_nics(text: str) -> tuple[Nic, ...]:
    """The reverse. Raises RemoteProtocolError."""
    lines = text.splitlines()
    if len(lines) > MAX_NICS:
        raise RemoteProtocolError(f"{len(lines)} NICs, at most {MAX_NICS}")
    return tuple(_parse_nic(line) for line in lines)


def _parse_nic(line: str) -> Nic:
    fields = line.split(" ")
    if len(fields) != 4 or not all(_NAME.fullmatch(field) for field in fields):
        raise RemoteProtocolError(f"not a NIC: {line[:80]!r}")
    name, fabric, node, preferred = fields
    if not re.fullmatch(r"-1|\d{1,4}", node) or preferred not in "01":
        raise RemoteProtocolError(f"not a NIC: {line[:80]!r}")
    return Nic(name=name, fabric=fabric, numa_node=int(node), preferred=preferred == "1")


def numa_node_of(address: int, numa_maps: str) -> int:
    """The node that holds most pages of the mapping that begins at `address`, by /proc/PID/numa_maps."""
    for line in numa_maps.splitlines():
        start, _, rest = line.partition(" ")
        if start and int(start, 16) == address:
            pages = {int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", rest)}
            return max(pages, key=lambda node: pages[node]) if pages else ANY_NODE
    return ANY_NODE


def node_of_device(sys_class: Path, device: str) -> int:
    """The NUMA node that a device hangs on, by /sys/class/infiniband; ANY_NODE where /sys does not say."""
    try:
        return max(ANY_NODE, int((sys_class / device / "device" / "numa_node").read_text()))
    except (OSError, ValueError):
        return ANY_NODE
