from prometheus_client import CollectorRegistry, generate_latest

from tests.transport.rdma.worlds import rdma_world
from transport.metrics import TransportCollector


def test_rails_and_what_had_to_go_another_way_are_told() -> None:
    with rdma_world(("a", "b")) as world:
        assert world.deliver([100_000] * 10).wait().ok
        world.fabric.swallow("a0")
        world.fabric.swallow("b0")
        assert world.deliver([100_000] * 10, transfer_id="second").wait().ok
        registry = CollectorRegistry()
        registry.register(TransportCollector(world.client))
        lines = generate_latest(registry).decode().splitlines()
        values = {key: float(value) for key, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}
        place = f'fabric="a",local="a0",peer="{world.server.address}",remote="a1"'
    assert values.keys() >= {f"prfaas_rail_up{{{place}}}", f"prfaas_rail_bytes_total{{{place}}}"}
    assert sum(value for key, value in values.items() if key.startswith("prfaas_rail_bytes_total")) >= 1_000_000
    assert any(key.startswith("prfaas_rail_failures_total") and "retry_exc_err" in key for key in values)
    assert values['prfaas_rdma_fallback_bytes_total{reason="no_rail"}'] > 0
