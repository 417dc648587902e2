from pathlib import Path

import pytest

from engine.emulated.standin import read_stand_in
from planner.model.profile import DecodeProfile, KvSize, ModelProfile, PrefillCurve, ProfileWindow, load_profile
from prfaas.errors import TopologyError
from prfaas.system.standin import Scale, stand_in, stand_in_file, write_stand_ins
from transport.control.settings import SettingsError

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
SCALE = Scale(time=0.25, tokens=1 / 64, bytes=1e-3)


def test_at_full_scale_it_is_the_profile() -> None:
    profile = load_profile(PROFILES / "internal-1t.json")
    for hardware, curve in profile.prefill.items():
        found = stand_in(profile, hardware, Scale())
        for tokens in (0, 1_000, 19_400, 131_072):
            assert found.prefill_s(tokens) == pytest.approx(curve(tokens), rel=1e-3)
        layout = found.layout(64)
        assert layout.kv_bytes(32_000) == pytest.approx(profile.kv_size()(32_000), rel=1e-6)
    decode = profile.decode_on("h20x8")
    assert stand_in(profile, "h20x8", Scale()).decode_step_s(20) == pytest.approx(decode.full_step_s)


def test_a_scale_shrinks_times_lengths_and_bytes() -> None:
    profile = load_profile(PROFILES / "internal-1t.json")
    found = stand_in(profile, "h20x8", SCALE)
    assert found.prefill_s(500) == pytest.approx(profile.prefill_on("h20x8")(32_000) / 4, rel=1e-3)
    assert found.layout(16).kv_bytes(500) == pytest.approx(profile.kv_size()(32_000) / 1000, rel=2e-3)
    # An answer's token of here stands for 64, which take as many steps.
    answer_s = found.steps_per_token * found.decode_step_s(20) * SCALE.tokens_of(1024)
    assert answer_s == pytest.approx(1024 * profile.decode_on("h20x8").full_step_s / 4)


def test_a_link_carries_what_its_bytes_and_seconds_are_scaled_to() -> None:
    assert SCALE.bytes_per_s(100) == pytest.approx(100e9 / 8 / 1000 * 4)


def test_windows_are_as_long_as_they_are_in_tokens_of_here() -> None:
    profile = ModelProfile(
        model="m",
        kv=KvSize(bytes_per_token=64_000, windows=(ProfileWindow(128, 64_000),)),
        prefill={"gpu": PrefillCurve(coefficients=(0.1, 1e-4, 0.0), valid_tokens=(1, 1000))},
        decode={"gpu": DecodeProfile(max_running=8, step_s=0.02, step_s_per_request=0.001)},
    )
    found = stand_in(profile, "gpu", Scale(tokens=0.5, bytes=0.01))
    assert found.layout(16).kv_bytes(500) == 500 * 1280 + 64 * 1280
    assert found.decode_step_s(8) == pytest.approx(0.028)


def test_every_shipped_profile_that_knows_its_kvcache_can_be_stood_in_for(tmp_path: Path) -> None:
    written = 0
    for path in sorted(PROFILES.glob("*.json")):
        profile = load_profile(path)
        if profile.kv is None:
            with pytest.raises(TopologyError, match="has no kv section"):
                write_stand_ins(path, Scale(), tmp_path)
            continue
        write_stand_ins(path, Scale(), tmp_path)
        for hardware in profile.prefill:
            assert read_stand_in(stand_in_file(tmp_path, hardware)).model == profile.model
            written += 1
    assert written >= 5
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("profile", [PROFILES, PROFILES / "internal-1t.json"])
def test_files_that_cannot_be_read_or_written_are_named(profile: Path, tmp_path: Path) -> None:
    (in_the_way := tmp_path / "a file").touch()
    with pytest.raises(TopologyError, match=r"a file|profiles"):
        write_stand_ins(profile, Scale(), in_the_way / "model")


def test_bytes_too_few_to_be_checked_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="can be checked"):
        write_stand_ins(PROFILES / "internal-1t.json", Scale(bytes=1e-6), tmp_path)


@pytest.mark.parametrize("wrong", [{"time": 0.0}, {"bytes": -1.0}, {"tokens": float("nan")}])
def test_a_scale_is_above_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="_scale"):
        Scale(**wrong)
