"""A request's load on its nodes, counted from the routing decision; node reports lag by 250 ms.

Of prompts that come together, the second one's decision must see the first one's, whether anything has been reserved or sent
by then or not. What was counted is given back when it is done, and all of it at the latest when the try is over.
"""

from collections.abc import Callable, Sequence
from typing import Self

from gateway.cluster.inflight_prefixes import InflightLanding, InflightPrefill
from gateway.cluster.node import ClusterNode, NodeWork
from planner.decisions.routing.arrivals import SharedPrefix
from planner.decisions.routing.offload import Route


class Booking:
    """The work of one try at a request: from now on, until the `with` block that it opens ends."""

    def __init__(
        self, decode: ClusterNode, clock: Callable[[], float], hashes: Sequence[bytes] = (), held_tokens: int = 0
    ) -> None:
        """`hashes` are those of the prompt's full blocks; of `held_tokens` the decode node has the attention."""
        self.awaited: InflightPrefill | None = (
            None  # what the prefill node has to have computed for this prompt, if anything
        )
        self._decode = decode
        self._clock = clock
        self._hashes = hashes
        self._computing: tuple[ClusterNode, InflightPrefill] | None = None
        self._landing: InflightLanding | None = None
        self._answer: NodeWork | None = NodeWork()
        self._prefill: tuple[ClusterNode, NodeWork] | None = None
        decode.take(self._answer)
        if decode.info is not None:
            decode.expects(max(0, len(hashes) * decode.info.block_size - held_tokens))

    def prefill(self, node: ClusterNode, route: Route) -> None:
        """`node` computes the prompt as `route` says from now on, and no other node does."""
        kept = self._computing if self._computing is not None and self._computing[0] is node else None
        if kept is not None:  # requests that wait for it go on waiting
            self._computing = None
        self.prefilled()
        if self._landing is not None:
            self._landing.prefill_node = node.id
        if node.cluster == self._decode.cluster:
            work = NodeWork(tokens=route.uncached_tokens)
        else:
            work = NodeWork(
                tokens=route.uncached_tokens, destination=self._decode.cluster, promised_bytes=int(route.link_bytes)
            )
        if node is self._decode and self._answer is None:
            return  # its engine has said all
        if node is self._decode:  # it is counted there once already
            node.prefill_share.add(route.compute_s, self._clock())
            self.answered()
            self._answer = work
            node.take(work)
        else:
            self._prefill = node, work
            node.take(work)
            self._computing = kept or self._begin(node, route)

    def _begin(self, node: ClusterNode, route: Route) -> tuple[ClusterNode, InflightPrefill]:
        blocks = route.cached_tokens // node.info.block_size if node.info and node.info.block_size else 0
        self.awaited = node.underway.first(self._hashes, blocks)
        # What is there already, or awaited from another request, adds no wait.
        computed = self._hashes if blocks < len(self._hashes) else ()
        return node, node.underway.begin(computed)

    def lands(self, route: Route) -> None:
        """The prompt's KVCache is on its way to the decode node from now on: prompts with the same beginning may wait for it."""
        if self._hashes:
            expected_at = self._clock() + max(route.ttft_s, route.link_s)
            self._landing = InflightLanding(self._hashes, expected_at, route.prefill_node or "")
            self._decode.arrivals.add(self._landing)

    def shared_with(self, held_blocks: int) -> SharedPrefix[InflightLanding] | None:
        """What was on its way there before, and has more than the first `held_blocks` of this prompt."""
        if self._landing is None:
            return None
        return self._decode.arrivals.longest(self._hashes, held_blocks, before=self._landing)

    def landed(self, has_landed: bool) -> None:
        """It is on its way no more: the decode node has it, or will not get it."""
        if self._landing is not None:
            landing, self._landing = self._landing, None
            landing.has_landed = has_landed
            self._decode.arrivals.remove(landing)
            landing.over.set()

    def prefilled(self, *, is_computed: bool = False) -> None:
        """The prefill node is through with it, however that ended."""
        if self._prefill is not None:
            node, work = self._prefill
            self._prefill = None
            node.give_back(work)
        if self._computing is not None:
            node, computing = self._computing
            self._computing = self.awaited = None
            if is_computed:
                node.underway.computed(computing, self._clock())
            else:
                node.underway.end(computing)

    def answered(self) -> None:
        """The decode node is through with it: its engine has said all."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._decode.give_back(answer)

    def close(self) -> None:
        """The try is over. To be called once."""
        self.landed(has_landed=False)
        self.prefilled()
        self.answered()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def booked(
    decode: ClusterNode, clock: Callable[[], float], hashes: Sequence[bytes] = (), held_tokens: int = 0
) -> Booking:
    """A place on a decode node, and whatever else is booked inside the block that it opens."""
    return Booking(decode, clock, hashes, held_tokens)
