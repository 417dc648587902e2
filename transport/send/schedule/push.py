"""One transfer that is leaving, as its owner sees it."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from transport.send.schedule.lanes import LaneTransfer
from transport.wire.manifest import PushStats, RangeViews
from transport.wire.outcome import TransferOutcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """How a push ended. `reason` is empty, or a frames.Code."""

    transfer_id: str
    ok: bool
    reason: str
    detail: str
    seconds: float  # since open()
    stats: PushStats


OnPushed = Callable[[PushResult], None]


class PushOwner(Protocol):
    """The scheduler of a push's transfer; `lock` guards what is known of it."""

    lock: threading.Lock

    def ready(self, transfer: LaneTransfer, indexes: Iterable[int | range]) -> None: ...

    def abort(self, transfer: LaneTransfer, reason: str, keep_landing: bool) -> None: ...


class Push:
    """A transfer that is leaving. All methods may be called from any thread."""

    def __init__(self, owner: PushOwner, transfer: LaneTransfer, source: RangeViews, on_done: OnPushed | None) -> None:
        self._owner = owner
        self._transfer = transfer
        self.source = source
        self._on_done = on_done
        self._opened_at = time.monotonic()
        self._finished = threading.Event()
        self._result: PushResult | None = None
        self.predicted: tuple[float, float] | None = None  # (when all was ready, seconds it would take from then)

    @property
    def succeeded(self) -> bool:
        return self._transfer.outcome is not None and self._transfer.outcome.ok

    @property
    def transfer_id(self) -> str:
        return self._transfer.transfer_id

    def ready(self, ranges: int | Iterable[int | range]) -> None:
        """These ranges hold their final bytes and may leave. Never blocks; saying it twice changes nothing.

        Consecutive ones are best told as a `range`: then it does not matter how many they are.
        """
        self._owner.ready(self._transfer, (ranges,) if isinstance(ranges, int) else ranges)

    def ready_all(self) -> None:
        self.ready(range(self._transfer.manifest.num_ranges))

    def abort(self, reason: str = "", *, keep_landing: bool = False) -> None:
        """Ends the push. The landing fails too, unless another sender is to finish it (`keep_landing`)."""
        self._owner.abort(self._transfer, reason, keep_landing)

    def landed(self, index: int) -> bool:
        """Whether range `index` has arrived and was verified."""
        with self._owner.lock:
            return self._transfer.outbox.acked.covers(*self._transfer.manifest.bounds(index))

    @property
    def stats(self) -> PushStats:
        with self._owner.lock:
            return self._transfer.outbox.stats()

    def wait(self, timeout_s: float | None = None) -> PushResult | None:
        """The result; None when it is not there in time."""
        self._finished.wait(timeout_s)
        return self._result

    def finish(self) -> None:
        """The transfer has ended and its memory is free; called once."""
        outcome = self._transfer.outcome or TransferOutcome()
        self._result = PushResult(
            transfer_id=self.transfer_id,
            ok=outcome.ok,
            reason=outcome.code,
            detail=outcome.detail,
            seconds=time.monotonic() - self._opened_at,
            stats=self._transfer.outbox.stats(),
        )
        self.source = ()
        self._finished.set()
        if self._on_done is None:
            return
        try:
            self._on_done(self._result)
        except Exception:
            log.exception("on_done of push %s failed", self.transfer_id)
