"""What Prometheus is told of a picker: its own counts, and the averages that a picker of pickers reads as `llm_d_epp_…`."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.picker.choosing import ServerPicker
from gateway.picker.exchange import BodyPart, EndpointChoice, ProxyMessage, Refusal
from gateway.picker.servers import ServerPool
from gateway.telemetry.instruments import build_instruments, counters

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
HUB: Final = "llm_d_epp"


class PickerMetrics:
    """Counts what is asked and answered."""

    _picks = counters("prfaas_picker_requests", "Requests by what came of the pick", "outcome")
    _body_bytes = counters("prfaas_picker_body_bytes", "Bytes of bodies that came by, by message", "direction")
    _broken = counters("prfaas_picker_broken_exchanges", "Streams ended for what a proxy said out of turn", "what")
    _fallbacks = counters(
        "prfaas_picker_fallbacks", "Answers of another server than the best one, where the proxy says so", "reason"
    )
    _reports = counters("prfaas_picker_reports", "Reports of servers, by what came of them", "outcome")
    _sources = counters(
        "prfaas_picker_registry_failures", "Times that a registry of servers was lost", "source", "reason"
    )
    _certificates = counters(
        "prfaas_picker_certificate_failures",
        "Times that changed TLS files could not be used, and the old stayed",
        "reason",
    )

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        build_instruments(self, self._registry)

    def show(self, pool: ServerPool, picker: ServerPicker, pool_name: str) -> None:
        """Has the page say how busy the pool is, too."""
        self._registry.register(PoolCollector(pool, picker, pool_name))

    def page(self) -> bytes:
        """All of it, as text."""
        return generate_latest(self._registry)

    def heard(self, message: ProxyMessage) -> None:
        """A proxy has said something."""
        if isinstance(message, BodyPart):
            self._body_bytes[message.direction.value,].inc(len(message.data))

    def answered(self, by: str, choice: EndpointChoice) -> None:
        """A server has answered; "" where the proxy does not say which one."""
        if by and by != choice.endpoints[0]:
            self._fallbacks["listed" if by in choice.endpoints else "proxy",].inc()

    def picked(self, found: EndpointChoice | Refusal) -> None:
        """A request has got servers, or a refusal."""
        if isinstance(found, EndpointChoice):
            outcome = "prefill_apart" if found.prefiller else "picked"
        else:
            outcome = found.reason or f"refused_{found.status}"
        self._picks[outcome,].inc()

    def broken(self, what: str) -> None:
        """A proxy has said what cannot come."""
        self._broken[what,].inc()

    def reported(self, outcome: str) -> None:
        """A server was asked how busy it is: `read`, `unreachable` or `unreadable`."""
        self._reports[outcome,].inc()

    def registry_failed(self, source: str, reason: str) -> None:
        """A registry was lost."""
        self._sources[source, reason].inc()

    def certificate_failed(self, reason: str) -> None:
        """TLS files have changed, and are `unreadable`, or no pair and therefore `unusable`."""
        self._certificates[reason,].inc()


class PoolCollector(Collector):
    """The averages over servers that may be chosen, read from the pool when asked."""

    def __init__(self, pool: ServerPool, picker: ServerPicker, pool_name: str) -> None:
        self._pool = pool
        self._picker = picker
        self._pool_name = pool_name

    def collect(self) -> Iterable[Metric]:
        """Under the names that others read."""
        servers = self._pool.usable()
        reports = self._pool.reports(servers)
        number = max(1, len(reports))
        values = {
            f"{HUB}_average_queue_size": (
                sum(each.waiting for each in reports) / number,
                "Requests that wait, of a server",
            ),
            f"{HUB}_average_running_requests": (
                sum(each.running for each in reports) / number,
                "Requests that run, of one",
            ),
            f"{HUB}_average_kv_cache_utilization": (sum(each.kv_usage for each in reports) / number, "KVCache in use"),
            f"{HUB}_ready_endpoints": (float(self._picker.ready), "Servers that may be chosen"),
        }
        for name, (value, what) in values.items():
            family = GaugeMetricFamily(name, what, labels=["name"])
            family.add_metric([self._pool_name], value)
            yield family
        yield GaugeMetricFamily("prfaas_picker_in_flight", "Requests under way", value=self._picker.in_flight)
