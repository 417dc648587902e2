"""What serving needs of whoever runs a scheduler: the thread of a model, or the timers of a stand-in."""

from typing import Protocol

from engine.model.scheduler import Keep, Load, Work


class Runner(Protocol):
    """Its methods belong to the event loop's thread."""

    @property
    def load(self) -> Load:
        """With what has been submitted since the last round."""
        ...

    @property
    def alive(self) -> bool: ...

    def start(self) -> None: ...

    def submit(self, work: Work | Keep) -> None: ...

    def set_chunk_tokens(self, chunk_tokens: int) -> None: ...

    def stop(self, timeout_s: float) -> None:
        """Ends it; what still runs is told that it failed."""
        ...
