"""Checks a cache: every page has one holder, every lock a reservation, every block its parent."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from hybrid_cache.cache.blocks import BlockNode, Companion, Item
from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.errors import IntegrityError

Nodes = Mapping[bytes, BlockNode]
Companions = Sequence[Mapping[bytes, Companion]]


def held_pages(nodes: Nodes, companions: Companions, holds: Collection[ReservedPages]) -> list[int]:
    """The pages of all blocks and of all reservations, as often as they are held."""
    held = list(chain.from_iterable([node.pages for node in nodes.values()]))
    held += [page for group in companions for companion in group.values() for page in companion.pages]
    held += [page for hold in holds for page in hold.own_pages()]
    return held


def evictable_pages(nodes: Nodes, companions: Companions, node_pages: int) -> int:
    """The pages of what is not locked; a node has `node_pages` of them."""
    unlocked = len(nodes) - sum([node.locks > 0 for node in nodes.values()])
    return unlocked * node_pages + sum(len(c.pages) for group in companions for c in group.values() if not c.locks)


def check_locks(nodes: Nodes, companions: Companions, holds: Collection[ReservedPages]) -> None:
    """Raises IntegrityError unless everything is locked as often as reservations use it."""
    locks: Counter[Item] = Counter()
    for hold in holds:
        if [node.hash for node in hold.nodes] != hold.hashes[: len(hold.nodes)]:
            raise IntegrityError(f"reservation {hold.request_id!r} locks a path that is not its own")
        locks.update(hold.nodes)
        locks.update(hold.companions)
    locked: list[Item] = [node for node in nodes.values() if node.locks]
    locked += [companion for group in companions for companion in group.values() if companion.locks]
    for item in locked:
        if item.locks != locks.pop(item, 0):
            raise IntegrityError(f"{item!r} is not locked as often as it is used")
    if locks:
        raise IntegrityError(f"in use but not cached, or not locked: {list(locks)[:4]}")


def check_tree(nodes: Nodes, companions: Companions) -> None:
    """Raises IntegrityError unless every block lies under its hash, after its parent, which counts it."""
    children = Counter([node.parent for node in nodes.values()])
    for parent in children:
        if parent is not None and nodes.get(parent.hash) is not parent:
            raise IntegrityError(f"{parent!r} has orphans")
    for block_hash, node in nodes.items():
        if node.hash != block_hash or node.children != (children[node] if node.children else 0):
            raise IntegrityError(f"{node!r} has {children[node]} children")
    counted = sum([node.children for node in nodes.values()])
    if counted != len(nodes) - children[None]:
        raise IntegrityError(f"{len(nodes) - children[None]} blocks have a parent, parents count {counted}")
    for group, held in enumerate(companions):
        for block_hash, companion in held.items():
            if nodes.get(block_hash) is not companion.node or companion.key != (group, block_hash):
                raise IntegrityError(f"{companion!r} is not its node's")
