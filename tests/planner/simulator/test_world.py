"""The simulator against closed forms, and against itself."""

import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.profile import DecodeProfile, Floats, KvSize, PrefillCurve
from planner.model.queueing import erlang_c
from planner.model.workload import Trace, poisson, read_trace
from planner.simulator.outcome import confidence_95
from planner.simulator.policies import Estimates
from planner.simulator.scenario import LineLimits, Pool, Scenario, Targets, Wire
from planner.simulator.trials.trial import TrialSetting, from_workload, judged
from planner.simulator.world import simulate
from planner.solve.plan import make_plan
from planner.solve.problem import SolveOptions
from tests.planner.simulator.systems import PUBLISHED, arrivals, case_study_scenario, queue_of, with_link
from tests.planner.traces import MOONCAKE

pytestmark = pytest.mark.long


def exponential(rng: np.random.Generator, size: int) -> Floats:
    return np.maximum(1.0, np.round(rng.exponential(1000, size)))


def two_lengths(rng: np.random.Generator, size: int) -> Floats:
    return np.where(rng.random(size) < 0.2, 3000.0, 500.0)


@dataclass(frozen=True, slots=True)
class Queue:
    """Poisson arrivals at servers that prefill a thousand tokens per second, and the mean wait by its closed form."""

    servers: int
    load: float
    lengths: Callable[[np.random.Generator, int], Floats | float]
    mean_wait_s: float

    def trace(self, size: int, seed: int) -> Trace:
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / (self.load * self.servers), size))
        return arrivals(times, self.lengths(rng, size))

    def waits(self, trace: Trace) -> Floats:
        """Who comes first is served first, by the server that is free first (Kiefer and Wolfowitz, 1955)."""
        free, waits = [0.0] * self.servers, []
        for arrived, tokens in zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), strict=True):
            begins = max(arrived, heapq.heappop(free))
            heapq.heappush(free, begins + tokens * 1e-3)
            waits.append(begins - arrived)
        return np.array(waits)


QUEUES = {
    "M/M/1": Queue(1, 0.5, exponential, erlang_c(1, 0.5) / 0.5),
    "M/M/3": Queue(3, 0.8, exponential, erlang_c(3, 2.4) / (3 * 0.2)),
    "M/D/1": Queue(1, 0.7, lambda rng, size: 1000.0, 0.7 / (2 * 0.3)),
    "M/G/1": Queue(1, 0.6, two_lengths, 0.6 * (0.2 * 9 + 0.8 * 0.25) / (2 * (1 - 0.6))),  # Pollaczek–Khinchine
}


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_each_request_waits_as_long_as_in_the_queue(queue):
    trace = queue.trace(600, 0)
    found = simulate(queue_of(queue.servers, estimates=Estimates.EXACT), trace)
    assert found.prefill_wait_s == pytest.approx(queue.waits(trace), abs=1e-9)
    assert found.prefill_wait_s.max() > 2 * queue.mean_wait_s


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_queues_wait_as_long_as_the_closed_forms_say(queue):
    """The first fifth of each run is left out: it begins with an empty queue."""
    means = [float(queue.waits(queue.trace(2000, seed))[400:].mean()) for seed in range(8)]
    half = confidence_95(means)
    assert np.mean(means) == pytest.approx(queue.mean_wait_s, abs=2 * half)
    assert half < 0.25 * queue.mean_wait_s


def test_learned_times_make_three_servers_wait_little_longer_than_true_ones():
    queue = QUEUES["M/M/3"]
    traces = [queue.trace(1000, seed) for seed in range(3)]
    learned = np.mean([simulate(queue_of(3), trace).prefill_wait_s for trace in traces])
    assert 1.0 <= learned / np.mean([queue.waits(trace) for trace in traces]) < 1.15


