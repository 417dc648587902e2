"""What serving needs of a runner of the scheduler: the thread of a model, or the timers of a stand-in."""

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
        """What decode steps have taken lately. A stand-in's are those that it keeps to."""
        ...

    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...

    def submit(self, work: ModelWork | Keep) -> None: ...

    def set_chunk_tokens(self, chunk_tokens: int) -> None: ...

    def stop(self, timeout_s: float) -> None:
        """Ends it; what still runs is told that it failed."""
        ...
