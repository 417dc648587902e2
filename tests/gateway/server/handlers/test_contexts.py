"""What nodes say that they keep, and what answers say of it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gateway.api.cache_control import Breakpoint
from gateway.auth.keyring import Tenant
from gateway.cluster.inflight_prefixes import UNTOLD_S
from gateway.cluster.pinned_prefixes import PinnedPrefix, PinnedPrefixes, PinState
from gateway.config.models import ModelTable
from gateway.server.handlers.contexts import OUTCOME_WAIT_S, PAUSES_S, PinOutcome, details_of, id_of
from hybrid_cache.hashing.block_hash import HASH_BYTES
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.agent import MemoryAgent
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.pipeline.test_revisions import become
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from tests.prompts.builders import text_tokenizer
from transport.control.proto import node_pb2 as pb


def wish(tokens: int, ttl: str = "5m") -> Breakpoint:
    return Breakpoint(f"messages[{tokens}]", ttl, tokens, tokens)


def kept(context_id: str = "c", owner: str = "acme", **fields: Any) -> PinnedPrefix:
    values: dict[str, Any] = {"num_tokens": 64, "left_s": 300.0, "ttl_s": 300.0, "owned_tokens": 64}
    return PinnedPrefix(context_id=context_id, owner=owner, **values | fields)


def test_a_token_is_read_from_a_cache_or_written_to_it() -> None:
    outcomes = [
        PinOutcome(wish(96, "1h"), "b", 96, is_new=True),
        PinOutcome(wish(64), "a", 64, is_new=True),
        PinOutcome(wish(200), reason="over_budget"),
    ]
    details = details_of(outcomes, 0)
    assert details["cache_write_tokens"] == 96
    assert details["cache_writes_by_ttl"] == {"5m": 64, "30m": 0, "1h": 32}
    assert details["breakpoints"][0] == {
        "field": "messages[96]", "ttl": "1h", "tokens": 96, "kept": 96, "context": "b",
    }  # fmt: skip
    assert details["breakpoints"][2]["reason"] == "over_budget"
    assert details_of(outcomes, 80)["cache_write_tokens"] == 16
    assert details_of([PinOutcome(wish(64), "a", 64)], 0)["cache_write_tokens"] == 0


def test_a_context_has_a_name_of_its_tenants() -> None:
    assert id_of(Tenant("acme"), b"end") == id_of(Tenant("acme", "group"), b"end")
    assert len({id_of(Tenant(name), end) for name in ("acme", "globex") for end in (b"end", b"other")}) == 4


def test_what_a_node_keeps_is_what_it_said_last() -> None:
    contexts = PinnedPrefixes()
    contexts.described([kept()], 10.0, is_same_process=True)
    found = contexts.get("c", 11.0)
    assert found is not None
    assert found.told(11.0, found.state) == {
        "id": "c", "object": "context", "tokens": 64, "ttl_s": 300, "expires_in_s": 299, "status": "kept",
    }  # fmt: skip
    assert contexts.get("c", 310.0) is None
    contexts.heard(kept("d", owned_tokens=128), 20.0)
    assert ([each.context_id for each in contexts.of("acme", 20.0)], contexts.owned_tokens("acme")) == (["c", "d"], 128)
    contexts.heard(kept(has_ended=True, owned_tokens=64), 30.0)
    contexts.heard(kept("e", "globex"), 30.0)
    assert [each.context_id for each in contexts.of("acme", 30.0)] == ["d"]
    assert contexts.owned_tokens("acme") == 64


def test_what_a_node_kept_before_it_ended_is_lost_until_its_time_is_over() -> None:
    contexts = PinnedPrefixes()
    contexts.described([kept("c"), kept("d")], 0.0, is_same_process=True)
    contexts.described([kept("d")], 10.0, is_same_process=False)
    assert {each.context_id: each.state for each in contexts.of("acme", 10.0)} == {
        "c": PinState.LOST,
        "d": PinState.KEPT,
    }
    contexts.described([], 20.0, is_same_process=True)  # the same process as at 10: what it does not name has ended
    assert list(contexts.of("acme", 20.0)) == []
    contexts.described([], 30.0, is_same_process=False)
    assert contexts.owned_tokens("acme") == 0


@on_memory_loop
async def test_contexts_are_listed_and_strangers_are_not_found() -> None:
    async with pipeline() as w:
        node = w.clusters.nodes[0]
        node.contexts.heard(kept(owner=""), asyncio.get_running_loop().time())
        async with w.http.get("/v1/contexts") as response:
            listed = await response.json()
        assert [each["id"] for each in listed["data"]] == ["c"]
        assert listed["kept_tokens"] == 64
        async with w.http.delete("/v1/contexts/nobodys") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "context_not_found")


@on_memory_loop
async def test_a_node_that_cannot_keep_is_named_and_the_request_is_answered() -> None:
    async with pipeline() as w:  # scripted nodes keep nothing
        response = await w.complete("hello there the quick brown fox " * 8, prompt_cache_options={"ttl": "5m"})
        details = (await response.json())["usage"]["prompt_tokens_details"]
        (told,) = details["breakpoints"]
        assert (response.status, details["cache_write_tokens"], told["kept"]) == (200, 0, 0)
        assert told["reason"] == "unimplemented"
        assert 'prfaas_contexts_total{outcome="unimplemented"} 1.0' in await w.metrics()


class HalfKeepingNode(ScriptedNode):
    """Keeps a block of whatever it is asked to keep, which was not kept before it was asked first."""

    asked = 0

    async def CreateContext(self, request: Any, context: Any) -> pb.Context:
        self.asked += 1
        added = 16 if self.asked == 1 else 0
        return pb.Context(
            context_id=request.context_id,
            num_tokens=16,
            owned_tokens=16,
            added_tokens=added,
            ttl_s=300.0,
            whole_ttl_s=300.0,
        )


@on_memory_loop
async def test_a_part_that_is_kept_was_written_however_often_the_rest_was_looked_for() -> None:
    async with pipeline(kind=HalfKeepingNode) as w:
        response = await w.complete("hello there the quick brown fox " * 8, prompt_cache_options={"ttl": "5m"})
        details = (await response.json())["usage"]["prompt_tokens_details"]
        (told,) = details["breakpoints"]
        assert (told["kept"], told["reason"], details["cache_write_tokens"]) == (16, "partial", 16)
        assert max(cast(HalfKeepingNode, node).asked for node in w.nodes.nodes) > 1


class NotingNode(ScriptedNode):
    """Keeps what it is asked to keep, and notes its names and its length."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.kept: list[tuple[bytes, int]] = []

    async def CreateContext(self, request: Any, context: Any) -> pb.Context:
        self.kept.append((request.block_hashes, request.num_tokens))
        return pb.Context(context_id=request.context_id, num_tokens=request.num_tokens, ttl_s=300.0, whole_ttl_s=300.0)


