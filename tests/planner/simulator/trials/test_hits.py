import numpy as np

from planner.model.profile import KvSize
from planner.model.workload import infinite_cache_hits, read_trace
from planner.simulator.trials.hits import finite_cache_hits
from tests.planner.traces import MOONCAKE


def test_a_finite_cache_hits_no_more_and_a_large_one_as_much():
    trace = read_trace(MOONCAKE)
    kv = KvSize(bytes_per_token=1000)
    endless = infinite_cache_hits(trace)
    # The real cache reuses full blocks only.
    whole = np.floor(trace.prompt_tokens / 512) * 512
    assert list(finite_cache_hits(trace, kv, 1000.0)) == list(np.minimum(endless, whole))
    small = finite_cache_hits(trace, kv, 0.5)
    assert small.sum() < endless.sum()
