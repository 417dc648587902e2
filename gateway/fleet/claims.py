"""How gateways divide tenants' limits: what each of them claims next, given what all claim now.

A claim is one gateway's: its fair part, which every tenant gets that has no parts of its own, and those parts. Claims lie in a
registry, and change one at a time: a gateway that changes its own has seen all others as they are. A claim grows only into
what no other claim has, so the parts of all gateways are never above one. It shrinks freely, and in force before it is written;
it is renewed freely, too, unless it is so old that another gateway may have given it up.

    asks nothing anywhere     every gateway has the fair part, 1 / gateways
    asked                     parts go by what gateways are asked for, and those that are asked nothing have `IDLE` in all

What is asked for is never known exactly. A part that is nearly right stays, unless another gateway lacks something. What all
these leave over is taken by a gateway that is asked for more than it has.

A gateway that does not renew its claim falls back to fair parts by itself (`gateway.ratelimit.parts`), so that is what others
count it with. It is forgotten after `FORGET_S`, or soon where it said that it leaves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Final, NamedTuple

from gateway.ratelimit.parts import PLACES_TOLERANCE, Parts, all_of, larger, smaller

LOST_S: Final = 15.0  # since a claim was renewed: its gateway has fallen back by then
FORGET_S: Final = 600.0
LOOK_GAP_S: Final = 4.0  # between two looks, for the second to know when a claim was renewed
RENEWED_WITHIN_S: Final = 8.0  # of the last time: 7 s later no other gateway counts it as lost yet
IDLE: Final = 0.01  # of a limit, for all gateways together
SLACK: Final = 0.1  # of a part, by which it may be another than what is asked for says
USED_SLACK: Final = 0.3  # where all of it is used: what one gateway gives up, another takes only after its next look
LEAST_WANTED: Final = 0.02  # of a limit; less moves nothing
MOST_WANTED: Final = 2.0  # clients that try again at once are no more than that
LEAST_ROOM: Final = 0.002  # of a limit; less is not taken
DIGITS: Final = 10**6
EQUAL: Final = 1e-9
NOTHING: Final = all_of(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayClaim:
    """What one gateway claims. `wanted` is what it is asked for, of tenants with parts of their own: 1.0 is the whole limit."""

    name: str
    fair: float = 0.0
    parts: Mapping[str, Parts] = field(default_factory=dict)
    wanted: Mapping[str, Parts] = field(default_factory=dict)
    is_leaving: bool = False

    def of(self, tenant: str) -> Parts:
        """The parts of a tenant."""
        return self.parts.get(tenant) or all_of(self.fair)

    def grows_from(self, before: "GatewayClaim") -> bool:
        """Whether any tenant has a larger part."""
        return self.fair > before.fair or any(
            self.of(tenant) != smaller(self.of(tenant), before.of(tenant)) for tenant in {*self.parts, *before.parts}
        )

    def within(self, before: "GatewayClaim") -> "GatewayClaim":
        """It, without what grows."""
        tenants = {*self.parts, *before.parts}
        parts = {tenant: smaller(self.of(tenant), before.of(tenant)) for tenant in tenants}
        return replace(self, fair=min(self.fair, before.fair), parts=parts)


class Sighting(NamedTuple):
    """A claim as it was last renewed. `since` says when, if the looks before were not far apart (`is_exact`)."""

    revision: int
    since: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class OtherGateways:
    """What a gateway counts the others with. Those that are lost keep what they have fallen back to."""

    alive: tuple[GatewayClaim, ...] = ()
    lost: tuple[GatewayClaim, ...] = ()
    forgotten: tuple[str, ...] = ()
    unsure: frozenset[str] = frozenset()  # alive, for all that is known

    @property
    def all(self) -> tuple[GatewayClaim, ...]:
        """As they say."""
        return *self.alive, *self.lost

    @property
    def at_worst(self) -> tuple[GatewayClaim, ...]:
        """Some may just have fallen back."""
        return tuple(_at_worst(each) if each.name in self.unsure else each for each in self.all)


class Sightings:
    """When the claims of others were renewed, by this machine's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, Sighting] = {}
        self._looked_at = float("-inf")

    def look(self, found: Mapping[str, tuple[GatewayClaim, int]], asked_at: float, now: float) -> OtherGateways:
        """The other gateways, by their claims and the revisions of these, as they were some time after `asked_at`."""
        is_exact = now - self._looked_at <= LOOK_GAP_S
        self._looked_at = now
        self._seen = {name: self._sighting(name, revision, is_exact, now) for name, (_, revision) in found.items()}
        alive, lost, forgotten = [], [], []
        for name, (claim, _) in found.items():
            seen = self._seen[name]
            age_s = asked_at - seen.since  # what was renewed later may not be here yet
            if age_s < LOST_S:
                alive.append(claim)
            elif age_s < FORGET_S and not claim.is_leaving:
                lost.append(GatewayClaim(name=name, fair=claim.fair))
            else:
                forgotten.append(name)
        unsure = frozenset(name for name, seen in self._seen.items() if not seen.is_exact)
        return OtherGateways(tuple(alive), tuple(lost), tuple(forgotten), unsure)

    def _sighting(self, name: str, revision: int, is_exact: bool, now: float) -> Sighting:
        before = self._seen.get(name)
        if before is not None and before.revision == revision:
            return before
        return Sighting(revision, now, is_exact)


