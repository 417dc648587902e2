"""A log that unknown peers cannot fill."""

import logging
from typing import Final

MAX_LINES: Final = 10
EVERY_S: Final = 10.0


class FewLines:
    """At most MAX_LINES warnings in EVERY_S seconds; how many were left out is said with the next."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._began_at = float("-inf")
        self._said = self._left_out = 0

    def warning(self, now: float, text: str, *args: object) -> None:
        if now >= self._began_at + EVERY_S:
            if self._left_out:
                self._log.warning("%d more lines like the following were left out", self._left_out)
            self._began_at, self._said, self._left_out = now, 0, 0
        if self._said >= MAX_LINES:
            self._left_out += 1
            return
        self._said += 1
        self._log.warning(text, *args)
