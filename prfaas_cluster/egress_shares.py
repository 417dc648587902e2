"""A node's share of the egress budget of a line that several nodes use. A gateway leases it out for a few seconds at a time."""

from collections.abc import Callable
from typing import Final

from node.errors import NodeRefusal
from transport.control.proto import node_pb2 as pb
from transport.path.pacing import BudgetShare
from transport.send.client import TransferClient

MAX_LEASE_S: Final = 30.0
MAX_LINES: Final = 64  # shares at once; a gateway deals out those of links that are in use


class EgressShares:
    """Takes shares, of one holder per line at a time. `now` is the clock of `Load.clock_s`, and that of transport."""

    def __init__(self, client: TransferClient, now: Callable[[], float]) -> None:
        self._client = client
        self.now = now
        self._held: dict[str, tuple[str, float, int]] = {}  # by cluster: its holder, until when, the last serial

    def take(self, share: pb.EgressShare) -> None:
        """Keeps to it until it ends; then to the node's own budget. Raises NodeRefusal."""
        now, own = self.now(), self._client.egress_budget(share.cluster)
        self._held = {cluster: held for cluster, held in self._held.items() if now < held[1]}
        is_raise = share.bytes_per_s > share.own_bytes_per_s
        until = share.until_clock_s if is_raise else now + share.lease_s
        if not (share.holder and 0 < share.bytes_per_s < float("inf") and now < until <= now + MAX_LEASE_S):
            raise NodeRefusal("bad_request", "a share has a holder, a rate above 0, and ends within 30 s from now")
        if own is None or own != share.own_bytes_per_s:
            raise NodeRefusal("bad_request", f"the budget to {share.cluster} is {own}, not {share.own_bytes_per_s}")
        holder, held_until, serial = self._held.get(share.cluster, (share.holder, now, -1))
        if holder != share.holder or (share.cluster not in self._held and len(self._held) >= MAX_LINES):
            raise NodeRefusal("share_held", f"the line to {share.cluster} is shared out by {holder}")
        if share.serial <= serial:
            raise NodeRefusal("bad_request", f"share {share.serial} comes after {serial}")
        self._held[share.cluster] = share.holder, max(until, held_until), share.serial
        self._client.set_egress_share(BudgetShare(share.bytes_per_s, share.own_bytes_per_s, until), share.cluster, now)
