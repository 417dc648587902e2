import itertools
from dataclasses import replace

import numpy as np
import pytest

from planner.model.traffic import Lengths
from planner.model.workload import Trace, diurnal
from planner.simulator.scenario import Scenario
from planner.simulator.trials.trial import TrialSetting
from planner.simulator.world import simulate
from planner.solve.control.controller import (
    Controller,
    ControllerConfig,
    HardwareModel,
    Observation,
    RoleMove,
    imbalance_factor,
)
from planner.solve.control.judge import MOST_GAIN
from planner.solve.goals import SplitRule
from tests.planner.simulator.systems import case_study_scenario


@pytest.fixture(scope="session")
def model(case_study) -> HardwareModel:
    profile = case_study.profile
    decode = profile.decode_on("h20x8")
    return HardwareModel(
        local=profile.prefill_on("h20x8"),
        remote=profile.prefill_on("h200x8"),
        kv=profile.kv_size(),
        num_prfaas=4,
        egress_bytes_per_s=12.5e9,
        decode_s_per_token=decode.full_step_s / decode.max_running,
    )


@pytest.fixture(scope="session")
def prompts(case_study) -> list[float]:
    return list(case_study.workload.lengths.sample(3000, np.random.default_rng(0)))


def seen(at_s: float, prompts, **fields) -> Observation:
    defaults = {
        "uncached_tokens": prompts, "output_tokens": [1024.0] * len(prompts), "num_prefill": 3, "num_decode": 5,
        "threshold_tokens": 19_400, "prefill_loads": [1.0], "decode_loads": [0.8],
    }  # fmt: skip
    return Observation(at_s=at_s, **defaults | fields)


def config(**fields) -> ControllerConfig:
    return ControllerConfig(**{"warmup_s": 0.0} | fields)


def test_a_good_plan_is_left_alone(model, prompts):
    effects = Controller(config(), model).on_tick(seen(60, prompts))
    assert effects.convert is None
    assert effects.threshold_tokens is None or effects.threshold_tokens == pytest.approx(19_684, rel=0.15)


def test_a_bad_split_is_changed_by_one_node(model, prompts):
    controller = Controller(config(), model)
    effects = controller.on_tick(seen(60, prompts, num_prefill=1, num_decode=7))
    assert effects.convert is RoleMove.TO_PREFILL
    assert effects.gain > 0.05
    assert effects.threshold_tokens is not None
    other = Controller(config(), model).on_tick(seen(60, prompts, num_prefill=6, num_decode=2))
    assert other.convert is RoleMove.TO_DECODE


def test_after_a_conversion_it_waits(model, prompts):
    controller = Controller(config(cooldown_s=600), model)
    assert controller.on_tick(seen(60, prompts, num_prefill=1, num_decode=7)).convert
    assert controller.on_tick(seen(90, prompts, num_prefill=1, num_decode=7)).convert  # it was not carried out
    controller.converted(90)
    assert controller.on_tick(seen(120, prompts, num_prefill=2, num_decode=6)).convert is None
    assert controller.on_tick(seen(700, prompts, num_prefill=2, num_decode=6)).convert is RoleMove.TO_PREFILL


def test_a_small_gain_is_not_worth_a_conversion(model, prompts):
    controller = Controller(config(hysteresis=0.5), model)
    assert controller.on_tick(seen(60, prompts, num_prefill=2, num_decode=6)).convert is None


def test_cold_samples_are_not_believed(model, prompts):
    controller = Controller(config(warmup_s=100), model)
    assert "warming up" in controller.on_tick(seen(60, prompts, num_prefill=1, num_decode=7)).diagnosis
    assert controller.on_tick(seen(120, prompts, num_prefill=1, num_decode=7)).convert
    assert "under way" in controller.on_tick(seen(180, prompts, converting=1)).diagnosis
    assert "warming up" in controller.on_tick(seen(240, prompts, num_prefill=2, num_decode=6)).diagnosis


