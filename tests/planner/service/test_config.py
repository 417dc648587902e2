"""A file's mistakes are named."""

from pathlib import Path

import pytest

from planner.commands.cli import main
from planner.errors import InputError
from planner.service.config import ApplyMode, load
from tests.planner.conftest import CONFIGS

PROFILE = CONFIGS / "profiles" / "internal-1t.json"
GOOD = f"""
[plan]
state_dir = "state"
profile = "{PROFILE}"
pd_hardware = "h20x8"
prfaas_hardware = "h200x8"
egress_gbps = 100
gateways = ["http://127.0.0.1:8000"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_a_good_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, f"{GOOD}[plan.controller]\ntick_s = 5\nrule = 'model'\n[plan.limits]\nsettle_s = 9"))
    assert config.state_dir == tmp_path / "state"
    assert (config.mode, config.controller.tick_s, config.limits.settle_s) == (ApplyMode.ADVISORY, 5.0, 9.0)
    model = config.model()
    assert model.egress_bytes_per_s == 12.5e9
    assert model.remote(32_000) < model.local(32_000)
    assert config.ruled.min_prefill > 1000  # nothing is converted unless that is asked for


def test_lines_say_how_much_may_leave(tmp_path: Path) -> None:
    lines = [
        f"[[lines]]\nname = '{name}'\nsource = 'east'\ndestination = 'west'\ncapacity_gbps = 50\n" for name in "ab"
    ]
    (tmp_path / "lines.toml").write_text("\n".join(lines) + "shared_gbps = 10\n")
    said = GOOD.replace("egress_gbps = 100", "lines_file = 'lines.toml'")
    assert load(write(tmp_path, said)).model().egress_bytes_per_s == 90 * 1e9 / 8
    with pytest.raises(InputError, match="leave egress_gbps out"):
        load(write(tmp_path, f"{GOOD}lines_file = 'lines.toml'"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("mod = 1", r"\[plan\]: unknown key 'mod' \(did you mean 'mode'\?\)"),
        ("mode = 'maybe'", r"\[plan\]: mode = 'maybe': must be 'advisory' or 'auto'"),
        ("host = '0.0.0.0'", r"host = '0\.0\.0\.0': other machines reach it, so token_file is needed"),
        ("host = '0.0.0.0'\ntoken_file = 't'", r"set certificate, key and authority, or plain = true"),
        ("token_scale = 0", r"token_scale = 0\.0: must be a number above 0"),
        ("[plan.controller]\ntick_s = 0", "need tick_s > 0"),
        ("[plan.scale]\nprefill = 5e-324", r"\[plan\]: scale: prefill=5e-324: must be at least 0.001 and finite"),
        ("[plan.limits]\nmin_threshold_tokens = -1", "need 0 <= min <= max"),
        ("url = 'http://a:1'", r"url: it is what other services say with etcd, and there is no \[plan.etcd\]"),
        ("url = 'a:1'", r"url = 'a:1': must be an http\(s\) URL"),
        ("host = '::'\ntoken_file = 't'\nplain = true\netcd = { endpoints = ['a:1'] }", "it needs url"),
        ("etcd = { endpoints = [] }", "endpoints"),
        ("[clusters]", "this is a topology"),
        ("[gateway]", "unknown key 'gateway'"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as told:
        load(write(tmp_path, GOOD + more))
    assert "plan.toml" in str(told.value)


def test_a_secret_is_read_and_must_be_one(tmp_path: Path) -> None:
    config = load(write(tmp_path, f"{GOOD}token_file = 'secret'"))
    with pytest.raises(InputError, match="token_file"):
        config.token()
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        config.token()
    (tmp_path / "secret").write_text("abc\n")
    assert config.token() == "abc"


def test_hardware_that_is_not_profiled_is_named(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD.replace("h20x8", "h30x8")))
    with pytest.raises(InputError, match="h30x8"):
        config.model()


def test_an_etcd_on_another_machine_that_is_asked_in_clear_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    for endpoint, warnings in (("10.0.0.5:2379", 1), ("127.0.0.1:2379", 0), ("https://10.0.0.5:2379", 0)):
        path.write_text(f"{GOOD}etcd = {{ endpoints = ['{endpoint}'] }}\n")
        assert main(["serve", "-c", str(path), "--check"]) == 0
        said = capsys.readouterr().out
        assert said.count("warning: [plan.etcd]: etcd at 10.0.0.5:2379 is another machine") == warnings
