"""What went from node to node, and why: `GET /prfaas/flows`.

    request   KVCache of a request, to its decode node: read off the request's record, so that requests cost nothing more
    move      a prefix that a request asked for
    replica   a copy of a prefix for requests to come
    probe     a question whether a way is there; it carries nothing

Moves and probes are kept here, in a bounded ring; their numbers are of one sequence with those of requests' records.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.cluster.node import ClusterNode
from gateway.routing.prefix_transfers import PrefixTransfer

KEPT: Final = 1024
REQUEST: Final = "request"  # the reason of a move that a request asked for


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, once it is over. `at_s` is its end on the gateway's clock, `seconds` None where its begin is unknown.

    `why` is a request's reason for its route, a move's for being made; `who` its id, or the prefix by its last block.
    """

    seq: int
    at_s: float
    kind: str
    source: str
    destination: str
    source_cluster: str
    destination_cluster: str
    bytes: int
    seconds: float | None
    outcome: str
    why: str
    who: str
    service_class: str = ""
    tenant: str = ""
    at: float = 0.0  # the same end in seconds since the epoch, where it is told


class Flows:
    """Keeps the last `limit` of those that are no request's."""

    def __init__(self, next_seq: Callable[[], int], clock: Callable[[], float], limit: int = KEPT) -> None:
        self.limit = limit
        self._next_seq = next_seq
        self._clock = clock
        self._ring: deque[Flow] = deque(maxlen=limit)

    def since(self, seq: int) -> Iterator[Flow]:
        """Those after `seq`, oldest first."""
        return (flow for flow in self._ring if flow.seq > seq)

    def moved(self, move: PrefixTransfer, outcome: str, sent: int, seconds: float) -> None:
        """A prefix has moved, or has not."""
        kind = "move" if move.reason == REQUEST else "replica"
        who = f"prefix {move.hashes[-1].hex()[:16]}, {move.num_tokens} tokens"
        self._add(kind, move.source, move.target, sent, seconds, outcome, move.reason, who)

    def probed(self, sender: ClusterNode, receiver: ClusterNode, outcome: str, seconds: float) -> None:
        """A way was probed; an empty `outcome` says that it is there."""
        self._add("probe", sender, receiver, 0, seconds, outcome or "ok", "the link's breaker is open", "gateway")

    def _add(
        self,
        kind: str,
        source: ClusterNode,
        target: ClusterNode,
        sent: int,
        seconds: float,
        outcome: str,
        why: str,
        who: str,
    ) -> None:
        self._ring.append(
            Flow(
                seq=self._next_seq(),
                at_s=self._clock(),
                kind=kind,
                source=source.id,
                destination=target.id,
                source_cluster=source.cluster,
                destination_cluster=target.cluster,
                bytes=sent,
                seconds=seconds,
                outcome=outcome,
                why=why,
                who=who,
            )
        )


class _Sent(msgspec.Struct, frozen=True):
    """Of a request's record, what a flow is made of."""

    seq: int
    id: str
    status: int
    arrived_s: float
    service_class: str
    reason: str
    prefill_node: str
    decode_node: str
    bytes: int
    timeline: dict[str, float]
    tenant: str = ""
    error: str = ""


_SENT: Final = msgspec.json.Decoder(_Sent)
_FLOW: Final = msgspec.json.Decoder(Flow)


def merged(records: list[bytes], flows: list[bytes], clusters: Mapping[str, str], epoch_s: float) -> list[Flow]:
    """Flows of requests and all others, by number; `clusters` says where nodes are, `epoch_s` when the clock was 0."""
    of_requests = (_of(_SENT.decode(line), clusters) for line in records)
    found = sorted([*filter(None, of_requests), *map(_FLOW.decode, flows)], key=lambda flow: flow.seq)
    return [replace(flow, at=round(epoch_s + flow.at_s, 3)) for flow in found]


def _of(sent: _Sent, clusters: Mapping[str, str]) -> Flow | None:
    """What the request had sent; None: nothing."""
    if not sent.bytes:
        return None
    began, ended = sent.timeline.get("prefill_start"), sent.timeline.get("kv_ready")
    return Flow(
        seq=sent.seq,
        at_s=sent.arrived_s + (ended or 0.0),
        kind="request",
        source=sent.prefill_node,
        destination=sent.decode_node,
        source_cluster=clusters.get(sent.prefill_node, "unknown"),
        destination_cluster=clusters.get(sent.decode_node, "unknown"),
        bytes=sent.bytes,
        seconds=ended - began if began is not None and ended is not None else None,
        outcome="ok" if sent.status == 200 else sent.error or str(sent.status),
        why=sent.reason,
        who=sent.id,
        service_class=sent.service_class,
        tenant=sent.tenant,
    )
