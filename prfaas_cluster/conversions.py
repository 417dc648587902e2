"""The role of a PrfaaS node, which never changes."""

from collections.abc import Callable

from node.fixed_role import FixedRole
from node.role import Convertible


def conversions(node: Convertible, now: Callable[[], float]) -> FixedRole:
    """Refuses every command."""
    return FixedRole(node.config, "belongs to a PrfaaS cluster: it only prefills")
