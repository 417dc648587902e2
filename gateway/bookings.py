"""What a request has under way on nodes, counted from the decision on: a node's own report is a quarter of a second late.

Of prompts that come together, the second one's decision must see the first one's, whether anything has been reserved or sent
by then or not. What was counted is given back when it is done, and all of it at the latest when the try is over.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.node import Node, Work
from planner.decisions.routing import Route


class Booking:
    """The work of one try at a request."""

    def __init__(self, decode: Node, clock: Callable[[], float]) -> None:
        self._decode = decode
        self._clock = clock
        self._answer = Work()
        self._prefill: tuple[Node, Work] | None = None
        decode.take(self._answer)

    def prefill(self, node: Node, route: Route) -> None:
        """`node` computes the prompt as `route` says from now on, and nobody else does."""
        self.prefilled()
        if node.cluster == self._decode.cluster:
            work = Work(tokens=route.uncached_tokens)
        else:
            work = Work(
                tokens=route.uncached_tokens, destination=self._decode.cluster, promised_bytes=int(route.link_bytes)
            )
        if node is self._decode:  # it is counted there once already
            node.prefill_share.add(route.compute_s, self._clock())
            node.give_back(self._answer)
            self._answer = work
            node.take(self._answer)
        else:
            self._prefill = node, work
            node.take(work)

    def prefilled(self) -> None:
        """The prefill node is through with it, however that ended."""
        if self._prefill is not None:
            node, work = self._prefill
            self._prefill = None
            node.give_back(work)

    def close(self) -> None:
        """The try is over. To be called once."""
        self.prefilled()
        self._decode.give_back(self._answer)


@contextmanager
def booked(decode: Node, clock: Callable[[], float]) -> Iterator[Booking]:
    """A place on a decode node, and whatever else is booked inside the block."""
    booking = Booking(decode, clock)
    try:
        yield booking
    finally:
        booking.close()
