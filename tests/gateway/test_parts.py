"""What a gateway is made of hears of each other."""

import time
from pathlib import Path

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.registry import NODE_TIMES
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.parts import GatewayTasks, build_nodes
from gateway.tasks import TaskSet
from gateway.workers.process_scope import SingleProcess
from tests.gateway.worlds import on_loop
from tests.peers import Peers
from transport.peers.name import PeerCertificate, PeerName, PeerRole
from transport.peers.rights import SERVE


def test_refusals_of_the_guard_are_counted_by_reason(peers: Peers, tmp_path: Path) -> None:
    own = peers.by_role[PeerRole.GATEWAY]

    @on_loop
    async def scenario() -> None:
        config = GatewayConfig(
            tokenizer_dir=tmp_path,
            nodes=(NodeAddress(agent="127.0.0.1:1"),),
            certificate=own.certificate,
            key=own.key,
            authority=own.authority,
        )
        seat = SingleProcess()
        tasks = GatewayTasks(*(TaskSet(seat.metrics.upkeep.unforeseen) for _ in range(4)))
        async with build_nodes(
            config=config, clock=time.monotonic, seat=seat, tasks=tasks, agent_client=AgentClient, times=NODE_TIMES
        ) as seen:
            assert seen.guard is not None
            stolen = PeerCertificate(PeerName("prfaas", "any", PeerRole.OPERATOR, "stolen"), 1)
            assert seen.guard.refusal(SERVE, stolen, "127.0.0.1:1")
            assert b'prfaas_agent_refusals_total{reason="role"} 1.0' in seat.metrics.render()

    scenario()
