"""Tells whether a peer can be reached: how long it has had no working connection, or no byte got through.

A link that drops everything leaves connections up for as long as TCP hopes; a transfer under way must not hope so long.
"""

from typing import Final

LOOK_S: Final = 0.5  # between two looks no more than this counts as silence: a stopped process has not listened


class Reach:
    """Pure; the time comes in. Times are seconds on one clock."""

    def __init__(self, now: float) -> None:
        self._lost_since = now
        self._up_since = float("inf")  # the first of the present connections
        self._promising = True  # bytes have arrived since the last loss, or there was none
        self.last_error = "never connected"
        self.silent_s = 0.0  # how long nothing has got through although something is on its way
        self._sampled_at = now
        self._answered = False
        self._delivered_bytes = 0

    def on_work(self, now: float, *, connected: bool) -> None:
        """There is something to send again after a pause: the time begins anew."""
        self._promising = True
        self.silent_s = 0.0
        if not connected:
            self._lost_since = now

    def on_first_up(self, now: float) -> None:
        self._up_since = now

    def on_progress(self) -> None:
        """Bytes have arrived."""
        self._promising = True
        self._answered = True

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

    # connections that are up and carry nothing

    def on_sample(self, now: float, delivered_bytes: int, *, owed: bool) -> None:
        """The bytes that TCP has delivered over the present connections; `owed`: the receiver has not answered all of
        them."""
        if not owed or self._answered or delivered_bytes > self._delivered_bytes:
            self.silent_s = 0.0
        else:
            self.silent_s += min(LOOK_S, now - self._sampled_at)
        self._answered = False
        self._sampled_at, self._delivered_bytes = now, delivered_bytes
