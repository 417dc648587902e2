"""A node's way from one role to the other: what follows an event, as a table.

    STEADY ──Command──► DRAINING ──RoleDrained──► VERIFYING ──Verified──► STEADY, in the new role
       ▲                   │                          │
       └── too late, or the old role is wanted ───────┴── too late, RoleUnfit, or the old role is wanted: the old role

From the first step to the last the node takes nothing new for either role, and whatever ends it ends in one of the two. The
role changes in one place, when the new one has been verified: a node that dies before comes back in the old one.

Commands carry an epoch, which only grows. An older one is refused, the same again changes nothing, a newer one overrules what
is under way: with two roles it either wants the same or the old one back. Epochs count plans and commands, one by one. One
that leaps too far ahead is refused: it would leave no room for those that come after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

MAX_LEAP: Final = 1 << 32  # of an epoch ahead of the node's own: no planner has made as many plans meanwhile
MAX_EPOCH: Final = 1 << 62  # far from where counting would end


class ConversionPhase(StrEnum):
    """Where a conversion is."""

    STEADY = "steady"
    DRAINING = "draining"
    VERIFYING = "verifying"


class CommandOutcome(StrEnum):
    """How the newest command ended."""

    PENDING = ""  # it is under way, or there was none
    CONVERTED = "converted"
    UNCHANGED = "unchanged"  # the node held that role already
    DRAIN_TIMEOUT = "drain_timeout"
    VERIFY_FAILED = "verify_failed"
    WITHDRAWN = "withdrawn"  # a newer command wanted the old role back
    INTERRUPTED = "interrupted"  # the agent ended meanwhile


class StaleCommand(Exception):
    """A command that a newer one, or another of the same epoch, came before."""


class LeapingCommand(Exception):
    """A command whose epoch is too far ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A node's role, and the newest command. `attempt` numbers conversions: news of an earlier one is no news.

    Times are on the node's clock; `deadline` is that of the phase. `drain_s` and `control_s` are what the last conversion took.
    """

    role: str
    epoch: int = 0
    target: str = ""
    phase: ConversionPhase = ConversionPhase.STEADY
    outcome: CommandOutcome = CommandOutcome.PENDING
    detail: str = ""
    attempt: int = 0
    verify_timeout_s: float = 0.0
    phase_began: float = 0.0
    deadline: float = float("inf")
    drain_s: float = 0.0
    control_s: float = 0.0

    @property
    def lasting(self) -> tuple[str, int, str, CommandOutcome, str]:
        """What a restart must not undo: role, epoch, target, outcome, detail."""
        return self.role, self.epoch, self.target, self.outcome, self.detail

    @property
    def is_converting(self) -> bool:
        """Whether the node takes nothing new."""
        return self.phase is not ConversionPhase.STEADY


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An operator or a plan wants the node in `role`."""

    epoch: int
    role: str
    drain_timeout_s: float
    verify_timeout_s: float


@dataclass(frozen=True, slots=True)
class RoleDrained:
    """Nothing of the old role is left."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The engine does what the new role needs."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RoleUnfit:
    """It does not, and why."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Command | RoleDrained | Verified | RoleUnfit | Tick


class Effect(StrEnum):
    """What the node has to do about it, in this order."""

    ANNOUNCE = "announce"  # gateways hear of it
    REMEMBER = "remember"  # a restart must not forget it
    CARRY_OUT = "carry out"  # wait until it is drained, then verify: a conversion has begun
    COUNT = "count"  # one has ended


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """What follows an event."""

    conversion: Conversion
    effects: tuple[Effect, ...] = ()


BEGUN: Final = (Effect.ANNOUNCE, Effect.REMEMBER, Effect.CARRY_OUT)
ENDED: Final = (Effect.ANNOUNCE, Effect.REMEMBER, Effect.COUNT)


def step(conversion: Conversion, event: Event, now: float) -> ConversionStep:
    """The one after `event`. Raises StaleCommand, LeapingCommand."""
    if isinstance(event, Command):
        if is_repeated(conversion, event):
            return ConversionStep(conversion)
    elif not isinstance(event, Tick) and event.attempt != conversion.attempt:
        return ConversionStep(conversion)
    follow = TRANSITIONS.get((conversion.phase, type(event)))
    return ConversionStep(conversion) if follow is None else follow(conversion, event, now)


def is_repeated(conversion: Conversion, command: Command) -> bool:
    """Whether the newest command is asked for again.

    Raises StaleCommand for one that comes too late, LeapingCommand for one that is too far ahead.
    """
    if command.epoch > (most := min(conversion.epoch + MAX_LEAP, MAX_EPOCH)):
        raise LeapingCommand(f"epoch {command.epoch} is too far ahead of {conversion.epoch}: at most {most}")
    if command.epoch > conversion.epoch:
        return False
    if command.epoch == conversion.epoch and command.role == conversion.target:
        return True
    newest = f"epoch {conversion.epoch} wants {conversion.target or conversion.role}"
    raise StaleCommand(f"epoch {command.epoch} wants {command.role}, but {newest}")


