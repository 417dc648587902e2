"""A node's configuration, read again: what came of it is counted by what it has changed, a file of secrets included."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from node.agent import NodeAgent
from pd_cluster.role import PD
from tests.node.running import config, new_runner

NEW, OLD = "a1" * 32, "b2" * 32


def test_secrets_that_are_replaced_are_applied_and_wrong_ones_refuse_all_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "names.secret"
    secret.write_text(OLD)
    before = config(tmp_path, names_secret=str(secret))
    after = config(tmp_path, node_id=before.node_id, names_secret=str(secret), egress_bytes_per_s=5e6)

    async def scenario() -> None:
        agent = NodeAgent(before, PD, time.monotonic)
        try:
            for text, new, outcome in (
                (NEW, before, "applied"),
                ("wrong", after, "refused"),
                (NEW, before, "unchanged"),
            ):
                secret.write_text(text)
                counted = agent.reloads[outcome]
                agent.reconfigure(partial(replace, new))
                assert agent.reloads[outcome] == counted + 1
                assert agent.config.egress_bytes_per_s == before.egress_bytes_per_s
        finally:
            await agent.close()

    with new_runner() as runner:
        runner.run(scenario())
