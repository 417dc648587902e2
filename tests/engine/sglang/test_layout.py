from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PagesInvalid
from engine.sglang.layout import HostPool, Ranks, layout_of, names_of, refusal_of
from hybrid_cache.hashing.block_hash import block_hashes

POOL = HostPool(
    kind="MHATokenToKVPoolHost",
    arrangement="layer_first",
    page_tokens=16,
    layers=3,
    draft_layers=0,
    heads=2,
    head_elements=8,
    v_head_elements=8,
    dtype="bfloat16",
    item_bytes=2,
)


@pytest.mark.parametrize(("pool", "ranks", "words"), [
    ({}, {"tensor": 2}, "2 tensor parallel ranks"),
    ({}, {"pipeline": 4}, "4 pipeline parallel ranks"),
    ({}, {"context": 2}, "2 context parallel ranks"),
    ({}, {"dp_rank": 1}, "one engine to a node"),
    ({"kind": "MLATokenToKVPoolHost"}, {}, "no MLA"),
    ({"kind": "AsymmetricMHATokenToKVPoolHost"}, {}, "equal heads"),
    ({"draft_layers": 1}, {}, "speculative"),
    ({"arrangement": "page_first"}, {}, "--hicache-mem-layout layer_first"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_in_words(pool, ranks, words):
    assert words in (refusal_of(replace(POOL, **pool), Ranks(**ranks)) or "")


def test_one_rank_of_plain_attention_is_served():
    assert refusal_of(POOL, Ranks()) is None


def test_a_page_is_a_block():
    layout = layout_of("llama-1", POOL)
    assert layout.block_size == 16
    assert layout.slab_bytes(0) == 2 * 16 * 2 * 8 * 2  # K and V of 16 tokens, 2 heads of 8 values of 2 bytes
    assert layout.block_bytes(0) == 3 * layout.slab_bytes(0)
    assert layout.full_groups == (0,)


@pytest.mark.parametrize("change", [
    {"page_tokens": 32}, {"layers": 4}, {"heads": 4, "head_elements": 4}, {"dtype": "float16"}, {"v_head_elements": 4},
])  # fmt: skip
def test_pools_that_differ_have_other_layouts(change):
    assert layout_of("m", replace(POOL, **change)).fingerprint != layout_of("m", POOL).fingerprint


def test_a_layout_of_sglang_is_nobody_elses():
    assert layout_of("llama-1", POOL).model == "llama-1/sglang"


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=70), seed=st.binary(min_size=32, max_size=32))
def test_names_are_those_of_pages(tokens, seed):
    names = block_hashes(tokens, 16, b"", parent=seed)
    assert names_of([name.hex() for name in names]) == names


@pytest.mark.parametrize("key", ["", "ab", "0" * 62, "g" * 64, "0" * 64 + "_0_1"])
def test_what_is_no_name_is_refused(key):
    with pytest.raises(PagesInvalid):
        names_of([key])
