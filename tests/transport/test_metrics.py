from prometheus_client import CollectorRegistry, generate_latest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from transport.metrics import TransportCollector
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec
from transport.wire.checksum import Integrity


def told(registry: CollectorRegistry) -> dict[str, str]:
    """The page's series."""
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_links_and_landings_are_told_when_asked() -> None:
    with TransferServer() as server, TransferClient() as client:
        deliver(server, client, [100_000] * 10).wait()
        client.open(TransferSpec(server.address, "x", SECRET, [1]), Memory([1])).wait(PATIENCE_S)
        registry = CollectorRegistry()
        registry.register(TransportCollector(client, server))
        # What a link says is a sample's, of a moment now and then: on a busy machine its connections may not be up in the first.
        wait_for(lambda: any(key.startswith("prfaas_link_congestion_control{") for key in told(registry)))
        values = told(registry)
    assert float(values["prfaas_landing_received_bytes_total"]) == 1_000_000
    assert float(values['prfaas_landing_events_total{event="landed"}']) == 1
    assert float(values['prfaas_landing_events_total{event="refused:unknown_transfer"}']) == 1
    labels = f'{{link="{server.address}",peer="{server.address}"}}'
    for name in ("rtt_seconds", "rtt_inflation_ratio", "sent_bytes_total", "drain_seconds", "budget_bytes_per_second"):
        assert f"prfaas_link_{name}{labels}" in values


def test_a_peer_that_turns_us_away_is_counted_under_a_word_of_ours() -> None:
    with TransferServer() as server, TransferClient(options=ClientOptions(integrity=Integrity.NONE)) as client:
        client.open(TransferSpec(server.address, "x", SECRET, [1], link="west"), Memory([1])).wait(PATIENCE_S)
        registry = CollectorRegistry()
        registry.register(TransportCollector(client, server))
        text = generate_latest(registry).decode()
    assert 'prfaas_link_refusals_total{link="west",reason="integrity_mode"} ' in text
    assert 'prfaas_landing_events_total{event="refused:integrity_mode"} ' in text
