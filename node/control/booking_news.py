"""When the watchers of a node hear at once that gateways have booked it; else they hear with the next load report."""

from typing import Final

MANY: Final = 4  # new bookings that are worth a report
APART_S: Final = 0.02  # between two such reports


class BookingNews:
    """Counts bookings that not all watchers have heard of. Pure: the caller sends what is due, and says so."""

    def __init__(self) -> None:
        self._new = 0
        self._is_due = False
        self._told_at = float("-inf")

    def booked(self, now: float) -> float | None:
        """One more: in how many seconds a report is to be sent. None: none is, or one was asked for already."""
        self._new += 1
        if self._new < MANY or self._is_due:
            return None
        self._is_due = True
        return max(0.0, self._told_at + APART_S - now)

    def told(self, now: float) -> None:
        """All watchers have been sent a report."""
        self._new, self._is_due, self._told_at = 0, False, now