def test_zero_load_ttft_is_the_models(case_study):
    plan = make_plan(case_study, SolveOptions.as_in_paper())
    report = judged(case_study_scenario(case_study), from_workload(case_study, 0.01, 4000), [0])
    assert report["ttft_mean_s"] == pytest.approx(plan.ttft_mean_s, rel=0.02)
    assert report["ttft_p90_s"] == pytest.approx(plan.ttft_p90_s, rel=0.03)
    law = case_study.workload.lengths
    trace = poisson(law, 1024, 1e-4, 500, np.random.default_rng(3))
    found = simulate(case_study_scenario(case_study), trace)
    profile, lengths = case_study.profile, trace.prompt_tokens
    remote = profile.prefill_on("h200x8").of(lengths) + profile.kv_size().of(lengths) / 12.5e9
    expected = np.where(lengths > 19_400, remote, profile.prefill_on("h20x8").of(lengths))
    assert found.ttft_s == pytest.approx(expected, abs=1e-6)


def test_the_step_of_a_first_token_counts_where_it_is_asked_for(case_study):
    plain = case_study_scenario(case_study)
    step_s = case_study.profile.decode_on("h20x8").full_step_s
    alone = poisson(case_study.workload.lengths, 1024, 1e-4, 50, np.random.default_rng(3))
    busy = alone.faster(2e4)
    for trace, steps in ((alone, 1.0), (busy, 1.5)):
        more_s = simulate(replace(plain, counts_first_step=True), trace).ttft_s - simulate(plain, trace).ttft_s
        assert set(np.round(more_s / step_s, 6)) <= {1.0, 1.5}
        assert np.median(more_s) == pytest.approx(steps * step_s)


def test_below_saturation_utilisation_and_throughput_are_the_closed_forms(case_study):
    plan = make_plan(case_study, SolveOptions.as_in_paper())
    rate = 0.7 * 3.163
    trace = poisson(case_study.workload.lengths, 1024, rate, 12_000, np.random.default_rng(0))
    found = simulate(case_study_scenario(case_study), trace)
    report = found.report()
    assert report["throughput_req_per_s"] == pytest.approx(len(trace) / trace.span_s, rel=1e-9)
    # Against the trace's own lengths: the sample, not the law, is what was served.
    profile, lengths = case_study.profile, trace.prompt_tokens
    far = lengths > 19_400
    prfaas = profile.prefill_on("h200x8").of(lengths[far]).sum() / 4 / trace.span_s
    pd = profile.prefill_on("h20x8").of(lengths[~far]).sum() / 3 / trace.span_s
    decode = len(trace) * 1024 * profile.decode_on("h20x8").full_step_s / (5 * 20) / trace.span_s
    egress = profile.kv_size().of(lengths[far]).sum() / 12.5e9 / trace.span_s
    expected = {"prfaas_compute": prfaas, "pd_prefill": pd, "pd_decode": decode, "egress": egress}
    assert report["utilisation"] == pytest.approx(expected, rel=0.01)
    assert report["egress_mean_gbps"] == pytest.approx(egress * 100, rel=0.01)
    assert plan.utilisation["pd_decode"] * 0.7 * 3.163 / 3.2406 == pytest.approx(decode, rel=0.02)


def test_ttft_under_load_is_near_the_queueing_formula(case_study):
    plan = make_plan(case_study, SolveOptions.as_in_paper())
    report = judged(case_study_scenario(case_study), from_workload(case_study, 0.8 * 3.24, 12_000), range(2))
    assert report["ttft_mean_s"] == pytest.approx(3.55, abs=0.24)  # four standard deviations between seeds
    assert report["ttft_mean_s"] == pytest.approx(plan.loaded_ttft_mean_s, rel=0.08)
    assert report["ttft_p90_s"] == pytest.approx(plan.loaded_ttft_p90_s, rel=0.08)


def test_a_link_is_shared_and_its_capacity_changes():
    found = simulate(with_link([(0.0, 100.0), (10.0, 50.0)]), arrivals([0.0, 0.0, 9.0], 500.0))
    # Two flows at 50 B/s have 50 B left each at 9. Then three share 100 B/s for a second; from 10 on they share 50 B/s.
    assert found.ttft_s == pytest.approx([11.0, 11.0, 20.0 - 9.0], abs=0.01)
    assert found.egress_bytes[1.0].sum() <= 1500


