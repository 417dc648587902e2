"""Has one node send a prompt's KVCache to another one, as a gateway does, and prints the secret of the ticket.

python -m tests.borders.move GATEWAY_FILE SOURCE_HOST TARGET_HOST PROMPT
"""

import asyncio
import sys
from pathlib import Path

from engine.byte_tokenizer import byte_tokenizer
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.served_model import hashing_by
from gateway.config.gateway import load
from gateway.routing.block_naming import name_secrets
from hybrid_cache.hashing.block_hash import block_hashes, namespaced
from hybrid_cache.layout.layout import ModelLayout
from tests.borders.sites import BLOCK_SIZE, TENANT

TIMEOUT_S = 20.0


async def move(gateway_file: Path, source: str, target: str, text: str) -> bytes:
    """Returns the secret."""
    config = load(gateway_file)
    names = {node.agent.rpartition(":")[0]: node.name for node in config.nodes}
    agents = {
        node.agent.rpartition(":")[0]: AgentClient(node.agent, TIMEOUT_S, config.identity, node.name)
        for node in config.nodes
    }
    try:
        tokens = byte_tokenizer().encode(text).ids
        info, _ = await agents[source].describe()
        layout = ModelLayout.from_json(info.layout_json)
        hashing = hashing_by(name_secrets(config.names_secret), layout).of_group(TENANT)
        salt = namespaced(hashing.salt, hashing.namespace(None))
        hashes = block_hashes(tokens[:-1], BLOCK_SIZE, salt)
        sender = f"{info.cluster}/{names[source]}"
        ticket = await agents[target].reserve_prefix("move", hashes, BLOCK_SIZE * len(hashes), TIMEOUT_S, sender)
        sent = await agents[source].load("move", hashes, ticket, TIMEOUT_S)
        assert sent > 0, "nothing was sent"
        await agents[target].commit(ticket.transfer_id, TIMEOUT_S)
        return ticket.secret
    finally:
        for agent in agents.values():
            await agent.close()


if __name__ == "__main__":
    print(asyncio.run(move(Path(sys.argv[1]), *sys.argv[2:5])).hex())
