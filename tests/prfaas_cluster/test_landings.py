"""An engine of a PrfaaS node is lent nothing that landed; its cache gets prefixes all the same."""

from pathlib import Path

from prfaas_cluster.landings import NoLandings
from tests.node.handover import HandNode
from tests.node.running import new_runner
from transport.control import messages as m


def test_a_claim_is_refused_and_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = HandNode("p", tmp_path)
        try:
            landings, told = NoLandings(node.consumer), list[m.AgentMessage]()
            message = m.ClaimLanding(job="j", transfer_id="t", tokens_digest=b"", timeout_s=1.0)
            landings.claim(message, node, told.append)
            landings.end(m.EndJob(job="j"), node)
            landings.engine_gone(node)
            assert [(type(each), getattr(each, "reason", "")) for each in told] == [(m.Refused, "wrong_role")]
            assert (landings.refused, landings.jobs) == ({"wrong_role": 1}, {})
        finally:
            await node.close()

    with new_runner() as runner:
        runner.run(scenario())
