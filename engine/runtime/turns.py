"""Shares an engine among tenants by their recent service (`transport.turns`): the next turn, and the next place.

A flow is a tenant's requests; those without a tenant are one. It is charged tokens of prompts that are computed, and of
answers that are decoded, divided by its weight.
"""

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final, NamedTuple

from transport.turns import LATELY_S, Turns, leaves_room

HALF_LIFE_S: Final = 30.0  # what was served before is forgotten


class WorkShare(NamedTuple):
    """The flow that work belongs to, and its share beside others (`weight` above 0)."""

    flow: str = ""
    weight: float = 1.0


EVERYBODYS: Final = WorkShare()


def may_begin(turns: Turns[str], waiting: Collection[str], held: Mapping[str, int], free: int, now: float) -> list[str]:
    """Flows, of those that wait, which may have one of the `free` places beside those that are held.

    A flow that is alone may have all of them. While others wait, hold some, or were served lately, none has all.
    """
    if free <= 0:
        return []
    are_several = len(waiting) > 1
    return [
        flow
        for flow in waiting
        if leaves_room(held.get(flow, 0), free)
        or not (are_several or any(other != flow for other in held) or _were_others_served(turns, flow, now))
    ]


def _were_others_served(turns: Turns[str], flow: str, now: float) -> bool:
    return any(other != flow and now - at_s <= LATELY_S for other, at_s in islice(turns.latest(), 2))
