"""Frees what an answered request has left."""

from typing import Final

from gateway.pipeline.attempt import Attempt
from gateway.request.request import Request

SETTLE_WAIT_S: Final = 0.25  # the prefill's own report is a round trip behind the KVCache that the answer needed


async def settle(request: Request, attempt: Attempt) -> None:
    """After a whole answer: nothing is left to free if the KVCache was delivered and loaded."""
    hold, delivery = attempt.hold, attempt.delivery
    if hold is None or delivery is None or attempt.answer.status != 200:
        return
    if request.progress.is_recomputed or request.stream.broken_off is not None:
        return
    if not request.output_tokens:  # nothing says that the engine has loaded anything
        return
    hold.settled = await delivery.outcome(SETTLE_WAIT_S) is not None
