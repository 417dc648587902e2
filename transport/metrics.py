"""Links and transfers for Prometheus. They are read at each scrape, so nothing is counted twice.

`link` is the name that transfers to the peer were opened with: in a node, the cluster at the other end. Sums over its
peers are the link's; in counters, peers that were closed since count as peer "".
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from transport.path.link import LinkState
from transport.receive.server import TransferServer
from transport.send.client import TransferClient

_GAUGES: Final = {
    "available_bytes_per_second": ("What a busy sender gets, the budget at most", "available_bytes_per_s"),
    "goodput_bytes_per_second": ("Acknowledged by the peer", "goodput_bytes_per_s"),
    "budget_bytes_per_second": ("Egress budget, 0 = none", "budget_bytes_per_s"),
    "utilisation_ratio": (
        "Share of the available bandwidth, or of the budget while that holds the sender back, used in the last 10 s",
        "utilisation",
    ),
    "retransmit_ratio": ("Retransmitted share of what was sent", "retransmit_ratio"),
    "rtt_seconds": ("Median round trip of the connections", "rtt_s"),
    "min_rtt_seconds": ("Smallest round trip of late", "min_rtt_s"),
    "rtt_inflation_ratio": ("Round trip over the smallest one of late", "rtt_inflation"),
    "queued_bytes": ("Ready to leave, not acknowledged", "queued_bytes"),
    "drain_seconds": ("Predicted time until the queue has arrived", "drain_s"),
    "estimate_error_ratio": ("Mean relative error of such predictions", "estimate_error"),
    "congested": ("1 while the link loses or queues more than it should", "congested"),
    "connections": ("Connections to the peer", "connections"),
}
LINK_METRICS: Final = (
    *_GAUGES,
    "congestion_control",
    "sent_bytes_total",
    "retransmitted_bytes_total",
    "refusals_total",
)
_LABELS: Final = ["link", "peer"]
_COUNTERS: Final = {
    "sent_bytes": ("Delivered to the peer", "bytes_total"),
    "retransmitted_bytes": ("Sent again by TCP", "retransmitted_bytes_total"),
}


class TransportCollector(Collector):
    """`registry.register(TransportCollector(client, server))`."""

    def __init__(self, client: TransferClient | None = None, server: TransferServer | None = None) -> None:
        self._client = client
        self._server = server

    def collect(self) -> Iterator[Metric]:
        links = self._client.links() if self._client is not None else []
        for name, (text, field) in _GAUGES.items():
            yield _with_values(GaugeMetricFamily(f"prfaas_link_{name}", text, labels=_LABELS), links, field)
        gone = self._client.gone() if self._client is not None else {}
        for place, (name, (text, field)) in enumerate(_COUNTERS.items()):
            family = CounterMetricFamily(f"prfaas_link_{name}", text, labels=_LABELS)
            for link, totals in sorted(gone.items()):
                family.add_metric([link, ""], totals[place])
            yield _with_values(family, links, field)
        yield _congestion_controls(links)
        if self._client is not None:
            yield _refusals(self._client)
            yield _internal_errors(self._client)
            yield from _coded(self._client)
            yield from _rails(self._client)
        if self._server is not None:
            yield from _landings(self._server)
            yield from _decoded(self._server)


def _with_values(
    family: GaugeMetricFamily | CounterMetricFamily, links: list[LinkState], field: str
) -> GaugeMetricFamily | CounterMetricFamily:
    for link in links:
        family.add_metric([link.link or link.peer, link.peer], float(getattr(link, field)))
    return family


def _congestion_controls(links: list[LinkState]) -> Metric:
    family = GaugeMetricFamily(
        "prfaas_link_congestion_control", "1 for what the kernel has granted", labels=[*_LABELS, "name"]
    )
    for link in links:
        if link.congestion_control:
            family.add_metric([link.link or link.peer, link.peer, link.congestion_control], 1.0)
    return family


def _refusals(client: TransferClient) -> Metric:
    family = CounterMetricFamily(
        "prfaas_link_refusals", "Connections that a peer turned away, by its reason", labels=["link", "reason"]
    )
    for (link, reason), count in sorted(client.refusals.items()):
        family.add_metric([link, reason], count)
    return family


def _internal_errors(client: TransferClient) -> Metric:
    family = CounterMetricFamily(
        "prfaas_link_internal_errors", "Errors of our own that a thread survived", labels=["thread"]
    )
    for thread, count in sorted(client.internal_errors.items()):
        family.add_metric([thread], count)
    return family


def _coded(client: TransferClient) -> Iterator[Metric]:
    """Ratio of a codec: coded over plain bytes. Only transfers that may be coded are counted."""
    labels = ["link", "group", "codec"]
    plain = CounterMetricFamily("prfaas_codec_plain_bytes", "Bytes that went into a codec", labels=labels)
    coded = CounterMetricFamily("prfaas_codec_coded_bytes", "Bytes that came out of it and were sent", labels=labels)
    seconds = CounterMetricFamily("prfaas_codec_cpu_seconds", "Processor time that it took", labels=labels)
    events = CounterMetricFamily(
        "prfaas_codec_events",
        "Changes of codec, refusals, and chunks that no core was left for",
        labels=["link", "event"],
    )
    for link, accounts in sorted(client.codecs().items()):
        for (group, codec), use in sorted(accounts.uses.items()):
            plain.add_metric([link, group, codec], use.plain_bytes)
            coded.add_metric([link, group, codec], use.coded_bytes)
            seconds.add_metric([link, group, codec], use.cpu_s)
        for event, count in sorted(accounts.events.items()):
            events.add_metric([link, event], count)
    yield from (plain, coded, seconds, events)


def _decoded(server: TransferServer) -> Iterator[Metric]:
    plain = CounterMetricFamily("prfaas_codec_decoded_bytes", "Bytes that a codec gave back", labels=["codec"])
    seconds = CounterMetricFamily("prfaas_codec_decode_cpu_seconds", "Processor time that it took", labels=["codec"])
    for (_, codec), use in sorted(server.codecs.uses.items()):
        plain.add_metric([codec], use.plain_bytes)
        seconds.add_metric([codec], use.cpu_s)
    yield from (plain, seconds)


def _landings(server: TransferServer) -> Iterator[Metric]:
    outcomes = CounterMetricFamily("prfaas_landing_events", "What became of transfers and chunks", labels=["event"])
    for event, count in sorted(server.counters.items()):
        outcomes.add_metric([event], count)
    yield outcomes
    received = CounterMetricFamily("prfaas_landing_received_bytes", "Payload received, repetitions included")
    received.add_metric([], server.bytes_received)
    yield received
    connections = GaugeMetricFamily("prfaas_landing_connections", "Connections of senders")
    connections.add_metric([], server.num_connections)
    yield connections


def _rails(client: TransferClient) -> Iterator[Metric]:
    labels = ["peer", "local", "remote", "fabric"]
    up = GaugeMetricFamily("prfaas_rail_up", "1 while a pair of NICs carries transfers", labels=labels)
    sent = CounterMetricFamily("prfaas_rail_bytes", "Written by RDMA over a pair of NICs", labels=labels)
    failed = CounterMetricFamily("prfaas_rail_failures", "Queue pairs lost, by reason", labels=[*labels, "reason"])
    for rail in client.rails():
        place = [rail.peer, rail.local, rail.remote, rail.fabric]
        up.add_metric(place, float(rail.up))
        sent.add_metric(place, rail.bytes_total)
        for reason, count in rail.failures.items():
            failed.add_metric([*place, reason], count)
    fallback = CounterMetricFamily(
        "prfaas_rdma_fallback_bytes", "Meant for RDMA, sent over TCP, by reason", labels=["reason"]
    )
    for reason, size in client.fallback_bytes().items():
        fallback.add_metric([reason], size)
    yield from (up, sent, failed, fallback)
