from prometheus_client import CollectorRegistry, generate_latest

from tests.transport.helpers import SECRET, Memory, deliver
from transport.client import TransferClient
from transport.metrics import TransportCollector
from transport.server import TransferServer


def test_links_and_landings_are_told_when_asked() -> None:
    with TransferServer() as server, TransferClient() as client:
        deliver(server, client, [100_000] * 10).wait()
        client.open(server.address, "x", SECRET, [1], Memory([1])).wait(5)
        registry = CollectorRegistry()
        registry.register(TransportCollector(client, server))
        lines = generate_latest(registry).decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["prfaas_landing_received_bytes_total"]) == 1_000_000
    assert float(values['prfaas_landing_events_total{event="landed"}']) == 1
    assert float(values['prfaas_landing_events_total{event="refused:unknown_transfer"}']) == 1
    assert f'prfaas_link_rtt_seconds{{peer="{server.address}"}}' in values
    assert f'prfaas_link_sent_bytes_total{{peer="{server.address}"}}' in values