def test_a_sender_gets_no_more_than_its_part_of_a_line():
    one = with_link([(0.0, 100.0)])
    parts = replace(one, wires=[replace(wire, senders=4) for wire in one.wires])
    alone = simulate(parts, arrivals([0.0, 100.0], 500.0))
    assert alone.ttft_s == pytest.approx([20.0, 20.0], abs=0.01)  # 25 B/s, though the rest of the line is free
    assert alone.egress_bytes[1.0][:2] == pytest.approx([25, 25])
    assert alone.sent_bytes == pytest.approx(1000)
    both = simulate(parts, arrivals([0.0] * 8, 500.0)).ttft_s
    assert both.max() >= simulate(one, arrivals([0.0] * 8, 500.0)).ttft_s.max() - 0.01
    with pytest.raises(InputError, match="senders=0"):
        replace(one.wires[0], senders=0)


def test_egress_windows_hold_every_byte():
    trace = arrivals(np.arange(0.0, 50.0, 5.0), 120.0)
    found = simulate(with_link([(0.0, 100.0)]), trace)
    assert found.egress_bytes[1.0].sum() == pytest.approx(9 * 120)  # the last leaves after the horizon
    assert found.egress_bytes[1.0][:2] == pytest.approx([100, 20])
    assert found.egress_bytes[10.0][0] == pytest.approx(240)


def test_layerwise_streaming_hides_the_transfer(case_study):
    trace = poisson(case_study.workload.lengths, 1024, 0.01, 300, np.random.default_rng(0))
    after = simulate(case_study_scenario(case_study, tail_share=1.0), trace).report()
    while_computing = simulate(case_study_scenario(case_study, tail_share=1 / 60), trace).report()
    assert while_computing["ttft_mean_s"] < after["ttft_mean_s"] - 0.02


def test_tbt_counts_how_long_a_batch_stands_still_for_a_prompt():
    decode = DecodeProfile(max_running=4, step_s=0.5)
    pool = replace(queue_of(1).pools[0], num_prefill=0, decode=decode)
    prompts, outputs = np.array([1000.0, 2000.0]), np.array([20.0, 1.0])
    found = simulate(queue_of(1, pools=[pool]), arrivals([0.0, 3.0], prompts, outputs))
    # The first is computed for 1 s and answered in 10 s; the second has its batch stand still for 2 s.
    assert found.e2e_s[0] == pytest.approx(1 + 10 + 2)
    assert found.tbt_s[0] == pytest.approx((2 * 0.5 + 2) / 2)
    assert found.tbt_s[1] == pytest.approx(0.5)


def test_tbt_is_the_mean_of_the_longest_tenth():
    decode = DecodeProfile(max_running=10, step_s=0.0, step_s_per_request=1.0)
    pool = replace(queue_of(1).pools[0], decode=decode)
    # Alone a step takes 1 s. The second joins for 5 tokens, with 2 s steps, then the first goes on alone.
    found = simulate(queue_of(1, pools=[pool]), arrivals([0.0, 10.0], 1.0, np.array([100.0, 5.0])))
    assert found.tbt_s[1] == pytest.approx(2.0)
    assert found.tbt_s[0] == pytest.approx((5 * 2 + 5 * 1) / 10, abs=0.06)
    assert found.e2e_s[0] == pytest.approx(100 + 5, abs=0.01)


def mooncake(placer: str, **fields):
    pool = replace(queue_of(4).pools[0], cache_bytes=2e6)
    policy = RoutingPolicy(threshold_tokens=1e9, placement=PlacementPolicy(fetch_bytes_per_s=1e9))
    return queue_of(4, pools=[pool], placer=placer, routing=policy, **fields)


