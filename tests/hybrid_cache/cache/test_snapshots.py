from hybrid_cache.cache.snapshots import BranchPoints, Prefill

PREFILL = Prefill(num_tokens=70, cached_tokens=16, attention_tokens=40, block_size=4)


def test_lengths():
    assert BranchPoints().lengths(PREFILL) == {40, 68}
