"""Which nodes may change their role: a node does not know which others are there; its commander must."""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.decisions.views import ClusterKind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStanding:
    """A node and its role now; `is_ready` unless it is down, drains, or is on its way to another role."""

    node_id: str
    cluster: str
    kind: ClusterKind
    role: Role
    is_ready: bool = True


def why_not(node_id: str, to: Role, nodes: Iterable[NodeStanding]) -> str:
    """The reason why `node_id` should not become `to`; "" if it may. An operator may insist anyway."""
    known = {node.node_id: node for node in nodes}
    if (node := known.get(node_id)) is None:
        return f"{node_id}: there is no such node; known are {', '.join(sorted(known)) or 'none'}"
    if node.kind is ClusterKind.PRFAAS:
        return f"{node_id} belongs to the PrfaaS cluster {node.cluster}: it only prefills"
    if not node.is_ready:
        return f"{node_id} is not ready: it is down, drains, or changes its role already"
    if node.role is to:
        return ""
    others = [other for other in known.values() if other is not node and other.cluster == node.cluster]
    if any(other.role is node.role and other.is_ready for other in others):
        return ""
    return f"{node_id} is the last {node.role} node of {node.cluster} that is ready"
