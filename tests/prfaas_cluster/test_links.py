"""A node's links: what its configuration makes of them, and how they are told."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from node.config import NodeConfig
from node.errors import NodeRefusal
from node.transfer.listener import PeerListener
from node.transfer.reach import PeerReach
from prfaas_cluster.links import SMALL_S, URGENT_S, EgressLinks, spec_of, urgency_of
from tests.node.running import new_runner
from transport.control.certificates import Authority
from transport.control.messages import TicketInfo
from transport.metrics import TransportCollector
from transport.path.link import LinkState
from transport.send.schedule.push import PushResult
from transport.send.spec import Urgency
from transport.wire.frames import Code

SIZE = 200_000


class BothEnds:
    """The links of one node."""

    def __init__(self, config: NodeConfig) -> None:
        reach = PeerReach(config.cluster, use_shm=False)
        self.egress, self.listener = EgressLinks(config, reach), PeerListener(config, reach)
        self.collector = TransportCollector(self.egress.client, self.listener.server)
        self.listener.start()

    def close(self) -> None:
        self.egress.close()
        self.listener.close()


def links(tmp_path: Path, cluster: str, **changes: Any) -> BothEnds:
    values: dict[str, Any] = {"node_id": "n", "cluster_kind": "pd", "role": "decode", "model": "m"}
    return BothEnds(NodeConfig(cluster=cluster, run_dir=str(tmp_path), **values, **changes))


class Source:
    """Memory of one range."""

    def __init__(self, size: int) -> None:
        self._memory = memoryview(bytes(size))

    def __call__(self, index: int) -> list[memoryview]:
        return [self._memory]


def ticket_of(name: str, cluster: str, endpoints: Sequence[tuple[str, str, str]]) -> TicketInfo:
    return TicketInfo(
        transfer_id=name, secret=b"secret", num_tokens=1, have_tokens=0, tokens_digest=b"", endpoints=tuple(endpoints),
        ttl_s=60.0, layout_fingerprint="", node_id="d", cluster=cluster,
    )  # fmt: skip


async def send(
    sender: BothEnds, receiver: BothEnds, cluster: str, name: str, size: int = SIZE, named: str = ""
) -> PushResult:
    """`named` is whom the receiver expects."""
    target = memoryview(bytearray(size))
    receiver.listener.expect(name, b"secret", [size], lambda _: [target], lambda _: None, sender=named)
    ticket = ticket_of(
        name, cluster, [(each.kind, each.address, each.host_id) for each in receiver.listener.endpoints()]
    )
    done: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
    sender.egress.push(ticket, [size], Source(size), done.set_result).ready([0])  # type: ignore[arg-type]
    async with asyncio.timeout(60.0):
        return await done


def told(of: BothEnds) -> dict[str, float]:
    """Values by name and link."""
    registry = CollectorRegistry()
    registry.register(of.collector)
    found: dict[str, float] = {}
    for line in generate_latest(registry).decode().splitlines():
        if line.startswith("prfaas_link_") and 'link="' in line:
            name, _, rest = line.partition("{")
            link = rest.partition("link=")[2].split('"')[1]
            found[f"{name} {link}"] = float(rest.rpartition(" ")[2])
    return found


async def until_told(of: BothEnds, name: str, value: float) -> None:
    """Links are sampled by a thread of transport."""
    async with asyncio.timeout(60.0):
        while told(of).get(f"prfaas_link_{name} west") != value:  # noqa: ASYNC110 no event of ours
            await asyncio.sleep(0.02)


def run(scenario: Any) -> None:
    with new_runner() as runner:
        runner.run(scenario)


def test_every_cluster_has_its_budget_until_it_is_changed(tmp_path: Path) -> None:
    async def scenario() -> None:
        sender = links(tmp_path, "east", egress_bytes_per_s={"*": 80e6, "west": 40e6})
        receiver = links(tmp_path, "any")
        try:
            assert (await send(sender, receiver, "west", "once")).ok
            await until_told(sender, "budget_bytes_per_second", 40e6)
            sender.egress.set_budgets({"*": 10e6})
            assert (await send(sender, receiver, "west", "again")).ok
            await until_told(sender, "budget_bytes_per_second", 10e6)
            (link,) = sender.egress.states()
            assert (link.peer, link.budget_bytes_per_s) == ("west", 10e6)
            assert link.available_bytes_per_s <= 10e6
        finally:
            for each in (sender, receiver):
                await asyncio.to_thread(each.close)

    run(scenario())


def test_a_node_does_not_hold_back_its_own_cluster(tmp_path: Path) -> None:
    async def scenario() -> None:
        sender, receiver = links(tmp_path, "west", egress_bytes_per_s=40e6), links(tmp_path, "west")
        try:
            assert (await send(sender, receiver, "west", "t")).ok
            await until_told(sender, "connections", 1.0)
            assert told(sender)["prfaas_link_budget_bytes_per_second west"] == 0.0
        finally:
            for each in (sender, receiver):
                await asyncio.to_thread(each.close)

    run(scenario())


def test_a_transfer_is_its_tenants_and_has_its_weight() -> None:
    """By which transport shares a link (tests/transport/send/schedule/test_lanes.py)."""
    ticket = structs.replace(ticket_of("t", "west", ()), tenant="acme", weight=3.0)
    spec = spec_of(ticket, "tcp", "127.0.0.1:1", [1], None, Urgency.NORMAL)
    assert (spec.tenant, spec.weight, spec.link, spec.due_s) == ("acme", 3.0, "west", 60.0)
    with pytest.raises(ValueError, match="weight"):
        spec_of(structs.replace(ticket, weight=0.0), "tcp", "127.0.0.1:1", [1], None, Urgency.NORMAL)


def test_connections_are_as_many_as_configured(tmp_path: Path) -> None:
    async def scenario() -> None:
        sender = links(tmp_path, "east", connections=1, congestion_control="cubic", integrity="plain")
        receiver = links(tmp_path, "west", integrity="plain")
        try:
            assert (await send(sender, receiver, "west", "t")).ok
            await until_told(sender, "connections", 1.0)
            assert sender.egress.states()[0].connections == 1
        finally:
            for each in (sender, receiver):
                await asyncio.to_thread(each.close)

    run(scenario())


def test_a_probe_tells_whether_a_receiver_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        near, far = links(tmp_path, "west"), links(tmp_path, "east")
        there = [(each.kind, each.address, each.host_id) for each in near.listener.endpoints()]
        assert await far.egress.probe(ticket_of("spent long ago", "west", there)) == ""
        await asyncio.to_thread(near.close)
        assert await far.egress.probe(ticket_of("spent long ago", "west", there)) == "peer_lost"
        with pytest.raises(NodeRefusal, match="no_route"):
            await far.egress.probe(ticket_of("spent long ago", "west", []))
        await asyncio.to_thread(far.close)

    with new_runner() as runner:
        runner.run(scenario())


def test_both_ends_must_seal_or_neither(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity = Authority(tmp_path).issue("n")
        files = {name: str(getattr(identity, name)) for name in ("certificate", "key", "authority")}
        sealed = [links(tmp_path, cluster, integrity="aead", **files) for cluster in ("east", "west")]
        plain = links(tmp_path, "east")
        try:
            assert (await send(sealed[0], sealed[1], "west", "t")).ok
            refused = await send(plain, sealed[1], "west", "u")
            assert (refused.ok, refused.reason) == (False, "integrity_mode")
            assert told(plain)["prfaas_link_refusals_total west"] > 0
        finally:
            for each in (*sealed, plain):
                await asyncio.to_thread(each.close)

    run(scenario())


def test_one_link_may_be_in_clear_where_both_ends_say_so_and_no_other_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        identity = Authority(tmp_path).issue("n")
        files = {name: str(getattr(identity, name)) for name in ("certificate", "key", "authority")}
        east = links(tmp_path, "east", plain_clusters=("west",), **files)
        west = links(tmp_path, "west", plain_clusters=("east",), **files)
        sealing = links(tmp_path, "west", **files)
        bare = links(tmp_path, "east")
        try:
            assert (await send(east, west, "west", "in-clear", named="east/n")).ok
            assert (
                await send(sealing, west, "west", "sealed", named="west/other")
            ).reason == Code.ACCESS  # it shows who it is
            assert (await send(sealing, west, "west", "sealed-by-anybody")).ok
            for named in ("north/n", ""):  # a sender of north must seal, and one without a name might be of there
                assert (await send(east, west, "west", f"as-{named}", named=named)).reason == Code.ACCESS
            assert (
                await send(bare, west, "west", "without-certificates", named="east/n")
            ).ok  # as trusted as its fabric
            refused = await send(east, sealing, "west", "one-sided", named="east/n")
            assert (refused.ok, refused.reason) == (False, "integrity_mode")
        finally:
            for each in (east, west, sealing, bare):
                await asyncio.to_thread(each.close)

    run(scenario())


def test_kvcache_goes_to_known_peers_and_networks_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        sender = links(tmp_path, "east", peers=("west/*",), peer_networks=("127.0.0.0/8",))
        elsewhere = links(tmp_path, "east", peers=("west/d",), peer_networks=("10.0.0.0/8",))
        receiver = links(tmp_path, "west")
        try:
            assert (await send(sender, receiver, "west", "t")).ok
            for each, cluster, what in (
                (sender, "north", "north/d is not among `peers`"),
                (elsewhere, "west", "127.0.0.1 is in none of `peer_networks`"),
            ):
                with pytest.raises(NodeRefusal, match=what) as refused:
                    await send(each, receiver, cluster, f"u-{cluster}")
                assert refused.value.label == "not_a_peer"
        finally:
            for ends in (sender, elsewhere, receiver):
                await asyncio.to_thread(ends.close)

    run(scenario())


@given(st.lists(st.integers(1, 1 << 30), max_size=30), st.floats(1e3, 1e10))
def test_small_pushes_go_first_but_not_without_end(sizes: list[int], rate: float) -> None:
    link, urgent_bytes = LinkState(peer="p", at=0.0, available_bytes_per_s=rate), 0
    for size in sizes:
        urgent = urgency_of(size, link, urgent_bytes) is Urgency.URGENT
        assert not urgent or size <= SMALL_S * rate
        assert urgent or size > SMALL_S * rate or urgent_bytes + size > URGENT_S * rate
        urgent_bytes += size if urgent else 0
        assert urgent_bytes <= URGENT_S * rate
        assert urgency_of(size, None, 0) is urgency_of(size + 1, LinkState(peer="p", at=0.0), 0) is Urgency.NORMAL


def test_a_small_push_is_urgent_on_a_link_that_is_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        sender, receiver = links(tmp_path, "east"), links(tmp_path, "west")
        try:
            assert sender.egress.urgency_for("west", 1) is Urgency.NORMAL
            for i in range(100):  # until one was under way when the link was sampled
                assert (await send(sender, receiver, "west", f"first-{i}", 64 << 20)).ok
                if sender.egress.states()[0].available_bytes_per_s:
                    break
            assert sender.egress.urgency_for("west", 1) is Urgency.URGENT
            assert sender.egress.urgency_for("west", 1 << 40) is Urgency.NORMAL
            assert sender.egress.urgency_for("north", 1) is Urgency.NORMAL
            for i in range(20):  # what was urgent and has arrived does not count any more
                assert (await send(sender, receiver, "west", f"again-{i}")).ok
            assert sender.egress.urgency_for("west", 100) is Urgency.URGENT
        finally:
            for each in (sender, receiver):
                await asyncio.to_thread(each.close)

    run(scenario())
