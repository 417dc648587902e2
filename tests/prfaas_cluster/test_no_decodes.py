"""A PrfaaS node reserves nothing for decode, and lends its engine nothing that landed."""

from pathlib import Path

import pytest

from node.errors import NodeRefusal
from prfaas_cluster.no_decodes import NoDecodes
from tests.node.running import new_runner
from tests.pd_cluster.handover import HandNode
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb


def test_a_claim_is_refused_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = HandNode("p", tmp_path)
        try:
            landings, told = NoDecodes(node.incoming), list[m.AgentMessage]()
            message = m.ClaimLanding(job="j", transfer_id="t", tokens_digest=b"", timeout_s=1.0)
            landings.claim(message, node, told.append)
            with pytest.raises(NodeRefusal, match="wrong_role"):
                await landings.reserve(pb.ReserveRequest(num_tokens=16))
            assert not landings.expects_decodes
            landings.end(m.EndJob(job="j"), node)
            landings.engine_gone(node)
            assert [(type(each), getattr(each, "reason", "")) for each in told] == [(m.Refused, "wrong_role")]
            assert (landings.refused, landings.jobs) == ({"wrong_role": 1}, {})
        finally:
            await node.close()

    with new_runner() as runner:
        runner.run(scenario())
