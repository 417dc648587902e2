"""Whether a peer can be reached: how long there has been no connection to it that was worth the name."""


class Reach:
    """Pure; the time comes in. Times are seconds on one clock."""

    def __init__(self, now: float) -> None:
        self._lost_since = now
        self._up_since = float("inf")  # the first of the present connections
        self._promising = True  # bytes have arrived since the last loss, or there was none
        self.last_error = "never connected"

    def on_work(self, now: float, *, connected: bool) -> None:
        """There is something to send again, after a time without: the patience is new."""
        self._promising = True
        if not connected:
            self._lost_since = now

    def on_first_up(self, now: float) -> None:
        self._up_since = now

    def on_progress(self) -> None:
        """Bytes have arrived."""
        self._promising = True

    def on_all_lost(self, now: float, patience_s: float) -> None:
        """Counted from the last connection that was lost, not from the last attempt that failed; and one that broke
        before anything had arrived over it was no more than an attempt, unless it lasted.
        """
        if self._promising or now - self._up_since > patience_s:
            self._lost_since = now
        self._promising = False

    def lost_for_s(self, now: float) -> float:
        """How long it has been out of reach, if there is no connection."""
        return now - self._lost_since
