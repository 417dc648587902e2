from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.errors import LayoutError, OutOfPages
from hybrid_cache.layout.layout import (
    PAGE_ALIGN_BYTES,
    UNBOUNDED_TOKENS,
    ByteRange,
    KVCacheGroup,
    ModelLayout,
    derive_page_bytes,
)
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from hybrid_cache.layout.transfers import RangeKey, transfer_ranges
from planner.model.profile import load_profile
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, make_layout

# The 1T model of PrfaaS table 5: 15 MLA layers of 576 bf16 values per token, 45 KDA layers of 173.925 MiB in all.
MIB = 1 << 20
CONFIGS = Path(__file__).parents[3] / "configs"
ONE_T = ModelLayout(
    model="1t",
    dtype="bfloat16",
    block_size=64,
    groups=(
        KVCacheGroup(FullAttention(1152, 1152), tuple(range(15))),
        KVCacheGroup(LinearState(round(173.925 * MIB / 45)), tuple(range(15, 60))),
    ),
)


@pytest.mark.parametrize(("tokens", "mib"), [(1024, 190.8), (8192, 308.9), (32_000, 701.3), (130_000, 2316.3)])
def test_kv_bytes_of_the_papers_model(tokens, mib):
    assert ONE_T.kv_bytes(tokens) / MIB == pytest.approx(mib, abs=0.06)


def layers(*counts_and_specs):
    """Groups of (number of layers, spec), layers numbered through."""
    groups, first = [], 0
    for count, spec in counts_and_specs:
        groups.append(KVCacheGroup(spec, tuple(range(first, first + count))))
        first += count
    return tuple(groups)


def gqa(heads: int, k_dim: int, v_dim: int) -> tuple[int, int]:
    """Bytes per token of one layer in bf16: K and V together, and K."""
    return heads * (k_dim + v_dim) * 2, heads * k_dim * 2


MLA = FullAttention((512 + 64) * 2, (512 + 64) * 2)
# Table 1's models by their layer configurations. Convolution states are left out.
MODELS = {
    "kimi-linear-48b": layers((20, LinearState(32 * 128 * 128 * 2)), (7, MLA)),
    "mimo-v2-flash": layers((39, SlidingWindow(128, *gqa(8, 192, 128))), (9, FullAttention(*gqa(4, 192, 128)))),
    "qwen3.5-397b": layers((45, LinearState(64 * 128 * 128 * 4)), (15, FullAttention(*gqa(2, 256, 256)))),
    "minimax-m2.5": layers((62, FullAttention(*gqa(8, 128, 128)))),
    "qwen3-235b": layers((94, FullAttention(*gqa(4, 128, 128)))),
}


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_are_those_of_the_planner(name):
    """Two independent statements of S_kv, from layers here and as numbers in the profile, agree at any length."""
    layout = ModelLayout(name, "bfloat16", 64, MODELS[name])
    planned = load_profile(CONFIGS / "profiles" / f"{name}.json").kv_size()
    for tokens in (1, 100, 128, 129, 1000, 8192, 131_072):
        assert layout.kv_bytes(tokens) == planned(tokens)


@pytest.mark.parametrize(
    ("name", "fixed", "per_token"),
    [
        ("kimi-linear-48b", 20 * MIB, 7 * 1152),
        ("mimo-v2-flash", 39 * 128 * 5120, 9 * 2560),
        ("qwen3.5-397b", 180 * MIB, 15 * 2048),
        ("minimax-m2.5", 0, 62 * 4096),
        ("qwen3-235b", 0, 94 * 2048),
    ],
)
def test_kv_bytes_of_a_long_prompt(name, fixed, per_token):
    layout = ModelLayout(name, "bfloat16", 64, MODELS[name])
    assert layout.kv_bytes(100_000) == fixed + 100_000 * per_token


