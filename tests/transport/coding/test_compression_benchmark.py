"""The benchmark's way there and back is that of lanes: lossless codecs give every byte back, quantised ones are close."""

import numpy as np
import pytest

from benchmarks.transport.compression import CODECS, Bytes, CompressionJob, there_and_back
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from hybrid_cache.layout.transfers import transfer_ranges
from transport.coding.codec import zstd_module
from transport.coding.elements import from_floats

LAYOUT = ModelLayout(
    model="test",
    dtype="bfloat16",
    block_size=32,
    groups=(
        KVCacheGroup(FullAttention(512, 256, 64, 64), (1, 2)),
        KVCacheGroup(LinearState(8192, ((8192, "float32", 64),)), (0,)),
    ),
)


def filled(num_tokens: int) -> CompressionJob:
    job, rng = CompressionJob(LAYOUT, num_tokens), np.random.default_rng(1)
    job.arena.data[:] = from_floats(rng.standard_normal(job.arena.data.size // 2).astype(np.float32), "bfloat16")
    return job


@pytest.mark.parametrize("name", CODECS)
def test_what_comes_back(name: str) -> None:
    if zstd_module() is None and "zstd" in name:
        pytest.skip("needs the zstd extra")
    source, target, total = filled(100), CompressionJob(LAYOUT, 100), Bytes()
    there_and_back(source, target, CODECS[name], total, states=False)
    keys = transfer_ranges(LAYOUT, 100, 0)
    assert total.plain == sum(LAYOUT.slab_bytes(key.group) for key in keys)
    assert total.coded < total.plain
    for key in keys:
        exact = b"".join(source.views(key)) == b"".join(target.views(key))
        assert exact == (name == "zstd" or key.group == 1)
    error = np.sqrt(total.squared_errors / total.squares)
    assert error == 0 if name == "zstd" else 0 < error < 0.04
