import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.coding.choice import (
    BACKLOG_ENTER_S,
    BACKLOG_LEAVE_S,
    DWELL_S,
    FORGET_S,
    LEAST_CORES,
    PRIORS,
    SWITCH_GAIN,
    Chooser,
    CodingPolicy,
    Compression,
    CpuMeter,
    Estimate,
    Quantisation,
    QuantiseWhen,
    Situation,
    choose,
    plain_bytes_per_s,
)
from transport.coding.codec import Codec, CodedPart

ALL = Codec.ZSTD | Codec.INT8 | Codec.FP8
AUTO = CodingPolicy(compression=Compression.AUTO)
SLOW = Situation(link_bytes_per_s=10e6, backlog_bytes=100 << 20, idle_cores=2.0)
IDLE = Situation(link_bytes_per_s=10e6, backlog_bytes=0, idle_cores=2.0)

policies = st.builds(
    CodingPolicy,
    compression=st.sampled_from(Compression),
    quantisation=st.sampled_from(Quantisation),
    quantise_when=st.sampled_from(QuantiseWhen),
)
masks = st.integers(0, 7).map(Codec)
situations = st.builds(
    Situation,
    link_bytes_per_s=st.floats(0, 1e11),
    backlog_bytes=st.integers(0, 1 << 40),
    idle_cores=st.floats(0, 128),
)
estimates = st.builds(Estimate, st.floats(0.01, 1.2), st.floats(1e6, 1e10))


def test_by_default_nothing_is_done() -> None:
    assert CodingPolicy().off
    assert CodingPolicy().choices(ALL) == (Codec.RAW,)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (AUTO, (Codec.RAW, Codec.ZSTD)),
        (CodingPolicy(compression=Compression.ZSTD), (Codec.ZSTD,)),
        (CodingPolicy(quantisation=Quantisation.INT8), (Codec.RAW, Codec.INT8)),
        (
            CodingPolicy(compression=Compression.ZSTD, quantisation=Quantisation.INT8),
            (Codec.ZSTD, Codec.ZSTD | Codec.INT8),
        ),
        (CodingPolicy(quantisation=Quantisation.FP8, quantise_when=QuantiseWhen.ALWAYS), (Codec.FP8,)),
        (
            CodingPolicy(
                compression=Compression.AUTO, quantisation=Quantisation.FP8, quantise_when=QuantiseWhen.ALWAYS
            ),
            (Codec.FP8, Codec.FP8 | Codec.ZSTD),
        ),
    ],
)
def test_a_policy_names_its_choices(policy: CodingPolicy, expected: tuple[Codec, ...]) -> None:
    assert policy.choices(ALL) == expected


@given(policies, masks)
def test_nothing_is_chosen_that_the_receiver_does_not_take(policy: CodingPolicy, taken: Codec) -> None:
    for codec in policy.choices(taken):
        assert not codec & ~taken
        assert not codec.lossy or policy.quantisation is not Quantisation.OFF
    assert not any(codec.lossy for codec in policy.exact().choices(taken))


def test_a_fast_link_gets_plain_bytes_and_a_slow_one_small_ones() -> None:
    fast = Situation(link_bytes_per_s=2e9, backlog_bytes=4 << 30, idle_cores=2.0)
    assert choose((Codec.RAW, Codec.ZSTD), Codec.RAW, PRIORS, fast) is Codec.RAW
    assert choose((Codec.RAW, Codec.ZSTD), Codec.RAW, PRIORS, SLOW) is Codec.ZSTD


def test_without_a_backlog_or_without_idle_cores_nothing_is_done() -> None:
    busy = Situation(link_bytes_per_s=10e6, backlog_bytes=100 << 20, idle_cores=0.0)
    unknown = Situation(link_bytes_per_s=0.0, backlog_bytes=100 << 20, idle_cores=2.0)
    for situation in (IDLE, busy, unknown):
        for present in (Codec.RAW, Codec.ZSTD):
            assert choose((Codec.RAW, Codec.ZSTD), present, PRIORS, situation) is Codec.RAW


def test_bytes_that_do_not_shrink_are_left_alone() -> None:
    noise = {**PRIORS, Codec.ZSTD: Estimate(0.99, 0.5e9)}
    assert choose((Codec.RAW, Codec.ZSTD), Codec.RAW, noise, SLOW) is Codec.RAW


@given(policies, masks, situations, st.fixed_dictionaries({codec: estimates for codec in PRIORS if codec}))
def test_a_decision_is_a_choice_and_stands(
    policy: CodingPolicy, taken: Codec, situation: Situation, measured: dict[Codec, Estimate]
) -> None:
    known = {**PRIORS, **measured}
    choices = policy.choices(taken)
    first = choose(choices, choices[0], known, situation)
    assert first in choices
    assert choose(choices, first, known, situation) == first  # equal numbers, equal decision: it does not swing
    if first != choices[0]:
        assert situation.backlog_s >= BACKLOG_ENTER_S
        gain = plain_bytes_per_s(known[first], situation) / plain_bytes_per_s(known[choices[0]], situation)
        assert gain > SWITCH_GAIN


