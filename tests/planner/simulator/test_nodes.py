"""Decode nodes: what a batch remembers does not grow with the time that it stays busy."""

import tracemalloc

from planner.decisions.views import ClusterKind
from planner.model.profile import DecodeProfile, PrefillCurve
from planner.simulator.loop import Loop
from planner.simulator.nodes import DecodeNode, Job, PrefillNode
from planner.simulator.scenario import Pool

POOL = Pool(
    name="pd",
    kind=ClusterKind.PD,
    num_prefill=0,
    num_decode=1,
    prefill=PrefillCurve(coefficients=(0.0, 1e-3, 0.0), valid_tokens=(0, 1e9)),
    decode=DecodeProfile(max_running=4, step_s=0.01, step_s_per_request=0.01),
)


def test_an_idle_node_is_no_less_of_one():
    node = PrefillNode("p0", POOL, Loop(), None, lambda now, job: None, lambda now, job: None)
    assert not node.num_jobs
    assert node


def test_a_batch_that_never_empties_remembers_no_more():
    loop, ended, sizes = Loop(), [0], {}

    def next_one(now: float, job: Job) -> None:
        ended[0] += 1
        if ended[0] in (4_000, 24_000):
            sizes[ended[0]] = tracemalloc.get_traced_memory()[0]
        if ended[0] < 24_000:
            node.assign(1)
            node.put(now, Job(0, now, 100, 5.0 + ended[0] % 7, ()))

    node = DecodeNode("d0", POOL, loop, lambda now, job: None, next_one)
    tracemalloc.start()
    try:
        for output in (5.0, 6.0, 8.0):
            node.assign(1)
            node.put(0.0, Job(0, 0.0, 100, output, ()))
        loop.run()
    finally:
        tracemalloc.stop()
    assert node.running == 0
    assert sizes[24_000] - sizes[4_000] < 20_000
