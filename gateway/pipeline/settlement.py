"""Frees what an answered request has left."""

import asyncio
from typing import Final

from gateway.pipeline.ticketed import Attempt
from gateway.request.request import Request

SETTLE_WAIT_S: Final = 0.25  # the prefill's own report is a round trip behind the KVCache that the answer needed


async def settle(request: Request, attempt: Attempt) -> None:
    """After a whole answer: nothing is left to free if the KVCache was delivered and loaded."""
    hold, delivery = attempt.hold, attempt.delivery
    if hold is None or delivery is None or attempt.answer.status != 200:
        return
    if request.is_recomputed or request.broken_off is not None:
        return
    if not request.output_tokens:  # nothing says that the engine has loaded anything
        return
    if not delivery.done():
        await asyncio.wait([delivery], timeout=SETTLE_WAIT_S)
    hold.settled = (
        delivery.done() and not delivery.cancelled() and delivery.exception() is None and delivery.result() is not None
    )
