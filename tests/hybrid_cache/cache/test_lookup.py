from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.lookup import PrefixHit, longest_common_hit, run_blocks
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, make_layout

CHAIN = [bytes([i]) * 32 for i in range(12)]


def servable(spec, held: set[int], length: int) -> bool:
    """By definition, in blocks."""
    match spec:
        case FullAttention():
            return all(i in held for i in range(length))
        case SlidingWindow(window=window):
            return all(i in held for i in range(max(0, length - run_blocks(window, BLOCK)), length))
        case LinearState():
            return length == 0 or length - 1 in held
    raise AssertionError


@given(
    st.lists(st.sampled_from([FULL, WINDOW, STATE, SlidingWindow(1, 64, 32)]), min_size=1, max_size=4),
    st.integers(0, 12 * BLOCK + 3),
    st.data(),
)
def test_fixed_point_is_the_longest_length_all_can_serve(specs, num_tokens, data):
    layout = make_layout(*specs)
    held = [
        set(range(data.draw(st.integers(0, 12))))
        if isinstance(spec, FullAttention)
        else data.draw(st.sets(st.integers(0, 11)))
        for spec in specs
    ]
    limit = min(12, num_tokens // BLOCK)
    agreed = max(n for n in range(limit + 1) if all(servable(s, h, n) for s, h in zip(specs, held, strict=True)))
    full = [h for s, h in zip(specs, held, strict=True) if isinstance(s, FullAttention)]
    attention = min([limit, *map(len, full)]) if full else agreed
    hit = longest_common_hit(layout, [{CHAIN[i] for i in h} for h in held], CHAIN, num_tokens)
    assert hit == PrefixHit(agreed * BLOCK, attention * BLOCK)


def test_full_attention_looks_at_few_blocks():
    class Counting(set):
        asked = 0

        def __contains__(self, item):
            Counting.asked += 1
            return super().__contains__(item)

    chain = [i.to_bytes(32) for i in range(2048)]
    held = Counting(chain[:1500])
    assert longest_common_hit(make_layout(FULL), [held], chain, 2048 * BLOCK).num_tokens == 1500 * BLOCK
    assert Counting.asked <= 12