@pytest.mark.rotating
@pytest.mark.parametrize("placer", ["random", "least_loaded", "cache_aware", "kvcache_centric"])
@pytest.mark.parametrize("admission", list(AdmissionPolicy))
def test_every_request_ends_exactly_once(placer, admission):
    trace = read_trace(MOONCAKE).faster(0.2)
    found = simulate(mooncake(placer, admission=admission, targets=Targets(ttft_s=40.0)), trace)
    report = found.report()
    assert report["completed"] + report["rejected"] == report["requests"] == len(trace)
    assert (found.cached_tokens <= found.prompt_tokens).all()


def test_rejection_policies_are_in_mooncakes_order():
    pool = Pool(
        name="pd", kind=queue_of(1).pools[0].kind, num_prefill=14, num_decode=2, prefill=queue_of(1).pools[0].prefill,
        decode=DecodeProfile(max_running=20, step_s=0.05),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    size, rate = 2000, 8.0  # twice what decode can take, 1.7 times what prefill can
    prompts, outputs = rng.uniform(1000, 5000, size).round(), 1 + rng.exponential(200, size).round()
    trace = arrivals(np.cumsum(rng.exponential(1 / rate, size)), prompts, outputs)
    seen = {
        policy: simulate(
            queue_of(1, pools=[pool], admission=policy, targets=Targets(ttft_s=12.0, tbt_s=0.1)), trace
        ).report()
        for policy in AdmissionPolicy
    }
    all_, baseline, early, prediction = seen.values()
    assert (all_["rejected"], all_["wasted_prefill_s"]) == (0, 0)
    assert all_["goodput_req_per_s"] < 0.2 * baseline["goodput_req_per_s"]
    assert baseline["wasted_prefill_s"] > 1000
    assert early["wasted_prefill_s"] == prediction["wasted_prefill_s"] == 0
    assert prediction["rejected"] < min(early["rejected"], baseline["rejected"])
    assert prediction["goodput_req_per_s"] > baseline["goodput_req_per_s"]


def crowd(size: int = 1500, rate: float = 8.0) -> Trace:
    """Twice what the decode nodes of `counter` can take."""
    rng = np.random.default_rng(3)
    outputs = 1 + rng.exponential(200, size).round()
    return arrivals(np.cumsum(rng.exponential(1 / rate, size)), rng.uniform(200, 1000, size).round(), outputs)


def counter(**fields) -> Scenario:
    pool = Pool(
        name="pd", kind=queue_of(1).pools[0].kind, num_prefill=8, num_decode=2, prefill=queue_of(1).pools[0].prefill,
        decode=DecodeProfile(max_running=20, step_s=0.05),
    )  # fmt: skip
    classes = {
        ServiceClass(name="interactive", ttft_s=20.0, priority=10): 0.3,
        ServiceClass(name="standard", ttft_s=60.0): 0.5,
        ServiceClass(name="batch", priority=-5, deadline_s=200.0, max_load=0.7): 0.2,
    }
    return queue_of(1, pools=[pool], classes=classes, **fields)


def test_in_line_the_higher_class_is_served_and_the_line_is_bounded():
    line = LineLimits(landings=4, max_waiting=64, room_s=60.0)
    endless = simulate(counter(), crowd()).report()
    found = simulate(counter(line=line), crowd()).report()
    assert found["completed"] + found["rejected"] == found["requests"]
    assert found["ttft_p99_s"] <= 60.0 + 10.0 < endless["ttft_p99_s"]
    assert found["kept_by_class"]["interactive"] == endless["completed_by_class"]["interactive"]
    assert found["kept_by_class"]["interactive"] > 4 * endless["kept_by_class"]["interactive"]
    assert set(found["rejected_by_reason"]) == {"no_room", "displaced"}


def test_a_modest_class_leaves_room_at_the_door():
    found = simulate(counter(admission=AdmissionPolicy.PREDICTION), crowd()).report()
    shares = {name: found["completed_by_class"][name] / share for name, share in
              (("interactive", 0.3), ("standard", 0.5), ("batch", 0.2))}  # fmt: skip
    assert shares["batch"] < 0.5 * shares["interactive"]
    assert found["kept_by_class"] == found["completed_by_class"]


def test_the_same_seed_gives_the_same_bytes():
    trace = read_trace(MOONCAKE).head(150)
    one, two = (json.dumps(simulate(mooncake("random"), trace, 7).report()) for _ in range(2))
    assert one == two
    other = simulate(mooncake("random"), trace, 8).report()
    assert json.dumps(other) != one


def test_caches_are_found_and_shorten_prefill():
    trace = read_trace(MOONCAKE).faster(0.1)
    cached = simulate(mooncake("kvcache_centric"), trace).report()
    pool = replace(queue_of(4).pools[0], cache_bytes=0.0)
    bare = simulate(queue_of(4, pools=[pool]), trace).report()
    assert cached["hit_ratio"] > 0.02
    assert bare["hit_ratio"] == 0
    assert cached["utilisation"]["pd_prefill"] < bare["utilisation"]["pd_prefill"]


def test_placement_policies_are_in_mooncakes_order():
    trace = read_trace(MOONCAKE).spread(np.random.default_rng(0)).faster(0.08)
    order = ["kvcache_centric", "cache_aware", "least_loaded", "random"]
    means = [simulate(mooncake(placer), trace).report()["ttft_mean_s"] for placer in order]
    assert means == sorted(means)
    assert means[0] < means[2] < means[3]


def test_hybrid_states_hit_less_than_attention_alone():
    trace = read_trace(MOONCAKE)
    hybrid = simulate(mooncake("cache_aware", kv=KvSize(bytes_per_token=1, fixed_bytes=10_000)), trace).report()
    attention = simulate(mooncake("cache_aware"), trace).report()
    assert 0 < hybrid["hit_ratio"] <= attention["hit_ratio"]


def test_one_decode_node_does_everything_when_nobody_prefills():
    pool = Pool(
        name="pd", kind=queue_of(1).pools[0].kind, num_prefill=0, num_decode=1, prefill=queue_of(1).pools[0].prefill,
        decode=DecodeProfile(max_running=4, step_s=0.01),
    )  # fmt: skip
    found = simulate(queue_of(1, pools=[pool]), arrivals([0.0], 2000.0, 10.0))
    assert found.ttft_s[0] == pytest.approx(2.0)
    assert found.routes == {"decode no_prefill": 1}


# Room for a conversation many times over; making the pages of a node's 800 GB takes seconds.
CACHE_GB = 50.0


def conversation(turns: int, first: int = 30_000, new: int = 60, every_s: float = 60.0, block: int = 16) -> Trace:
    """One conversation: each prompt is the one before, its answer and some more; partial last blocks are never shared."""
    prompts = [first + new * turn for turn in range(turns)]
    return Trace(
        name="conversation",
        arrival_s=np.arange(turns) * every_s,
        prompt_tokens=np.array(prompts, dtype=np.float64),
        output_tokens=np.full(turns, 50.0),
        blocks=tuple((*range(n // block), 10_000_000 + turn) for turn, n in enumerate(prompts)),
        block_size=block,
    )


def test_a_conversation_does_not_stay_remote_because_it_began_there(case_study):
    """Six turns of 60 new tokens after a long prompt: the decode node at home holds all the rest."""
    trace, kv = conversation(7), case_study.profile.kv_size()
    scenario = case_study_scenario(case_study, cache_gb=CACHE_GB, increment_tokens=1_024)
    found = simulate(scenario, trace)
    assert found.routes == {"decode held": 6, "remote long": 1}
    assert found.egress_bytes[1.0].sum() == pytest.approx(kv(30_000))
    assert found.ttft_s[1:].max() < found.ttft_s[0]


def test_a_prefix_on_a_decode_node_is_fetched_by_a_prefill_node_of_its_cluster(case_study):
    found = simulate(case_study_scenario(case_study, cache_gb=CACHE_GB, fetch_gbps=100.0), conversation(7))
    assert found.routes == {"local short": 6, "remote long": 1}


def test_a_decode_node_is_sent_only_what_it_lacks(case_study):
    trace, kv = conversation(4, new=25_000), case_study.profile.kv_size()
    found = simulate(case_study_scenario(case_study, cache_gb=CACHE_GB), trace)
    assert found.routes["remote long"] == 4
    had = [0, *((int(n) + 50) // 16 * 16 for n in trace.prompt_tokens[:-1])]
    lacking = [kv(n) - kv.bytes_per_token * have for n, have in zip(trace.prompt_tokens, had, strict=True)]
    # The last one leaves after the horizon, which is its arrival.
    assert found.egress_bytes[1.0].sum() == pytest.approx(sum(lacking[:-1]), rel=1e-6)


def test_a_batch_stands_still_while_its_node_computes_a_prompt(case_study):
    """The answer that is under way is longer by what the GPUs spent on the prompt, no more and no less."""
    trace = replace(conversation(2, every_s=10.0), output_tokens=np.array([1_000.0, 10.0]))
    scenario = case_study_scenario(case_study, cache_gb=CACHE_GB, increment_tokens=1_024)
    found, alone = simulate(scenario, trace), simulate(scenario, trace.head(1))
    curve = case_study.profile.prefill_on("h20x8")
    assert found.routes == {"decode held": 1, "remote long": 1}
    assert found.e2e_s[0] - alone.e2e_s[0] == pytest.approx(curve(30_060) - curve(30_000), rel=1e-6)


def test_settings_are_what_runs(case_study):
    scenario = case_study_scenario(case_study, TrialSetting(20_000, 0.25, 2, 6))
    assert [(pool.num_prefill, pool.num_decode) for pool in scenario.pools] == [(4, 0), (2, 6)]
    assert (scenario.routing.threshold_tokens, scenario.routing.tie_share) == (20_000, 0.25)
    assert case_study_scenario(case_study, PUBLISHED).routing.tie_share == 1.0


def test_a_slow_cluster_is_asked_again_now_and_then_as_by_gateways():
    def far(name: str, s_per_token: float) -> Pool:
        curve = PrefillCurve(coefficients=(0.0, s_per_token, 0.0), valid_tokens=(0, 1e9))
        return Pool(name=name, kind=ClusterKind.PRFAAS, num_prefill=1, prefill=curve)

    home = replace(queue_of(1).pools[0], num_prefill=0)
    wires = [Wire(source=name, destination="pd", capacity=[(0.0, 1e12)]) for name in ("quick", "slow")]
    scenario = queue_of(
        1, pools=[far("quick", 2e-4), far("slow", 1e-3), home], wires=wires, routing=RoutingPolicy(threshold_tokens=0)
    )
    found = simulate(scenario, arrivals(np.arange(400.0) * 20.0, 5000.0), 0)
    quick, slow = (found.errors["prefill", name].samples for name in ("quick", "slow"))
    assert 10 < slow < quick / 3


@pytest.mark.parametrize(("cache_tokens", "beside"), [(26_000, 1), (41_000, 2)])
def test_a_decode_node_without_memory_for_a_prompt_is_passed_over(cache_tokens, beside):
    """The second prompt's prefix is on the node that decodes the first one; without room for the rest, it goes elsewhere."""
    decode = DecodeProfile(max_running=10, step_s=0.01, step_s_per_request=1e-4)
    pool = replace(queue_of(1).pools[0], num_decode=2, cache_bytes=16.0 * cache_tokens, decode=decode)
    first = tuple(range(1_000))
    trace = Trace(
        name="two", arrival_s=np.array([0.0, 30.0]), prompt_tokens=np.array([16_000.0, 24_000.0]),
        output_tokens=np.array([5_000.0, 10.0]), blocks=(first, (*first[:500], *range(5_000, 6_000))), block_size=16,
    )  # fmt: skip
    found = simulate(queue_of(1, pools=[pool], kv=KvSize(bytes_per_token=16)), trace)
    assert found.tbt_s[1] == pytest.approx(decode.at(beside))
