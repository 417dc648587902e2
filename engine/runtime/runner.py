"""The interface of a scheduler's runner: the thread of a model, or the timers of a stand-in."""

from typing import Protocol

from engine.runtime.scheduler import Keep, ModelWork, SchedulerLoad
from engine.runtime.steps import Steps


class ModelRunner(Protocol):
    """Its methods belong to the event loop's thread."""

    @property
    def load(self) -> SchedulerLoad:
        """With what has been submitted since the last round."""
        ...

    @property
    def slots(self) -> int:
        """Sequences that run at once; more wait."""
        ...

    @property
    def steps(self) -> Steps:
        """Recent durations of decode steps. A stand-in reports those that it imitates."""
        ...

    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...

    def submit(self, work: ModelWork | Keep) -> None: ...

    def set_chunk_tokens(self, chunk_tokens: int) -> None: ...

    def stop(self, timeout_s: float) -> None:
        """Ends the runner; running requests fail."""
        ...
