from dataclasses import replace

import numpy as np
import pytest

from planner.model.traffic import Lengths
from planner.model.workload import diurnal
from planner.simulator.trials import Setting
from planner.simulator.world import simulate
from planner.solve.controller import Controller, ControllerConfig, Model, Move, Observation, imbalance_factor
from planner.solve.goals import Rule
from tests.planner.simulator.systems import case_study_scenario


@pytest.fixture
def model(case_study) -> Model:
    profile = case_study.profile
    decode = profile.decode_on("h20x8")
    return Model(
        local=profile.prefill_on("h20x8"),
        remote=profile.prefill_on("h200x8"),
        kv=profile.kv_size(),
        num_prfaas=4,
        egress_bytes_per_s=12.5e9,
        decode_s_per_token=decode.full_step_s / decode.max_running,
    )


@pytest.fixture(scope="session")
def prompts(case_study) -> list[float]:
    return list(case_study.workload.lengths.sample(600, np.random.default_rng(0)))


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
    assert effects.convert is Move.TO_PREFILL
    assert effects.gain > 0.05
    assert effects.threshold_tokens is not None
    other = Controller(config(), model).on_tick(seen(60, prompts, num_prefill=6, num_decode=2))
    assert other.convert is Move.TO_DECODE


def test_after_a_conversion_it_waits(model, prompts):
    controller = Controller(config(cooldown_s=600), model)
    assert controller.on_tick(seen(60, prompts, num_prefill=1, num_decode=7)).convert
    assert controller.on_tick(seen(120, prompts, num_prefill=2, num_decode=6)).convert is None
    assert controller.on_tick(seen(700, prompts, num_prefill=2, num_decode=6)).convert is Move.TO_PREFILL


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
    effects = Controller(config(), model).on_tick(seen(60, prompts, threshold_tokens=60_000))
    assert effects.convert is None
    assert effects.threshold_tokens == pytest.approx(19_684, rel=0.15)


def test_the_imbalance_factor_ignores_outliers():
    assert imbalance_factor([1.0] * 20, [1.0] * 20) == 1.0
    assert imbalance_factor([0.0] * 10, [1.0] * 9 + [1e9]) == 2.0
    assert imbalance_factor([], []) == 1.0


def test_mooncakes_rule_follows_the_loads(model, prompts):
    def decided(prefill: float, decode: float):
        controller = Controller(config(rule=Rule.IMBALANCE), model)
        return controller.on_tick(seen(60, prompts, prefill_loads=[prefill] * 4, decode_loads=[decode] * 4)).convert

    assert decided(0.2, 1.5) is Move.TO_DECODE
    assert decided(3.0, 0.2) is Move.TO_PREFILL
    assert decided(1.0, 1.0) is None


def day(case_study) -> tuple[list[Lengths], list[float], list[float]]:
    """Twelve bins: long prompts and short answers by day, the other way round by night."""
    law = case_study.workload.lengths.thinned(500)
    short = Lengths(law.tokens * 0.35, law.weights)
    laws = [law] * 6 + [short] * 6
    return laws, [512.0] * 6 + [1800.0] * 6, [2.6] * 6 + [2.6] * 6


@pytest.mark.parametrize("rule", list(Rule))
def test_it_follows_a_day_without_oscillating(case_study, rule):
    laws, outputs, rates = day(case_study)
    trace = diurnal(laws, outputs, rates, 500.0, np.random.default_rng(0))
    still = case_study_scenario(case_study, Setting(19_400, 0.0, 4, 4))
    ruled = replace(still, controller=ControllerConfig(rule=rule, tick_s=60, window_s=600, cooldown_s=300))
    fixed, found = simulate(still, trace), simulate(ruled, trace)
    splits = [row["num_prefill"] for row in found.timeline]
    moves = int(np.abs(np.diff(splits)).sum())
    assert splits[-1] < 4  # the night needs decode nodes
    assert moves <= 12
    assert float(np.nanmean(found.e2e_s)) < float(np.nanmean(fixed.e2e_s))
