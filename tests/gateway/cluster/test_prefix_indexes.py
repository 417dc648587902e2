"""Nodes far away say what they have by digests: prompts are routed by these, and a wrong hit costs some computing."""

from hybrid_cache.index.digest import NAME_BYTES, named_at
from tests.gateway.layouts import BLOCK_SIZE
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.views import watched
from tests.gateway.worlds import on_loop, until
from transport.control.proto import node_pb2 as pb

PROMPT = "the quick brown fox jumps over the lazy dog " * 20


def digest_of(hashes: list[bytes]) -> pb.NodeEvent:
    """All blocks of a prompt, and the state at its end."""
    attention = b"".join(hashes[at][:NAME_BYTES] for at in named_at(hashes, len(hashes)))
    parts = [pb.DigestPart(group=0, added=attention), pb.DigestPart(group=1, added=hashes[-1][:NAME_BYTES])]
    return pb.NodeEvent(digest=pb.CacheDigest(anew=True, parts=parts))


async def told(w: Pipelined, node: ScriptedNode, text: str) -> int:
    """The gateway hears that `node` has a prompt; so many of its tokens it can reuse."""
    hashes = w.hashes_of(text)
    before = w.clusters.indexes.num_names
    node.tell(digest_of(hashes))
    await until(lambda: w.clusters.indexes.num_names > before)
    return len(hashes) * BLOCK_SIZE


@on_memory_loop
async def test_prompts_are_routed_by_digests() -> None:
    async with pipeline(remote=0, local=3, decode=1) as w:
        far = w.nodes.local[1]
        far.script.cached_tokens = await told(w, far, PROMPT)
        assert (await w.complete(PROMPT)).status == 200
        (record,) = await w.records()
        assert record["prefill_node"] == far.node_id
        assert await w.fallbacks() == {}
        assert await w.counted("prfaas_summary_hits_total") == {"held": 1}


@on_memory_loop
async def test_a_wrong_hit_is_computed_and_counted() -> None:
    async with pipeline(remote=0, local=3, decode=1) as w:
        far = w.nodes.local[1]
        await told(w, far, PROMPT)  # and has nothing of it
        answer = await w.complete(PROMPT)
        assert answer.status == 200
        assert (await w.fallbacks()) == {"summary_wrong": 1}
        assert await w.counted("prfaas_summary_hits_total") == {"missing": 1}
        (record,) = await w.records()
        assert record["prefill_node"] == far.node_id
        assert record["fallbacks"] == ["summary_wrong"]


@on_loop
async def test_digests_of_a_node_that_is_gone_are_forgotten() -> None:
    async with watched() as w:
        clusters, far = w.clusters, w.nodes.local[0]
        far.tell(digest_of(w.request(PROMPT).prompt.hashes))
        await until(lambda: clusters.indexes.num_names)
        assert clusters.indexes.is_far(far.node_id)
        assert not clusters.indexes.is_far("d0")
        await far.stop_agent()
        await until(lambda: not clusters.indexes.num_names)
        assert not clusters.indexes.is_far(far.node_id)
