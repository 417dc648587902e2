"""Which way KVCache goes between two nodes, and what happens where the way that was asked for does not exist."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from node.config import node_config
from node.errors import NodeConfigError
from node.transfer.reach import PeerReach, rdma_of
from tests.node.test_config import TABLE
from tests.pd_cluster.handover import TOKENS, HandNode, hand_over, run
from transport.control.settings import SettingsError
from transport.rdma import verbs as rdma
from transport.rdma.device import RdmaDevices, RdmaError
from transport.rdma.loopback import LoopbackFabric
from transport.rdma.verbs import RdmaOptions


def nodes(
    tmp_path: Path, fabric: LoopbackFabric, *, decode_fabric: str = "a", **changes: object
) -> tuple[HandNode, HandNode]:
    near, far = RdmaDevices([fabric.device("a0", fabric="a")]), RdmaDevices([fabric.device("a1", fabric=decode_fabric)])
    prefill = HandNode("p", tmp_path, rdma=near, **changes)
    return prefill, HandNode("d", tmp_path, rdma=far)


async def delivered_over(prefill: HandNode, decode: HandNode) -> str:
    try:
        _, delivered = await hand_over(prefill, decode, TOKENS)
        return delivered.link
    finally:
        await prefill.close()
        await decode.close()


def test_nics_of_one_fabric_carry_kvcache_within_a_cluster(tmp_path: Path) -> None:
    async def scenario() -> None:
        fabric = LoopbackFabric()
        prefill, decode = nodes(tmp_path, fabric)
        assert [(e.kind, e.host_id) for e in decode.listener.endpoints()] == [("rdma", "a"), ("tcp", "")]
        assert await delivered_over(prefill, decode) == "rdma"
        assert not fabric.queue_pairs

    run(scenario())


def test_other_fabrics_and_other_clusters_are_reached_by_tcp(tmp_path: Path) -> None:
    async def scenario() -> None:
        assert await delivered_over(*nodes(tmp_path, LoopbackFabric(), decode_fabric="b")) == "tcp"
        assert await delivered_over(*nodes(tmp_path, LoopbackFabric(), cluster="elsewhere")) == "tcp"

    run(scenario())


def test_shared_memory_comes_before_rdma(tmp_path: Path) -> None:
    async def scenario() -> None:
        fabric = LoopbackFabric()
        ends = [HandNode(name, tmp_path, use_shm=True, rdma=RdmaDevices([fabric.device(f"{name}0")])) for name in "pd"]
        assert [e.kind for e in ends[1].listener.endpoints()] == ["shm", "rdma", "tcp"]
        assert await delivered_over(*ends) == "shm"

    run(scenario())


def test_rdma_that_is_asked_for_and_impossible_is_an_error_that_says_why() -> None:
    def none(*_: object) -> RdmaDevices:
        raise RdmaError("this machine has no RDMA device")

    config = node_config(TABLE)
    assert rdma_of(config, open_devices=none) is None
    assert rdma_of(replace(config, transport="tcp"), open_devices=none) is None
    with pytest.raises(
        NodeConfigError, match="transport = 'rdma': RDMA is not possible here: this machine has no RDMA"
    ):
        rdma_of(replace(config, transport="rdma"), open_devices=none)
    with pytest.raises(NodeConfigError, match="RDMA is not possible here"):
        rdma_of(replace(config, rdma_devices=("mlx5_0",)), open_devices=none)
    with pytest.raises(SettingsError, match="rdma_devices: allowed only with transport"):
        replace(config, transport="tcp", rdma_devices=("mlx5_0",))


def test_an_arena_is_open_to_peers_only_where_the_file_says_so_and_the_log_tells(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[RdmaOptions] = []

    def note(options: RdmaOptions) -> RdmaDevices:
        asked.append(options)
        return RdmaDevices([], direct=options.direct)

    config = node_config(TABLE)
    for direct in (False, True):
        caplog.clear()
        devices = rdma_of(replace(config, rdma_direct=direct), open_devices=note)
        assert asked[-1].direct is direct
        assert PeerReach("c", use_shm=False, rdma=devices).is_open_to_peers is direct
        assert ("can write anywhere in our arena" in caplog.text) is direct
    assert not PeerReach("c", use_shm=False).is_open_to_peers
    with pytest.raises(SettingsError, match="rdma_direct: allowed only with transport"):
        replace(config, transport="tcp", rdma_direct=True)


def test_encryption_that_was_asked_for_is_not_given_up_by_default() -> None:
    opened = []

    def note(options: RdmaOptions) -> RdmaDevices:
        opened.append(options)
        return RdmaDevices([])

    sealed = replace(node_config(TABLE), integrity="aead", certificate="c", key="k", authority="a")
    assert rdma_of(sealed, open_devices=note) is None
    assert not opened
    assert rdma_of(replace(sealed, transport="rdma"), open_devices=note) is not None


def test_a_machine_without_rdma_says_so() -> None:
    with suppress(RdmaError):  # there is some: nothing to see here
        rdma.open_devices().close()
        return
    with pytest.raises(RdmaError, match=r"pyverbs|device"):
        rdma.open_devices()
