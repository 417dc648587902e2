"""A check that takes long on a large pool, and blocks: how often it may be made."""

import logging
from collections.abc import Callable
from typing import Final

from hybrid_cache.errors import IntegrityError

log = logging.getLogger(__name__)

FREE_S: Final = 0.02  # a check that is faster than this may be made at any time
SHARE: Final = 0.01  # of the event loop's time that slower ones may take


class PacedCheck:
    """The answer of a check, a new one when enough time has gone by since the last."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._answer = ""
        self._next_at = 0.0

    def result(self, check: Callable[[], None]) -> str:
        """What `check` says: empty when all is well. It raises IntegrityError."""
        started_at = self._now()
        if started_at >= self._next_at:
            self._answer = _outcome(check)
            seconds = self._now() - started_at
            self._next_at = started_at + seconds / SHARE if seconds > FREE_S else started_at
        return self._answer


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except IntegrityError as exc:
        log.error("pool integrity: %s", exc)
        return str(exc)
    return ""
