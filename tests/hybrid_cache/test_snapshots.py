import pytest

from hybrid_cache.snapshots import BranchPoints, EveryBlocks, LastBoundary, Prefill

PREFILL = Prefill(num_tokens=70, cached_tokens=16, attention_tokens=40, block_size=4)


def test_lengths():
    assert LastBoundary().lengths(PREFILL) == {68}
    assert BranchPoints().lengths(PREFILL) == {40, 68}
    assert EveryBlocks(5).lengths(PREFILL) == {20, 40, 60, 68}
    with pytest.raises(ValueError, match="blocks"):
        EveryBlocks(0)