def test_too_few_requests_say_nothing(model):
    assert "too few" in Controller(config(), model).on_tick(seen(60, [100.0] * 5)).diagnosis


def test_a_far_off_threshold_is_moved_without_a_conversion(model, prompts):
    effects = Controller(config(threshold_step=4.0), model).on_tick(seen(60, prompts, threshold_tokens=60_000))
    assert effects.convert is None
    assert effects.threshold_tokens == pytest.approx(19_684, rel=0.15)
    assert "pd_prefill binds" in effects.diagnosis


def test_a_threshold_goes_there_in_steps(model, prompts):
    controller, threshold, steps = Controller(config(), model), 1e9, []
    for tick in range(1, 10):
        effects = controller.on_tick(seen(60 * tick, prompts, threshold_tokens=threshold))
        if effects.threshold_tokens is not None:
            threshold = effects.threshold_tokens
            steps.append(threshold)
    assert steps[0] == pytest.approx(max(prompts) / 2)  # longer than any prompt is all the same
    assert all(later >= earlier / 2 for earlier, later in itertools.pairwise(steps))
    assert steps[-1] == pytest.approx(19_684, rel=0.15)


def test_prompts_of_one_length_are_shared_out(model):
    effects = Controller(config(threshold_step=4.0), model).on_tick(seen(60, [27_486.0] * 400, threshold_tokens=19_400))
    assert effects.threshold_tokens == 27_486
    assert effects.tie_share == pytest.approx(1 - 0.778, abs=0.01)
    left = Controller(config(), model).on_tick(
        seen(60, [27_486.0] * 400, threshold_tokens=27_486, tie_share=effects.tie_share)
    )
    assert left.threshold_tokens is None


def test_a_gap_between_lengths_is_one_step(model):
    """Nothing lies between 6,400 and 51,200 tokens: half the way would change nothing, for ever."""
    found = seen(60, [6_400.0] * 300 + [51_200.0] * 20, threshold_tokens=51_200)
    effects = Controller(config(), model).on_tick(found)
    assert effects.threshold_tokens == 6_400


def test_it_plans_with_what_is_left_of_prfaas_and_of_the_link(model, prompts):
    whole = Controller(config(threshold_step=16.0), model).on_tick(seen(60, prompts, threshold_tokens=2_000))
    half = Controller(config(threshold_step=16.0), model).on_tick(
        seen(60, prompts, threshold_tokens=2_000, num_prfaas=2)
    )
    thin = Controller(config(threshold_step=16.0), model).on_tick(
        seen(60, prompts, threshold_tokens=2_000, egress_bytes_per_s=0.25e9)
    )
    assert whole.threshold_tokens is not None
    assert half.threshold_tokens is not None
    assert thin.threshold_tokens is not None
    assert whole.threshold_tokens < half.threshold_tokens < thin.threshold_tokens
    assert "egress binds" in thin.diagnosis


def test_answers_end_when_they_do(model, prompts):
    controller = Controller(config(), model)
    assert "no answer" in controller.on_tick(seen(60, prompts, output_tokens=[])).diagnosis
    assert controller.on_tick(seen(120, [], output_tokens=[1024.0], num_prefill=1, num_decode=7)).convert


# Draws of chance: always the same ones, as a law of large numbers has its exceptions.
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_nothing_oscillates_under_a_stationary_load(case_study, model, seed, rate):
    """From the best plan there is: every move is away from it, so few are allowed, and none of a node."""
    rng, law = np.random.default_rng(seed), case_study.workload.lengths
    controller, threshold, turns, direction = Controller(config(), model), 19_684.0, 0, 0.0
    for tick in range(1, 31):
        prompts = list(law.sample(int(rng.poisson(rate * 60)), rng))
        effects = controller.on_tick(seen(60.0 * tick, prompts, threshold_tokens=threshold))
        assert effects.convert is None
        if effects.threshold_tokens is not None:
            step = float(np.sign(effects.threshold_tokens - threshold))
            turns += step == -direction
            direction, threshold = step, effects.threshold_tokens
            assert threshold == pytest.approx(19_684, rel=0.3)
    assert turns <= 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("day_first", [True, False])
