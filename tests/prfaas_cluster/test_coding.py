"""How ranges are coded, and what becomes of KVCache that was quantised on its way."""

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import Elements, KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from hybrid_cache.layout.transfers import transfer_ranges
from node.coding import Coding
from prfaas_cluster.coding import formats_of, runs_of
from tests.pd_cluster.handover import BLOCK, HandNode, run, until
from transport.coding.choice import CodingPolicy, Quantisation
from transport.coding.codec import zstd_module
from transport.coding.elements import Run, from_floats
from transport.control import messages as m

TOKENS = list(range(100, 157))  # all but the last fill whole blocks: their state is cached, too
LAYOUT = ModelLayout(
    model="test",
    dtype="bfloat16",
    block_size=BLOCK,
    groups=(
        KVCacheGroup(FullAttention(1024, 512, 64, 64), (1, 2)),
        KVCacheGroup(LinearState(8192, ((8192, "float32", 64),)), (0,)),
    ),
)
INT8 = {"quantisation": "int8", "quantise_when": "always"}


def bfloat16_content(group: int, index: int, prefix: Sequence[int]) -> bytes:
    """As the helper's: a function of everything before it, but of values that can be quantised."""
    rng = np.random.default_rng(abs(hash((group, index, tuple(prefix)))))
    return from_floats(rng.standard_normal(LAYOUT.slab_bytes(group) // 2).astype(np.float32), "bfloat16").tobytes()


def node(name: str, path: Path, **coding: Any) -> HandNode:
    return HandNode(name, path, layout=LAYOUT, content_of=bfloat16_content, coding=coding)


async def hand_over(prefill: HandNode, decode: HandNode, tokens: list[int]) -> tuple[m.Delivered, bool]:
    """One request from ticket to decode; returns how it was delivered and whether every byte is the same.

    The engine hears whether what it computes on top of it may be prefix cache, which is so where the landing is.
    """
    ticket = decode.reserve(tokens)
    prefill.begin("job", tokens, len(tokens) - 1, ticket)
    pages = await prefill.heard()
    assert isinstance(pages, m.JobPages), pages
    prefill.compute(pages, tokens)
    delivered = await prefill.heard()
    assert isinstance(delivered, m.Delivered)
    assert delivered.ok
    landed = await decode.claim(ticket, tokens)
    assert isinstance(landed, m.JobPages), landed
    assert landed.exact == (cached_on(decode, tokens) > 0)
    try:
        decode.check(landed, tokens)
        exact = True
    except AssertionError:
        exact = False
    prefill.end("job")
    decode.end("claim", loaded=True)
    await until(decode.incoming.is_idle)
    return delivered, exact


def cached_on(decode: HandNode, tokens: list[int]) -> int:
    hashes = block_hashes(tokens[: len(tokens) - 1], BLOCK, b"")
    return decode.pages.match(hashes, len(tokens) - 1).num_tokens


async def with_nodes(prefill: HandNode, decode: HandNode, scenario: Coroutine[None, None, None]) -> None:
    try:
        await scenario
    finally:
        await prefill.close()
        await decode.close()


def test_quantised_kvcache_serves_its_request_and_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        prefill = node("p", tmp_path, full_attention=INT8)
        decode = node("d", tmp_path, accept_quantised=True)

        async def steps() -> None:
            delivered, exact = await hand_over(prefill, decode, TOKENS)
            assert not exact
            assert delivered.codecs["int8"] > 0
            assert delivered.bytes_saved > 0.2 * delivered.bytes_total
            assert decode.incoming.counts.quantised == {"not_reused": 1}
            assert cached_on(decode, TOKENS) == 0
            assert cached_on(prefill, TOKENS) > 0  # what was computed is exact

        await with_nodes(prefill, decode, steps())

    run(scenario())


def test_quantised_kvcache_is_reused_where_that_is_configured(tmp_path: Path) -> None:
    async def scenario() -> None:
        prefill = node("p", tmp_path, full_attention=INT8)
        decode = node("d", tmp_path, accept_quantised=True, reuse_quantised=True)

        async def steps() -> None:
            await hand_over(prefill, decode, TOKENS)
            assert decode.incoming.counts.quantised == {"reused": 1}
            assert cached_on(decode, TOKENS) > 0

        await with_nodes(prefill, decode, steps())

    run(scenario())


def test_a_node_that_accepts_no_quantised_bytes_gets_exact_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        prefill, decode = node("p", tmp_path, full_attention=INT8), node("d", tmp_path)

        async def steps() -> None:
            delivered, exact = await hand_over(prefill, decode, TOKENS)
            assert exact
            assert set(delivered.codecs) <= {"plain"}
            assert cached_on(decode, TOKENS) > 0

        await with_nodes(prefill, decode, steps())

    run(scenario())


def test_a_prefix_that_is_copied_for_others_stays_exact(tmp_path: Path) -> None:
    async def scenario() -> None:
        prefill = node("p", tmp_path, full_attention=INT8)
        decode = node("d", tmp_path, accept_quantised=True)

        async def steps() -> None:
            await hand_over(prefill, decode, TOKENS)
            num_tokens = len(TOKENS) - 1
            hashes = block_hashes(TOKENS[:num_tokens], BLOCK, b"")
            ticket = decode.reserve(TOKENS, num_tokens, prefix_only=True)
            await prefill.legs.push_prefix(hashes, ticket)
            await decode.incoming.commit(ticket.transfer_id, 10.0)
            assert cached_on(decode, TOKENS) == num_tokens
            assert decode.incoming.counts.quantised == {"not_reused": 1}  # the request's, not the copy's

        await with_nodes(prefill, decode, steps())

    run(scenario())


@pytest.mark.skipif(zstd_module() is None, reason="needs the zstd extra")
def test_compressed_kvcache_is_cache_like_any_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        every = {kind: {"compression": "zstd"} for kind in ("full_attention", "sliding_window", "linear_state")}
        prefill, decode = node("p", tmp_path, **every), node("d", tmp_path)

        async def steps() -> None:
            delivered, exact = await hand_over(prefill, decode, TOKENS)
            assert exact
            assert delivered.codecs["zstd"] > 0
            assert cached_on(decode, TOKENS) > 0

        await with_nodes(prefill, decode, steps())

    run(scenario())


# Formats


def test_by_default_ranges_leave_as_they_are() -> None:
    assert formats_of(Coding(), LAYOUT, transfer_ranges(LAYOUT, 20, 0), exact=False) is None


def test_ranges_are_told_by_their_group() -> None:
    coding = Coding(full_attention=CodingPolicy(quantisation=Quantisation.INT8))
    ranges = transfer_ranges(LAYOUT, 20, 0)
    formats = formats_of(coding, LAYOUT, ranges, exact=False)
    assert formats is not None
    for index, key in enumerate(ranges):
        found = formats(index)
        assert sum(run.num_bytes for run in found.runs) == LAYOUT.slab_bytes(key.group)
        assert found.label == ("full_attention" if key.group == 0 else "linear_state")
    assert formats(0).policy.quantisation is Quantisation.INT8
    exact = formats_of(coding, LAYOUT, transfer_ranges(LAYOUT, 1, 0), exact=True)
    assert exact is not None
    assert exact(0).policy.off


def test_vectors_are_common_and_long_enough_or_none() -> None:
    latent = runs_of((Elements(1024, "bfloat16", 512), Elements(128, "bfloat16", 64)))
    assert latent == (Run(1024, "bfloat16", 64), Run(128, "bfloat16", 64))
    odd = runs_of((Elements(1024, "bfloat16", 63), Elements(128, "bfloat16", 64)))
    assert [run.vector for run in odd] == [63, 64]
    states = runs_of((Elements(64, "float32", 4), Elements(4096, "float32", 64)))
    assert [run.vector for run in states] == [0, 64]
    assert runs_of((Elements(64, "float8_e4m3fn", 64),)) == (Run(64),)
