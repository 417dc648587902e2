"""Carries a node's conversions out: `pd_cluster.conversion` says what follows, this waits, verifies, remembers and tells.

The prefix cache, transfers of prefixes and the engine go on as they are: engines of both roles are the same, what changes is
what the node takes. So nothing is lost with a role but the requests that it would have got.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import aiohttp

from node.config import ROLES
from node.errors import NodeRefusal
from node.role import Convertible, RoleState
from pd_cluster.conversion import (
    Command,
    CommandOutcome,
    Conversion,
    ConversionPhase,
    Effect,
    Event,
    LeapingCommand,
    RoleDrained,
    RoleUnfit,
    StaleCommand,
    Tick,
    Verified,
    is_repeated,
    step,
)
from pd_cluster.memory import RoleMemory
from pd_cluster.verification import VerificationFailed, verify
from transport.control.proto import node_pb2 as pb

log = logging.getLogger(__name__)

POLL_S: Final = 0.01
VERIFY_TIMEOUT_S: Final = 30.0
MAX_TIMEOUT_S: Final = 86400.0
MAX_WAIT_S: Final = 3600.0
WRITE_S: Final = 2.0  # an answer waits no longer for the role's file, at the beginning and at the end
READY: Final = (pb.NODE_STATE_READY, pb.NODE_STATE_CONVERTING)
PHASES: Final = {
    ConversionPhase.STEADY: pb.CONVERSION_PHASE_STEADY,
    ConversionPhase.DRAINING: pb.CONVERSION_PHASE_DRAINING,
    ConversionPhase.VERIFYING: pb.CONVERSION_PHASE_VERIFYING,
}


class RoleConverter:
    """The role of a PD node. `counts` are commands by how they ended."""

    def __init__(self, node: Convertible, now: Callable[[], float], *, write_s: float = WRITE_S) -> None:
        self._node = node
        self._now = now
        self._write_s = write_s
        self._memory = RoleMemory(node.config)
        self._conversion = self._memory.recall()
        self._remembered = self._conversion.lasting
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self.counts: Counter[str] = Counter()

    @property
    def standing(self) -> RoleState:
        """What the node does now."""
        conversion = self._conversion
        return RoleState(
            node_id=self._node.config.node_id, role=conversion.role, is_converting=conversion.is_converting
        )  # fmt: skip

    async def convert(self, request: pb.ConvertRequest) -> pb.Conversion:
        """Takes a command up, and waits up to `wait_s` for its end. Raises NodeRefusal."""
        command = self._command(request)
        try:
            if not is_repeated(self._conversion, command):
                self._require_engine()
                self._take(command)
        except StaleCommand as exc:
            raise NodeRefusal("stale_epoch", f"{self._node.config.node_id}: {exc}") from exc
        except LeapingCommand as exc:
            raise NodeRefusal("bad_request", f"{self._node.config.node_id}: {exc}") from exc
        await self._until(self._is_remembered, self._write_s)
        await self._until(lambda: self._has_ended(command.epoch), min(request.wait_s, MAX_WAIT_S))
        await self._until(self._is_remembered, self._write_s)
        return self.report()

    def report(self) -> pb.Conversion:
        """The newest command, and how it stands."""
        conversion, since_s = self._conversion, self._now() - self._conversion.phase_began
        return pb.Conversion(
            epoch=conversion.epoch,
            role=conversion.role,
            target=conversion.target,
            phase=PHASES[conversion.phase],
            outcome=conversion.outcome.value,
            detail=conversion.detail,
            drain_s=since_s if conversion.phase is ConversionPhase.DRAINING else conversion.drain_s,
            control_s=since_s if conversion.phase is ConversionPhase.VERIFYING else conversion.control_s,
        )

    def _command(self, request: pb.ConvertRequest) -> Command:
        if request.role not in ROLES:
            raise NodeRefusal("bad_request", f"role is {request.role!r}; it must be {' or '.join(ROLES)}")
        if not request.epoch:
            raise NodeRefusal("bad_request", "epoch is 0; the first epoch is 1")
        drain_s = _seconds("drain_timeout_s", request.drain_timeout_s, self._node.config.drain_timeout_s)
        verify_s = _seconds("verify_timeout_s", request.verify_timeout_s, VERIFY_TIMEOUT_S)
        _seconds("wait_s", request.wait_s, 0.0)
        return Command(
            epoch=request.epoch, role=request.role, drain_timeout_s=drain_s, verify_timeout_s=verify_s
        )  # fmt: skip

    def _require_engine(self) -> None:
        if (state := self._node.state()) not in READY:
            label = pb.NodeState.Name(state).removeprefix("NODE_STATE_").lower()
            raise NodeRefusal(label, f"{self._node.config.node_id} cannot change its role now")

    def _is_remembered(self) -> bool:
        return self._remembered == self._conversion.lasting

    def _has_ended(self, epoch: int) -> bool:
        return self._conversion.epoch > epoch or not self._conversion.is_converting

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Waits until something holds that a step or a write can change, and no longer than that."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _take(self, event: Event) -> None:
        """Goes on by one step. Raises StaleCommand."""
        following = step(self._conversion, event, self._now())
        self._conversion = conversion = following.conversion
        for effect in following.effects:
            match effect:
                case Effect.ANNOUNCE:
                    log.info("%s", _line(self._node.config.node_id, conversion))
                    self._node.publish_description()
                case Effect.REMEMBER:
                    self._node.tasks.start("role's file", self._remember)
                case Effect.CARRY_OUT:
                    self._node.tasks.start("conversion", partial(self._carry_out, conversion.attempt))
                case Effect.COUNT:
                    self.counts[conversion.outcome] += 1
        if following.effects:
            self._changed.set()

    async def _remember(self) -> None:
        async with self._writing:
            conversion = self._conversion
            try:
                if conversion.lasting != self._remembered:
                    await asyncio.to_thread(self._memory.write, conversion)
            except OSError as exc:  # a restart may undo it; until then it holds
                self._node.tasks.failures["role's file"] += 1
                log.error("the role of node=%s is not remembered: %s", self._node.config.node_id, exc)
            self._remembered = conversion.lasting
            self._changed.set()

    async def _carry_out(self, attempt: int) -> None:
        while self._is_in(ConversionPhase.DRAINING, attempt):
            if has_drained(self._node):
                self._take(RoleDrained(attempt))
            else:
                self._take(Tick())
                await asyncio.sleep(POLL_S)
        if self._is_in(ConversionPhase.VERIFYING, attempt):
            self._take(await self._verified(attempt))

    def _is_in(self, phase: ConversionPhase, attempt: int) -> bool:
        return self._conversion.phase is phase and self._conversion.attempt == attempt

    async def _verified(self, attempt: int) -> Verified | RoleUnfit:
        left_s = self._conversion.deadline - self._now()
        try:
            async with asyncio.timeout(left_s):
                await verify(self._node)
        except TimeoutError:
            return RoleUnfit(attempt, f"no answer after {self._conversion.verify_timeout_s:g} s")
        except (VerificationFailed, aiohttp.ClientError, OSError) as exc:
            return RoleUnfit(attempt, str(exc) or type(exc).__name__)
        return Verified(attempt)


def has_drained(node: Convertible) -> bool:
    """Whether no request of the old role is left. Prefixes on their way, and answers being kept, are of no role."""
    legs = node.legs is not None and node.legs.has_legs
    decodes = node.decodes is not None and node.decodes.expects_decodes
    return not (legs or decodes or node.engine_load.running or node.engine_load.waiting)


def _seconds(name: str, value: float, default: float) -> float:
    if not (math.isfinite(value) and 0.0 <= value <= MAX_TIMEOUT_S):
        raise NodeRefusal("bad_request", f"{name} is {value}; it must be 0 to {MAX_TIMEOUT_S:.0f}")
    return value or default


def _line(node_id: str, conversion: Conversion) -> str:
    about = f"conversion node={node_id} epoch={conversion.epoch} role={conversion.role} target={conversion.target}"
    if conversion.outcome is CommandOutcome.PENDING:
        return f"{about} phase={conversion.phase}"
    took = f"drain={conversion.drain_s:.3f}s control={conversion.control_s * 1e3:.1f}ms"
    return f"{about} outcome={conversion.outcome} {took}{' ' + conversion.detail if conversion.detail else ''}"