@given(st.floats(BACKLOG_LEAVE_S * 1.01, BACKLOG_ENTER_S * 0.99))
def test_between_the_two_limits_of_the_backlog_all_stays_as_it_is(backlog_s: float) -> None:
    situation = Situation(link_bytes_per_s=10e6, backlog_bytes=int(backlog_s * 10e6), idle_cores=2.0)
    for present in (Codec.RAW, Codec.ZSTD):
        assert choose((Codec.RAW, Codec.ZSTD), present, PRIORS, situation) is present


def test_a_chooser_learns_and_changes_its_mind_only_now_and_then() -> None:
    chooser, choices = Chooser(), AUTO.choices(ALL)
    assert not chooser.active
    assert chooser.codec_of("kv", choices) is Codec.RAW
    chooser.on_situation(SLOW, 1.0)
    assert chooser.codec_of("kv", choices) is Codec.ZSTD
    # It does not compress after all.
    chooser.on_coded({"kv": Codec.ZSTD}, [CodedPart("kv", Codec.RAW, 64 << 20, 64 << 20)], 0.2, 1.1)
    chooser.on_situation(SLOW, 1.0 + DWELL_S / 2)
    assert chooser.codec_of("kv", choices) is Codec.ZSTD
    chooser.on_situation(IDLE, 1.1 + DWELL_S)
    chooser.on_situation(SLOW, 1.2 + 2 * DWELL_S)
    assert chooser.codec_of("kv", choices) is Codec.RAW
    # What was measured long ago says nothing of other prompts.
    chooser.on_situation(SLOW, 1.2 + 2 * FORGET_S)
    assert chooser.codec_of("kv", choices) is Codec.ZSTD
    assert chooser.accounts.events == {"switched_to_zstd": 2, "switched_to_plain": 1}


def test_groups_are_decided_on_one_by_one() -> None:
    chooser, choices = Chooser(), AUTO.choices(ALL)
    for label in ("kv", "state"):
        chooser.codec_of(label, choices)
    chooser.on_coded({"state": Codec.ZSTD}, [CodedPart("state", Codec.RAW, 64 << 20, 64 << 20)], 0.2, 0.0)
    chooser.on_situation(SLOW, 1.0)
    assert chooser.codec_of("kv", choices) is Codec.ZSTD
    assert chooser.codec_of("state", choices) is Codec.RAW


def test_other_choices_begin_anew() -> None:
    chooser = Chooser()
    chooser.codec_of("kv", AUTO.choices(ALL))
    chooser.on_situation(SLOW, 1.0)
    assert chooser.codec_of("kv", AUTO.choices(Codec.RAW)) is Codec.RAW


def test_accounts_know_bytes_and_seconds_by_group_and_codec() -> None:
    chooser = Chooser()
    shares = [CodedPart("kv", Codec.INT8, 300, 160), CodedPart("state", Codec.RAW, 100, 100)]
    chooser.on_coded({"kv": Codec.INT8, "state": Codec.RAW}, shares, 4.0, 0.0)
    use = chooser.accounts.uses["kv", "int8"]
    assert (use.plain_bytes, use.coded_bytes, use.cpu_s) == (300, 160, 3.0)
    assert chooser.accounts.cpu_s == 4.0


def test_the_meter_counts_cores_that_idle_and_those_that_we_use(tmp_path: Path) -> None:
    stat, ticks = tmp_path / "stat", 100

    def meter_at(now: float, idle_s: float, own_s: float) -> float:
        stat.write_text(f"cpu  1 1 1 {int(idle_s * ticks)} 0 0 0\ncpu0 1 1 1 1\n")
        return meter.idle_cores(now, own_s)

    meter = CpuMeter(stat, ticks_per_s=ticks, usable=2.0)
    assert meter_at(0.0, 10.0, 0.0) == 0.0  # nothing is known yet
    assert meter_at(1.0, 10.5, 0.0) == 0.5
    assert meter_at(1.1, 99.0, 0.0) == 0.5  # too soon
    assert meter_at(2.0, 10.5, 0.75) == 0.75
    assert meter_at(3.0, 30.0, 0.75) == 2.0  # no more than there are
    assert meter_at(4.0, 30.0, 0.75) == LEAST_CORES  # of a machine that others keep busy


def test_a_line_that_a_crumb_of_a_core_can_serve_is_coded_for_on_a_busy_machine() -> None:
    for link_bytes_per_s, codec in ((300e3, Codec.ZSTD), (30e6, Codec.RAW)):
        busy = Situation(link_bytes_per_s=link_bytes_per_s, backlog_bytes=100 << 20, idle_cores=LEAST_CORES)
        assert choose((Codec.RAW, Codec.ZSTD), Codec.RAW, PRIORS, busy) is codec


def test_priors_are_of_every_codec() -> None:
    assert plain_bytes_per_s(PRIORS[Codec.RAW], SLOW) == SLOW.link_bytes_per_s
    assert math.isinf(PRIORS[Codec.RAW].bytes_per_cpu_s)
    for policy in (AUTO, CodingPolicy(compression=Compression.AUTO, quantisation=Quantisation.FP8)):
        assert all(codec in PRIORS for codec in policy.choices(ALL))
