"""What the gateway is asked for, counted for a planner (`gateway.models.load_report`)."""

from typing import Final, Protocol

from planner.decisions.plans.offered import Samples

KEPT: Final = 8192  # samples of either kind: half a minute of 250 requests/s, 50 KB as JSON


class Ring(Protocol):
    """The last samples of something (`SampleRing`), of one process or of all workers together."""

    def add(self, value: int) -> None: ...
    def after(self, seq: int) -> Samples: ...


class OfferedLoad:
    """Counts what requests ask for, refused ones too: a plan made for what is served would plan the shortage on.

    `boot` names this life of the gateway; cursors of another one count from the beginning.
    """

    def __init__(self, boot: str, uncached: Ring, outputs: Ring) -> None:
        self.boot = boot
        self.uncached = uncached
        self.outputs = outputs
        self._unread = 0

    def asked(self, uncached_tokens: int) -> None:
        """A request was routed for the first time."""
        self.uncached.add(uncached_tokens)

    def answered(self, output_tokens: int) -> None:
        """An answer has ended well."""
        self.outputs.add(output_tokens)

    def refused_unread(self) -> None:
        """A request was refused before anybody knew its length."""
        self._unread += 1

    def publish(self) -> None:
        """Has other processes see what this one has counted; to be called now and then."""

    @property
    def unread(self) -> int:
        """How many were."""
        return self._unread
