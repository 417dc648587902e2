"""Every mistake in the file names the key, the value and what is allowed; the process ends with 2 and no traceback."""

from pathlib import Path

import pytest

from gateway.admin.reload import Reloads
from gateway.config.gateway import NodeAddress, load
from gateway.errors import ApiError, GatewayConfigError
from gateway.main import configured, main, parser
from transport.control.settings import SettingsError

GOOD = """
[gateway]
tokenizer_dir = "tok"
[gateway.timeouts]
prefill_s = 7
[[gateway.nodes]]
agent = "127.0.0.1:7001"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return path


def test_a_good_file_fills_in_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD))
    assert config.nodes == (NodeAddress(agent="127.0.0.1:7001"),)
    assert (config.threshold_tokens, config.timeouts.prefill_s, config.port) == (16_384.0, 7.0, 8000)
    assert config.tokenizer_dir == tmp_path / "tok"
    assert config.max_body_bytes == 10 * 1024 * 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[gateway]\nprot = 1", r"\[gateway\]: unknown key 'prot' \(did you mean 'port'\?\); known are .*port"),
        (
            "[gateway]\nclasses = { vip = { ttft = 1 } }",
            r"\[gateway.classes.vip\]: unknown key 'ttft' \(did you mean 'ttft_s'\?\); known are .*",
        ),
        (
            "[gateway]\nclasses = { vip = { tbt_ms = 0 } }",
            r"\[gateway.classes.vip\]: tbt_ms = 0.0: must be a number above 0",
        ),
        (
            "[gateway]\nclasses = { vip = { priority = 1000 } }",
            r"\[gateway.classes.vip\]: priority = 1000: must be -100 to 100",
        ),
        (
            "[gateway]\nclasses = { vip = { keys = ['me'] } }",
            r"\[gateway.classes.vip\]: keys = 'me': must be a list of SHA-256",
        ),
        (
            "[gateway]\nclasses = { vip = { max_load = 2 } }",
            r"\[gateway.classes.vip\]: max_load = 2.0: must be a number",
        ),
        ("[gateway]\nclasses = { vip = 1 }", r"\[gateway.classes.vip\] = 1: must be a table"),
        ("[gateway]\nclasses = { 'a b' = {} }", r"\[gateway\]: classes = 'a b': must be names of letters"),
        (
            "[gateway]\nadmission = { policy = 'none' }",
            r"\[gateway.admission\]: policy = 'none': must be 'accept_all', .*",
        ),
        (
            "[gateway]\nadmission = { default_class = 'vip' }",
            r"\[gateway\]: default_class = 'vip': must be one of default",
        ),
        ("[gateway]\nport = 70000", r"\[gateway\]: port = 70000: must be 0 to 65535"),
        ("[gateway]\nport = '8000'", r"\[gateway\]: port = '8000': must be an integer"),
        ("[gateway]\nport = true", r"\[gateway\]: port = True: must be an integer"),
        ("[gateway]\nmax_body_bytes = 0", r"\[gateway\]: max_body_bytes = 0: must be an integer above 0"),
        ("[gateway]\nthreshold_tokens = -1", r"\[gateway\]: threshold_tokens = -1\.0: must be a number of at least 0"),
        ("[gateway]\nlog_level = 'loud'", r"\[gateway\]: log_level = 'loud': must be 'debug', 'info'"),
        ("[gateway]\nrouting = 5", r"\[gateway\.routing\] = 5: must be a table"),
        ("[gateway]\nrouting = { placement = 'x' }", r"\[gateway\.routing\]: placement = 'x': must be 'cache_aware'"),
        (
            "[gateway]\nrouting = { cross_cluster_cache = 1 }",
            r"\[gateway\.routing\]: cross_cluster_cache = 1: must be true or false",
        ),
        ("[gateway]\nrouting = { max_moves = 0 }", r"\[gateway\.routing\]: max_moves = 0: must be an integer above 0"),
        (
            "[gateway]\nrouting = { fetch_bytes_per_s = -1 }",
            r"fetch_bytes_per_s = -1\.0: must be a number of at least 0",
        ),
        (
            "[gateway]\nrouting = { decode_load_slack = -1 }",
            r"decode_load_slack = -1\.0: must be a number of at least 0",
        ),
        ("[gateway]\nkey = 'k'", r"\[gateway\]: certificate is missing: certificate, key, authority go together"),
        (
            "[gateway]\nstrangers = { trusted_proxies = [1] }",
            r"\[gateway\.strangers\]: trusted_proxies\[0\] = 1: must be a",
        ),
        ("[[clusters]]\n[gateway]", "this is a topology, for `prfaas up`"),
        ("[gatway]\n[gateway]", r"unknown key 'gatway' \(did you mean 'gateway'\?\)"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(GatewayConfigError, match=message):
        load(write(tmp_path, GOOD.replace("[gateway]", change, 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a gateway's file has one table, \[gateway\]; it is missing"),
        ("[node]\nnode_id='x'", "this is a node's file, for `prfaas node`"),
        (
            "[gateway]\ntokenizer_dir='x'\nnodes=[{agent='a:1'}]\ncertificate='c'\nkey='k'\nauthority='a'",
            r"gateway: certificate .*c with key .*k: no such file",
        ),
        ("[gateway]\ntokenizer_dir='x'", r"\[gateway\]: missing: nodes"),
        ("[gateway]\ntokenizer_dir='x'\nnodes=[]", r"\[gateway\]: nodes = \[\]: must be at least one"),
        ("[gateway]\n[[gateway.nodes]]\nagent='a:1'", r"\[gateway\]: missing: tokenizer_dir"),
        (
            "[gateway]\ntokenizer_dir='x'\n[[gateway.nodes]]\nagent='nope'",
            r"\[gateway\.nodes\[0\]\]: agent = 'nope': must be host:port",
        ),
        ("[gateway]\ntokenizer_dir='x'\nnodes=[{agent='a:1'},{agent='a:1'}]", "every agent once"),
        (
            "[gateway]\ntokenizer_dir='x'\nnodes=[{agent='a:1', role='x'}]",
            r"\[gateway\.nodes\[0\]\]: unknown key 'role'",
        ),
        ("[gateway", "gateway.toml: not valid TOML: "),
    ],
)
def test_a_bad_file_ends_the_process_with_two_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    import re

    path = write(tmp_path, text)
    assert main(["-c", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_missing_file_and_a_missing_tokenizer_end_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-c", str(tmp_path / "none.toml")]) == 2
    assert main(["-c", str(write(tmp_path, GOOD))]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


LINES = """
[[lines]]
name = "carrier-a"
source = "east"
destination = "west"
capacity_gbps = 40
"""


def test_lines_are_read_from_a_file_that_others_read_too(tmp_path: Path) -> None:
    (tmp_path / "lines.toml").write_text(LINES)
    named = GOOD.replace("[gateway]\n", '[gateway]\nlines_file = "lines.toml"\nlinks = ["north:west"]\n')
    config = load(write(tmp_path, named))
    assert [line.label for line in config.lines] == ["carrier-a"]
    assert config.ways == (("north", "west"), ("east", "west"))
    (tmp_path / "lines.toml").write_text(LINES + LINES.replace("carrier-a", "carrier-b"))
    again = config.with_changes_of(load(write(tmp_path, named)))
    assert [line.label for line in again.lines] == ["carrier-a", "carrier-b"]
    (tmp_path / "lines.toml").write_text(LINES.replace("40", "-1"))
    with pytest.raises(GatewayConfigError, match=r"lines\.toml: lines\[0\]: capacity_gbps = -1"):
        load(write(tmp_path, named))
    both = named.replace("[gateway.timeouts]", LINES.replace("[[lines]]", "[[gateway.lines]]") + "[gateway.timeouts]")
    with pytest.raises(GatewayConfigError, match="left out beside lines_file"):
        load(write(tmp_path, both))


def test_a_reload_refuses_secrets_that_cannot_be_read(tmp_path: Path) -> None:
    secret, outcomes = tmp_path / "names.secret", list[str]()
    file = write(tmp_path, GOOD.replace("[gateway.timeouts]", 'names_secret = "names.secret"\n[gateway.timeouts]'))
    secret.write_text("a1" * 32)
    arguments = parser().parse_args(["-c", str(file)])
    reloads = Reloads(configured(arguments), [], lambda: configured(arguments), outcomes.append)
    reloads.run()
    secret.write_text("gone wrong")
    reloads.run()
    assert outcomes == ["ok", "refused"]
    with pytest.raises(ApiError, match=r"names_secret: names\.secret: "):
        reloads.ask()


def test_help_names_the_file_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "--config" in capsys.readouterr().out


@pytest.mark.parametrize("agent", ["::1:7001", "2001:db8::1:7001", "[::1:7001", ":7001"])
def test_an_agents_ipv6_address_is_in_brackets(agent: str) -> None:
    with pytest.raises(SettingsError, match="in brackets"):
        NodeAddress(agent=agent)
    assert NodeAddress(agent="[::1]:7001").agent == "[::1]:7001"