def _begin(conversion: Conversion, command: Command, now: float) -> ConversionStep:
    commanded = replace(conversion, epoch=command.epoch, target=command.role, detail="", drain_s=0.0, control_s=0.0)
    if command.role == conversion.role:
        return ConversionStep(replace(commanded, outcome=CommandOutcome.UNCHANGED), ENDED)
    begun = replace(
        commanded,
        phase=ConversionPhase.DRAINING,
        outcome=CommandOutcome.PENDING,
        attempt=conversion.attempt + 1,
        verify_timeout_s=command.verify_timeout_s,
        phase_began=now,
        deadline=now + command.drain_timeout_s,
    )
    return ConversionStep(begun, BEGUN)


def _overrule_draining(conversion: Conversion, command: Command, now: float) -> ConversionStep:
    if command.role == conversion.role:
        return _withdraw(conversion, command, now)
    deadline = now + command.drain_timeout_s
    taken = replace(
        conversion, epoch=command.epoch, verify_timeout_s=command.verify_timeout_s, deadline=deadline
    )  # fmt: skip
    return ConversionStep(taken, (Effect.ANNOUNCE, Effect.REMEMBER))


def _overrule_verifying(conversion: Conversion, command: Command, now: float) -> ConversionStep:
    if command.role == conversion.role:
        return _withdraw(conversion, command, now)
    return ConversionStep(replace(conversion, epoch=command.epoch), (Effect.ANNOUNCE, Effect.REMEMBER))


def _withdraw(conversion: Conversion, command: Command, now: float) -> ConversionStep:
    commanded = replace(conversion, epoch=command.epoch, target=command.role)
    return _end(commanded, CommandOutcome.WITHDRAWN, now)


def _verify(conversion: Conversion, event: RoleDrained, now: float) -> ConversionStep:
    verifying = replace(
        conversion,
        phase=ConversionPhase.VERIFYING,
        drain_s=now - conversion.phase_began,
        phase_began=now,
        deadline=now + conversion.verify_timeout_s,
    )
    return ConversionStep(verifying)


def _take_up(conversion: Conversion, event: Verified, now: float) -> ConversionStep:
    return _end(replace(conversion, role=conversion.target), CommandOutcome.CONVERTED, now)


def _restore(conversion: Conversion, event: RoleUnfit, now: float) -> ConversionStep:
    return _end(conversion, CommandOutcome.VERIFY_FAILED, now, event.reason)


def _drain_late(conversion: Conversion, event: Tick, now: float) -> ConversionStep:
    if now < conversion.deadline:
        return ConversionStep(conversion)
    return _end(
        conversion, CommandOutcome.DRAIN_TIMEOUT, now, f"requests still ran after {now - conversion.phase_began:.1f} s"
    )


def _verify_late(conversion: Conversion, event: Tick, now: float) -> ConversionStep:
    if now < conversion.deadline:
        return ConversionStep(conversion)
    return _end(conversion, CommandOutcome.VERIFY_FAILED, now, f"no answer after {now - conversion.phase_began:.1f} s")


def _end(conversion: Conversion, outcome: CommandOutcome, now: float, detail: str = "") -> ConversionStep:
    in_phase_s = now - conversion.phase_began
    drained = conversion.phase is ConversionPhase.VERIFYING
    ended = replace(
        conversion,
        phase=ConversionPhase.STEADY,
        outcome=outcome,
        detail=detail,
        deadline=float("inf"),
        drain_s=conversion.drain_s if drained else in_phase_s,
        control_s=in_phase_s if drained else 0.0,
    )
    return ConversionStep(ended, ENDED)


# What is not here is news that comes too late, or a time that is not awaited: nothing follows.
TRANSITIONS: Final[Mapping[tuple[ConversionPhase, type[Event]], Callable[[Conversion, Any, float], ConversionStep]]] = (
    MappingProxyType(
        {
            (ConversionPhase.STEADY, Command): _begin,
            (ConversionPhase.DRAINING, Command): _overrule_draining,
            (ConversionPhase.DRAINING, RoleDrained): _verify,
            (ConversionPhase.DRAINING, Tick): _drain_late,
            (ConversionPhase.VERIFYING, Command): _overrule_verifying,
            (ConversionPhase.VERIFYING, Verified): _take_up,
            (ConversionPhase.VERIFYING, RoleUnfit): _restore,
            (ConversionPhase.VERIFYING, Tick): _verify_late,
        }
    )
)