def _at_worst(claim: GatewayClaim) -> GatewayClaim:
    fair = all_of(claim.fair)
    return replace(claim, parts={tenant: larger(parts, fair) for tenant, parts in claim.parts.items()})


def next_claim(
    own: GatewayClaim, others: OtherGateways, wanted: Mapping[str, Parts], places: Mapping[str, int]
) -> GatewayClaim:
    """What a gateway claims next. `wanted` is what it is asked for, `places` are tenants' limits of requests at once."""
    fair = min(1.0 / (1 + len(others.all)), _room(each.fair for each in others.all))
    wanted = {tenant: Parts(*map(_noticed, asked)) for tenant, asked in wanted.items()}
    told = {tenant: asked for tenant, asked in wanted.items() if any(asked)}
    tenants = {*told, *own.parts, *(tenant for each in others.all for tenant in each.parts)}
    parts: dict[str, Parts] = {}
    for tenant in sorted(tenants):
        own_parts = _parts(tenant, own, fair, others, wanted.get(tenant, NOTHING), places.get(tenant, 0))
        if tenant in told or max(abs(part - fair) for part in own_parts) > EQUAL:
            parts[tenant] = own_parts
    return GatewayClaim(name=own.name, fair=fair, parts=parts, wanted=told)


def _parts(tenant: str, own: GatewayClaim, fair: float, others: OtherGateways, wanted: Parts, places: int) -> Parts:
    held = own.of(tenant)
    asked = [each.wanted.get(tenant, NOTHING) for each in others.alive]
    rooms = [
        # What is ours stays ours; more comes only out of what certainly is no other gateway's.
        max(worst, min(part, room))
        for part, room, worst in zip(held, _rooms(tenant, others.all), _rooms(tenant, others.at_worst), strict=True)
    ]
    spare = _room(each.fair for each in others.lost)

    def rate(kind: int) -> float:
        of_others = [_Rate(each.of(tenant)[kind], told[kind]) for each, told in zip(others.alive, asked, strict=True)]
        if not (wanted[kind] or any(each.wanted for each in of_others)):
            return min(fair, rooms[kind])
        return _down(_next_rate(_Rate(held[kind], wanted[kind]), of_others, spare, rooms[kind]))

    def at_once() -> float:
        by_name = {each.name: told.at_once for each, told in zip(others.alive, asked, strict=True)}
        if not places or not (wanted.at_once or any(by_name.values())):
            return min(fair, rooms[-1])
        target = _places(own.name, {**by_name, own.name: wanted.at_once}, floor(places * spare + PLACES_TOLERANCE))
        return min(target, floor(rooms[-1] * places + PLACES_TOLERANCE)) / places

    return Parts(rate(0), rate(1), at_once())


def _rooms(tenant: str, others: Sequence[GatewayClaim]) -> Parts:
    """What others leave of each limit."""
    claimed = [each.of(tenant) for each in others]
    return Parts(*(_room(parts[kind] for parts in claimed) for kind in range(len(Parts._fields))))


class _Rate(NamedTuple):
    """One gateway's part of one limit by the minute, and what it is asked for."""

    held: float
    wanted: float


def _next_rate(own: _Rate, others: Sequence[_Rate], spare: float, room: float) -> float:
    """Its next part, where all of these have `spare` in all, and this one has `room`."""
    idle = IDLE / (1 + len(others))
    total = own.wanted + sum(each.wanted for each in others) + IDLE

    def due(each: _Rate) -> float:
        return spare * (each.wanted + idle) / total

    def slack(each: _Rate) -> float:
        return max(idle, (USED_SLACK if each.wanted > each.held else SLACK) * due(each))

    is_awaited = any(due(each) - each.held > slack(each) for each in others)
    part = own.held
    if abs(due(own) - own.held) > slack(own) or (is_awaited and own.held > due(own)):
        part = due(own)
    elif own.wanted > own.held and not is_awaited and room - own.held >= LEAST_ROOM:
        part = due(own) + slack(own)
    return min(part, room)


def _places(own: str, wanted: Mapping[str, float], places: int) -> int:
    """Of so many places, those of `own`; what is left over goes to those that miss most of one."""
    total = sum(wanted.values()) + IDLE * len(wanted)
    quotas = {name: places * (each + IDLE) / total for name, each in wanted.items()}
    dealt = {name: floor(quota) for name, quota in quotas.items()}
    first = sorted(quotas, key=lambda name: (dealt[name] - quotas[name], name))[: places - sum(dealt.values())]
    return dealt[own] + (own in first)


def _noticed(wanted: float) -> float:
    return round(min(wanted, MOST_WANTED), 3) if wanted >= LEAST_WANTED else 0.0


def _room(taken: Iterable[float]) -> float:
    return max(0.0, 1.0 - sum(taken))


def _down(part: float) -> float:
    """With few digits, and never more."""
    return floor(part * DIGITS) / DIGITS