@on_memory_loop
async def test_a_context_is_kept_by_its_names_in_the_revision_that_computed_it() -> None:
    async with pipeline(remote=0, local=2, decode=2, kind=NotingNode) as w:
        wider = replace(LAYOUT, block_size=2 * LAYOUT.block_size)
        await become(w, wider, w.nodes.local[1], w.nodes.decode[1])
        prompt = "hello there the quick brown fox " * 8
        for _ in range(20):
            response = await w.complete(prompt, prompt_cache_options={"ttl": "5m"})
            details = (await response.json())["usage"]["prompt_tokens_details"]
            assert details["breakpoints"][0]["kept"] > 0
            if all(cast(NotingNode, node).kept for node in w.nodes.local):
                break
            await asyncio.sleep(UNTOLD_S)  # until then the prompt is drawn to the node that has computed it
        for node in w.nodes.local:
            for names, num_tokens in cast(NotingNode, node).kept:
                assert num_tokens == len(names) // HASH_BYTES * node.layout.block_size
        firsts = {cast(NotingNode, node).kept[0][0][:HASH_BYTES] for node in w.nodes.local}
        assert len(firsts) == 2  # a layout has names of its own


@on_memory_loop
async def test_a_context_of_a_model_is_kept_by_a_node_of_it_though_another_models_has_the_same_names() -> None:
    twin = ModelTable(name="twin", tokenizer_dir=Path("unused"))
    async with pipeline(
        remote=0, local=0, decode=2, kind=NotingNode, models=(twin,), tokenizers=lambda config: text_tokenizer()
    ) as w:
        second = w.nodes.decode[1]
        second.model_id = "twin"
        await become(w, LAYOUT, second)
        await until(lambda: w.models.serves("twin"))
        for model in ("scripted", "twin"):
            response = await w.complete(
                "hello there the quick brown fox " * 8, model=model, prompt_cache_options={"ttl": "5m"}
            )
            assert (await response.json())["usage"]["prompt_tokens_details"]["breakpoints"][0]["kept"] > 0
        first, other = (cast(NotingNode, node).kept for node in w.nodes.decode)
        assert first == other != []


class HalfKeepingAgent(MemoryAgent):
    """The same at once, however many are asked for."""

    async def keep(self, context_id: str, *_: Any) -> PinnedPrefix:
        return kept(context_id, "", num_tokens=16, owned_tokens=16, added_tokens=16)


@on_memory_loop
async def test_parts_that_are_kept_do_not_wait_for_each_others_rest() -> None:
    """A tenant that has its share of a node is told so by every answer, however many there are at once."""
    at_once = 12
    assert at_once * sum(PAUSES_S) > OUTCOME_WAIT_S  # one after the other they would be too late
    async with pipeline(agent_client=HalfKeepingAgent) as w:

        async def reason(number: int) -> str:
            prompt = f"{number} hello there the quick brown fox " * 8
            response = await w.complete(prompt, prompt_cache_options={"ttl": "5m"})
            (told,) = (await response.json())["usage"]["prompt_tokens_details"].get("breakpoints") or [{}]
            return str(told.get("reason", "not told in time"))

        assert await asyncio.gather(*map(reason, range(at_once))) == ["partial"] * at_once