# Table 3's KV throughput in Gbit/s. S_kv is not printed for these models. Our sizes fit the table if the
# prefill time T = S_kv / throughput is plausible: longer for longer prompts, and 0.1 to 10 s.
TABLE_3 = {
    "kimi-linear-48b": (1.19, 2.29, 3.87, 4.88),
    "mimo-v2-flash": (0.82, 2.85, 4.66, 4.71),
    "qwen3.5-397b": (4.13, 6.28, 8.25, 7.47),
    "minimax-m2.5": (4.94, 32.87, 59.93, 47.82),
    "qwen3-235b": (4.12, 22.42, 33.35, 21.50),
}


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_over_published_throughput_is_a_prefill_time(name):
    layout = ModelLayout(name, "bfloat16", 64, MODELS[name])
    lengths = (1000, 8000, 32_000, 128_000)
    times = [layout.kv_bytes(n) * 8 / (phi * 1e9) for n, phi in zip(lengths, TABLE_3[name], strict=True)]
    assert times == sorted(times)
    assert 0.1 < times[0] < 0.6
    assert 1.0 < times[-1] < 10.0


def test_hybrids_send_a_fraction_of_what_full_attention_sends():
    """PrfaaS §2.2 gives 13 and 4 for KVCache per second of prefill; sizes differ by as much, prefill times being alike."""
    size = {name: ModelLayout(name, "bfloat16", 64, groups).kv_bytes(32_000) for name, groups in MODELS.items()}
    assert size["minimax-m2.5"] / size["mimo-v2-flash"] > 8
    assert size["qwen3-235b"] / size["qwen3.5-397b"] > 5


def test_one_full_layer_in_eight_leaves_an_eighth():
    """PrfaaS §2.2 on Ring-2.5-1T: "the 7:1 hybrid ratio contributes another ~8x reduction", states aside."""
    full = ModelLayout("all MLA", "bfloat16", 64, layers((80, MLA)))
    hybrid = ModelLayout("7:1", "bfloat16", 64, layers((70, LinearState(1 << 20)), (10, MLA)))
    assert full.kv_bytes(1000) == 8 * (hybrid.kv_bytes(1000) - hybrid.kv_bytes(0))
    assert full.kv_bytes(10_000_000) / hybrid.kv_bytes(10_000_000) == pytest.approx(8, rel=0.01)


def test_page_size_wastes_little():
    for group in range(2):
        assert ONE_T.block_bytes(group) > 0.98 * ONE_T.pages_per_block(group) * ONE_T.page_bytes
    assert ONE_T.pages_per_block(1) < 512


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=4))
def test_page_holds_every_group(sizes):
    page = derive_page_bytes(sizes)
    assert page % PAGE_ALIGN_BYTES == 0
    assert max(sizes) <= page * 512


@given(st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_segments_cover_a_block_once(specs, layers, data):
    layout = make_layout(*specs, layers=layers)
    for group in range(len(specs)):
        count = layout.pages_per_block(group)
        pages = data.draw(st.permutations(range(count + 3)))[:count]
        covered: list[int] = []
        for layer in range(layers):
            segments = layout.segments(group, layer, pages)
            assert sum(s.length for s in segments) == layout.slab_bytes(group)
            covered += [at for s in segments for at in range(s.start, s.start + s.length)]
        assert len(set(covered)) == len(covered) == layout.block_bytes(group)
        assert {at // layout.page_bytes for at in covered} == set(pages)
        whole = layout.block_segments(group, pages)
        assert [at for s in whole for at in range(s.start, s.start + s.length)] == covered
        assert all(a.start + a.length != b.start for a, b in pairwise(whole))


def test_slabs_are_layer_major_and_neighbours_merge():
    layout = make_layout(FULL, layers=3)
    slab = layout.slab_bytes(0)
    pages = tuple(range(layout.pages_per_block(0)))
    assert layout.segments(0, 1, pages) == (ByteRange(slab, slab),)


def test_wrong_places():
    layout = make_layout()
    with pytest.raises(LayoutError, match="pages"):
        layout.segments(0, 0, ())
    with pytest.raises(LayoutError, match="layer index"):
        layout.segments(0, 1, (0,))
    with pytest.raises(LayoutError, match="pages"):
        layout.block_segments(1, ())


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW, STATE)])
def test_json_round_trip(specs):
    layout = make_layout(*specs)
    again = ModelLayout.from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint


