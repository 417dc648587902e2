"""How the ranges of a transfer may be coded, by what the [node.coding] table allows for each kind of group."""

from collections.abc import Sequence
from math import gcd
from typing import Final

from hybrid_cache.layout.layout import Elements, ModelLayout
from hybrid_cache.layout.transfers import TransferRanges
from node.coding import KIND_OF, Coding
from transport.coding.choice import FormatOf, RangeFormat
from transport.coding.elements import ITEM_BYTES, Run

MIN_VECTOR: Final = 16  # shorter vectors would be mostly scales


def formats_of(coding: Coding, layout: ModelLayout, ranges: TransferRanges, *, exact: bool) -> FormatOf | None:
    """How the ranges of a transfer may be coded; None when they leave as they are. `exact` forbids to quantise."""
    if coding.off:
        return None
    by_group = [_format(coding, layout, group, exact) for group in range(len(layout.groups))]
    return lambda index: by_group[ranges.group_of(index)]


def _format(coding: Coding, layout: ModelLayout, group: int, exact: bool) -> RangeFormat:
    spec = layout.groups[group].spec
    policy = coding.policy(spec)
    return RangeFormat(KIND_OF[type(spec)], runs_of(layout.elements(group)), policy.exact() if exact else policy)


def runs_of(elements: Sequence[Elements]) -> tuple[Run, ...]:
    """Elements as transport knows them. K and V with heads of two sizes take the common part as their vector. So a chunk
    is one block, and not two per slab.
    """
    known = [e if e.dtype in ITEM_BYTES else Elements(e.num_bytes, "", 0) for e in elements]
    common = gcd(*(e.vector for e in known))
    one_kind = len({e.dtype for e in known}) == 1 and common >= MIN_VECTOR
    return tuple(Run(e.num_bytes, e.dtype, _vector(common if one_kind else e.vector)) for e in known)


def _vector(elements: int) -> int:
    return elements if elements >= MIN_VECTOR else 0
