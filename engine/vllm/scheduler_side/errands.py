"""One of the agent's jobs as the connector sees it: its outcome, and how much of it the ranks have written."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.agent.link import AgentJob
from engine.vllm.layout import LayerKind, LayerPlace, VllmLayout
from engine.vllm.scheduler_side.steps import ArenaRef, LayerWritten, StateWritten, StepWritten
from transport.control.messages import Delivered, JobPages, LayerDone, PrefillDone, StateDone


@dataclass(frozen=True, slots=True)
class Granted:
    """The pages of an errand are there."""

    errand: int
    pages: JobPages
    arena: ArenaRef


@dataclass(frozen=True, slots=True)
class ErrandFailed:
    """An errand failed: it was refused, or its granted pages are lost."""

    errand: int
    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """The push of an errand with a ticket was delivered."""

    errand: int
    outcome: Delivered


@dataclass(frozen=True, slots=True)
class ErrandWritten:
    """All of an errand's tokens are in its pages, and prefix cache by now."""

    errand: int


AgentEvent = Granted | ErrandFailed | Arrived | ErrandWritten


@dataclass(slots=True)
class Errand:
    """A job's progress. A layer is done when all ranks that write it have, a state likewise, all of it when every rank has."""

    number: int
    num_tokens: int
    job: AgentJob | None = None
    task: "asyncio.Task[None] | None" = None
    layers: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # (group, layer): tokens by rank
    states: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)  # (group, layer, length): ranks
    written: dict[int, int] = field(default_factory=dict)  # tokens by rank
    unfilled: tuple[tuple[int, int], ...] = ()
    computed_tokens: int = 0
    began_s: float | None = None  # to compute, on the loop's clock
    complete: bool = False

    def layer_written(self, layout: VllmLayout, rank: int, message: LayerWritten) -> LayerDone | None:
        """What the agent is told, if this makes a difference to it."""
        place = layout.place_of(message.group, message.layer)
        tokens = self.layers.setdefault((message.group, message.layer), {})
        before = self._tokens_of(layout, place, tokens)
        tokens[rank] = message.num_tokens
        now = self._tokens_of(layout, place, tokens)
        if now <= before:
            return None
        return LayerDone(job=message.job, group=message.group, layer=message.layer, num_tokens=now)

    def state_written(self, layout: VllmLayout, rank: int, message: StateWritten) -> StateDone | None:
        """What the agent is told, if this makes a difference to it."""
        ranks = self.states.setdefault((message.group, message.layer, message.num_tokens), set())
        ranks.add(rank)
        if len(ranks) != layout.num_writers(layout.place_of(message.group, message.layer)):
            return None
        return StateDone(job=message.job, group=message.group, layer=message.layer, num_tokens=message.num_tokens)

    def step_written(self, layout: VllmLayout, rank: int, message: StepWritten) -> bool:
        """Whether every rank says that it has written everything."""
        self.written[rank] = message.num_tokens
        return len(self.written) == layout.workers and min(self.written.values()) >= self.num_tokens

    def unwritten(self, layout: VllmLayout) -> tuple[str, ...]:
        """Attention layers that are not whole: a rank that writes them has not said that all tokens are there."""
        return tuple(
            place.layer.name
            for place in layout.places
            if place.layer.kind is not LayerKind.STATE
            and self._tokens_of(layout, place, self.layers.get((place.group, place.number), {})) < self.num_tokens
        )

    def _tokens_of(self, layout: VllmLayout, place: LayerPlace, by_rank: Mapping[int, int]) -> int:
        return min(by_rank.values()) if len(by_rank) == layout.num_writers(place) else 0

    def done(self, now: float) -> PrefillDone:
        """What the agent is told at the end."""
        assert self.job is not None
        return PrefillDone(
            job=self.job.job,
            num_tokens=self.num_tokens,
            unfilled=self.unfilled,
            computed_tokens=self.computed_tokens,
            compute_s=now - self.began_s if self.began_s is not None else 0.0,
        )
