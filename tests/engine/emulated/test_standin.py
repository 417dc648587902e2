import msgspec
import pytest

from engine.emulated.standin import StandInWindow, read_stand_in
from engine.errors import ModelError
from tests.engine.standins import stand_in


def test_a_prompt_takes_what_the_points_say_and_beyond_them_as_between_the_last_two():
    bent = stand_in(prefill_points=((0, 0.5), (100, 1.0), (200, 3.0)))
    assert [bent.prefill_s(tokens) for tokens in (0, 50, 100, 150, 200, 300)] == pytest.approx(
        [0.5, 0.75, 1.0, 2.0, 3.0, 5.0]
    )


def test_a_step_takes_longer_the_more_requests_it_serves():
    assert stand_in().decode_step_s(4) == pytest.approx(0.04)
    assert stand_in(step_s=0.0, step_s_per_request=0.0).decode_step_s(1) > 0


def test_the_layout_has_as_many_bytes_as_the_file_says():
    layout = stand_in(windows=(StandInWindow(128, 64),)).layout(32)
    assert layout.kv_bytes(1000) == 3 * 4096 + 64 * 1000 + 64 * 128


def test_hardware_makes_no_difference_to_the_layout():
    slow = stand_in(prefill_points=((0, 1.0), (10, 9.0)), max_running=1)
    assert slow.layout(32).fingerprint == stand_in().layout(32).fingerprint


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"bytes_per_token": 63}, "64 can be checked"),
        ({"fixed_bytes": 90}, "fixed_bytes"),
        ({"prefill_points": [[0, 1.0]]}, "prefill_points"),
        ({"prefill_points": [[0, 1.0], [10, 0.5]]}, "no less time"),
        ({"max_running": 0}, "max_running"),
        ({"step_s": "soon"}, "step_s"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_file_that_says_nonsense_is_refused_by_name(wrong, named, tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(stand_in()) | wrong))
    with pytest.raises(ModelError, match=named):
        read_stand_in(path)


def test_a_file_says_all_of_it(tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(stand_in()))
    assert read_stand_in(path) == stand_in()
    with pytest.raises(ModelError, match=r"gone\.json"):
        read_stand_in(tmp_path / "gone.json")