def test_fingerprint_sees_sizes_and_model():
    other = [
        make_layout(block_size=8),
        make_layout(FULL, LinearState(701)),
        ModelLayout("other", "float32", BLOCK, make_layout().groups),
    ]
    assert len({layout.fingerprint for layout in [make_layout(), *other]}) == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": 3}', '{"groups": [], "model": "m"}'])
def test_not_a_layout(text):
    with pytest.raises(LayoutError):
        ModelLayout.from_json(text)


def test_transfer_ranges():
    layout = make_layout(FULL, WINDOW, STATE)
    assert tuple(transfer_ranges(layout, 18, 8)) == (
        RangeKey(0, 0, 2),
        RangeKey(0, 0, 3),
        RangeKey(0, 0, 4),
        RangeKey(1, 0, 3),  # tokens 12..17
        RangeKey(1, 0, 4),
        RangeKey(2, 0, 18),
    )


def test_transfer_ranges_when_all_is_there():
    assert tuple(transfer_ranges(make_layout(FULL, STATE), 8, 8)) == (RangeKey(1, 0, 8),)
    with pytest.raises(ValueError, match="have_tokens"):
        transfer_ranges(make_layout(), 8, 9)


@pytest.mark.parametrize("make", [lambda: FullAttention(0, 0), lambda: FullAttention(4, 8), lambda: LinearState(-1)])
def test_impossible_specs(make):
    with pytest.raises(ValueError, match=r"positive|exceeds"):
        make()


def test_impossible_layouts():
    with pytest.raises(LayoutError):
        KVCacheGroup(FULL, ())
    with pytest.raises(LayoutError):
        ModelLayout("m", "float32", 0, (KVCacheGroup(FULL, (0,)),))
    with pytest.raises(LayoutError):
        ModelLayout("m", "float32", 16, ())


def test_a_layout_says_what_its_slabs_consist_of():
    parts = ((64, "float32", 4), (192, "float32", 16))
    layout = ModelLayout(
        "m", "bfloat16", 32,
        (
            KVCacheGroup(FullAttention(96, 64, 32, 16), (0,)),
            KVCacheGroup(SlidingWindow(128, 64, 64, 32), (1,)),
            KVCacheGroup(LinearState(256, parts), (2,)),
            KVCacheGroup(LinearState(100), (3,)),
        ),
    )  # fmt: skip
    assert layout.elements(0) == ((32 * 64, "bfloat16", 32), (32 * 32, "bfloat16", 16))
    assert layout.elements(1) == ((32 * 64, "bfloat16", 32),)
    assert layout.elements(2) == parts
    assert layout.elements(3) == ((100, "", 0),)
    assert all(sum(e.num_bytes for e in layout.elements(g)) == layout.slab_bytes(g) for g in range(4))
    assert ModelLayout.from_json(layout.to_json()) == layout
    assert ModelLayout.from_json(layout.to_json()).fingerprint == layout.fingerprint


def test_parts_are_the_whole_snapshot():
    with pytest.raises(ValueError, match="100 bytes"):
        LinearState(100, ((64, "float32", 4),))


@given(st.sampled_from([(FULL,), (FULL, STATE), (FULL, WINDOW), (FULL, WINDOW, STATE)]), st.integers(1, 80))
def test_what_is_said_to_fit_into_pages_does(specs, num_pages):
    layout = make_layout(*specs)
    if fits := layout.tokens_within(num_pages):
        PrefixCache(layout, num_pages).reserve("a", [], fits, now=0.0, purpose=Purpose.LANDING)
    if WINDOW not in specs:  # of a window it is said that it may begin and end within a block
        with pytest.raises(OutOfPages):
            PrefixCache(layout, num_pages).reserve("a", [], fits + 1, now=0.0, purpose=Purpose.LANDING)


def test_what_does_not_grow_fits_whatever_its_length():
    layout = make_layout(STATE)
    assert layout.tokens_within(0) == 0
    assert layout.tokens_within(layout.pages_per_block(0)) == UNBOUNDED_TOKENS