def test_a_shift_is_followed_with_one_overshoot_at_most(case_study, model, seed, day_first):
    rng, law = np.random.default_rng(seed), case_study.workload.lengths
    scales = (1.0, 0.35) if day_first else (0.35, 1.0)
    controller, threshold, path = Controller(config(min_prefill=3, min_decode=5), model), 19_684.0, []
    for tick in range(1, 61):
        prompts = list(law.sample(180, rng) * scales[tick > 30])
        effects = controller.on_tick(seen(60.0 * tick, prompts, threshold_tokens=threshold))
        if effects.threshold_tokens is not None:
            assert threshold / 2 <= effects.threshold_tokens <= threshold * 2
            threshold = effects.threshold_tokens
        if tick >= 30:
            path.append(threshold)
    signs = [step for step in np.sign(np.diff(path)) if step]
    assert signs
    assert sum(one != other for one, other in itertools.pairwise(signs)) <= 1
    assert (path[-1] < path[0]) == day_first


def test_the_imbalance_factor_ignores_outliers():
    assert imbalance_factor([1.0] * 20, [1.0] * 20) == 1.0
    assert imbalance_factor([0.0] * 10, [1.0] * 9 + [1e9]) == 2.0
    assert imbalance_factor([], []) == 1.0


def test_mooncakes_rule_follows_the_loads(model, prompts):
    def decided(prefill: float, decode: float):
        controller = Controller(config(rule=SplitRule.IMBALANCE), model)
        return controller.on_tick(seen(60, prompts, prefill_loads=[prefill] * 4, decode_loads=[decode] * 4)).convert

    assert decided(0.2, 1.5) is RoleMove.TO_DECODE
    assert decided(3.0, 0.2) is RoleMove.TO_PREFILL
    assert decided(1.0, 1.0) is None


def day(case_study) -> tuple[list[Lengths], list[float], list[float]]:
    """Twelve bins: long prompts and short answers by day, the other way round by night."""
    law = case_study.workload.lengths.thinned(500)
    short = Lengths(law.tokens * 0.35, law.weights)
    laws = [law] * 6 + [short] * 6
    return laws, [512.0] * 6 + [1800.0] * 6, [2.6] * 6 + [2.6] * 6


@pytest.fixture(scope="module")
def still_day(case_study) -> tuple[Scenario, Trace, float]:
    """Nodes that stay as they are, a day, and its mean time to the last token then."""
    laws, outputs, rates = day(case_study)
    trace = diurnal(laws, outputs, rates, 300.0, np.random.default_rng(0))
    still = case_study_scenario(case_study, TrialSetting(19_400, 0.0, 4, 4))
    return still, trace, float(np.nanmean(simulate(still, trace).e2e_s))


@pytest.mark.parametrize("rule", list(SplitRule))
def test_it_follows_a_day_without_oscillating(still_day, rule):
    still, trace, fixed_e2e_s = still_day
    found = simulate(replace(still, controller=ControllerConfig(rule=rule, window_s=600, cooldown_s=300)), trace)
    splits = [row["num_prefill"] for row in found.timeline]
    moves = int(np.abs(np.diff(splits)).sum())
    assert splits[-1] < 4  # the night needs decode nodes
    assert moves <= 12
    assert float(np.nanmean(found.e2e_s)) < fixed_e2e_s


def test_what_is_gained_over_nothing_is_a_number(model, prompts):
    effects = Controller(config(), model).on_tick(seen(60, prompts, num_prefill=0, num_decode=8))
    assert effects.convert is RoleMove.TO_PREFILL
    assert effects.gain == MOST_GAIN


def test_to_judge_by_one_request_is_refused():
    with pytest.raises(ValueError, match="min_requests=1: must be at least 2"):
        config(min_requests=1)
