import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine.byte_tokenizer import save_byte_tokenizer
from prfaas.cli import main, parser
from prfaas.commands.descriptions import COMMANDS
from prfaas.ending import ended_by_signals, run_until_done
from tests.command_lines import unexplained
from transport.wire.identity import Identity


@pytest.mark.parametrize(
    "command", [["demo"], ["up"], ["gateway"], ["node"], ["convert"], ["certificates"], ["model"], []]
)
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: prfaas" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "up", "gateway", "node"])
def test_a_missing_file_is_named_without_a_traceback(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-c", "missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_an_unknown_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nnode_idd = 'x'\n")
    assert main(["node", "-c", str(path)]) == 2
    assert "unknown key 'node_idd'" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--ranks", "2"]], ids=["one", "ranks"])
def test_a_nodes_file_is_checked_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[node]\nnode_id = "d"\ncluster = "c"\ncluster_kind = "pd"\nrole = "decode"\nengine = "emulated"\nmodel = "m"\n'
    )
    assert main(["node", "-c", str(path), "--check", *more]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    path.write_text(path.read_text().replace("pd", "pq"))
    assert main(["node", "-c", str(path), "--check", *more]) == 2
    assert "cluster_kind = 'pq'" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["embedded", "emulated"])
def test_a_nodes_check_names_the_tokenizer_that_a_model_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    path, model = tmp_path / "node.toml", tmp_path / "m"
    model.mkdir()
    save_byte_tokenizer(model, 4096)
    (model / "config.json").write_text('{"model_type": "llama"}')
    path.write_text(
        f'[node]\nnode_id = "d"\ncluster = "c"\ncluster_kind = "pd"\nrole = "decode"\nengine = "{engine}"\nmodel = "{model}"\n'
    )
    assert main(["node", "-c", str(path), "--check"]) == 0
    (model / "tokenizer.json").unlink()
    assert main(["node", "-c", str(path), "--check"]) == 2
    assert f"{str(model)!r}: it has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--ranks", "2"]], ids=["one", "ranks"])
@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("names_secret = 'names.secret'", "names_secret: names.secret: "),
        ("certificate = 'd-{rank}.pem'\nkey = 'd-{rank}.key'\nauthority = 'ca.pem'", "no such file"),
        ("ssd_dir = 'disk'\nssd_bytes = 1073741824\nssd_key = 'ssd.key'", "ssd_key: ssd.key: "),
    ],
    ids=["names", "certificate", "disk"],
)
def test_a_nodes_check_reads_the_secrets_that_a_start_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], key: str, told: str
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[node]\nnode_id = "d"\ncluster = "c"\ncluster_kind = "pd"\nrole = "decode"\nengine = "emulated"\nmodel = "m"\n'
        f"{key}\n"
    )
    (tmp_path / "names.secret").write_text("what-is-secret\n")
    (tmp_path / "ssd.key").write_text("what-is-secret\n")
    assert main(["node", "-c", str(path), "--check", *more]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "what-is-secret" not in said.err + said.out


def test_a_gateways_file_is_checked_and_nothing_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.toml"
    save_byte_tokenizer(tmp_path, 4096)
    for tokenizer, status, told in ((".", 0, f"{path}: ok"), ("none", 2, "none")):
        path.write_text(
            f'[gateway]\ntokenizer_dir = "{tokenizer}"\nthreshold_tokens = 1\nnodes = [{{ agent = "127.0.0.1:1" }}]\n'
        )
        assert main(["gateway", "-c", str(path), "--check"]) == status
        said = capsys.readouterr()
        assert told in said.out + said.err


def test_a_gateways_check_reads_the_secret_of_its_plan_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.toml"
    save_byte_tokenizer(tmp_path, 4096)
    path.write_text(
        '[gateway]\ntokenizer_dir = "."\nthreshold_tokens = 1\nnodes = [{ agent = "127.0.0.1:1" }]\n'
        '[gateway.plan]\nurl = "http://127.0.0.1:1"\ntoken_file = "plan.token"\n'
    )
    assert main(["gateway", "-c", str(path), "--check"]) == 2
    assert "[gateway.plan]: token_file: " in capsys.readouterr().err


def test_a_demo_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = Path(__file__).parents[2] / "configs" / "case_study_live.toml"
    assert main(["demo", "-c", str(live), "--state-dir", str(tmp_path)]) == 2
    assert "profile: a demo compares" in capsys.readouterr().err


def test_an_unknown_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "build", "--arch", "gpt5", "--out", str(tmp_path / "m")]) == 2
    assert "arch = 'gpt5': must be 'kimi_linear', " in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.toml"
    cluster = '[[clusters]]\nname = "c"\nkind = "pd"\nnodes = [{ node_id = "d", role = "decode" }]\n'
    path.write_text(f'[model]\npath = "{tmp_path}/none"\n{cluster}')
    assert main(["up", "-c", str(path), "--state-dir", str(tmp_path)]) == 2
    assert "none': it must be a model directory" in capsys.readouterr().err


def test_a_port_that_is_taken_is_a_fault_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    cluster = '[[clusters]]\nname = "c"\nkind = "pd"\nnodes = [{ node_id = "d", role = "decode" }]\n'
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "topology.toml"
        path.write_text(f'[model]\npath = "model"\n[gateway]\nport = {port}\n{cluster}')
        assert main(["up", "-c", str(path), "--state-dir", str(tmp_path / "state")]) == 2
    said = f"prfaas up: [gateway]: port = {port}: cannot listen on 127.0.0.1:{port}: Address already in use; choose"
    assert said in capsys.readouterr().err


def test_certificates_are_made_and_how_to_use_them_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certificates"
    assert main(["certificates", "--out", str(folder), "east/prefill/east-p0=10.0.0.1,east.example", "gateway"]) == 0
    said = tomllib.loads(capsys.readouterr().out.partition("# gateway")[2].partition("\n")[2])
    Identity(**{key: Path(path) for key, path in said.items()}).check()
    authority = (folder / "authority.pem").read_bytes()
    assert main(["certificates", "--out", str(folder), "east/prefill/east-p0", "--trust", "corp.example"]) == 0
    assert (folder / "authority.pem").read_bytes() == authority
    identity = Identity(certificate=folder / "east-p0.pem", key=folder / "east-p0.key", authority=folder)
    assert str(identity.own_name()) == "spiffe://corp.example/east/prefill/east-p0"
    assert (folder / "east-p0.key").stat().st_mode & 0o777 == 0o600


def test_names_that_are_no_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (
        "a/b",
        "east-p0",
        "prefill",
        "east/king/x",
        "a/b/node/c",
        "gateway/authority",
        "gateway=",
        "",
        "e/node/a b",
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["certificates", "--out", str(tmp_path), name])
        assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "'east-p0': must be CLUSTER/ROLE/NAME, as east/prefill/east-p0" in said
    assert "'prefill': a prefill belongs to a cluster" in said
    assert "'a b' must be letters" in said


def test_an_interrupted_command_says_that_it_stops(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        return True

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
    assert run_until_done(work(), on_signal=lambda: print("stopping")) == 130
    assert capsys.readouterr().out == "stopping\n"


def test_the_command_line_does_not_import_torch() -> None:
    code = (
        "import contextlib, sys, prfaas.cli\n"
        "with contextlib.suppress(SystemExit):\n    prfaas.cli.main(['--version'])\n"
        "sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_runs_before_a_system_ends_at_a_signal_and_cleans_up(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleaned: list[bool] = []
    with contextlib.ExitStack() as inside:
        inside.enter_context(pytest.raises(KeyboardInterrupt))
        inside.enter_context(ended_by_signals())
        inside.callback(cleaned.append, True)
        os.kill(os.getpid(), number)
    assert cleaned
    assert signal.getsignal(number) is before


def test_a_signal_that_python_swallows_counts_afterwards() -> None:
    with pytest.raises(KeyboardInterrupt), ended_by_signals(), contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_system_that_builds_its_model_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    building = (
        "import sys, pathlib, engine.torch.tiny as tiny\n"
        "def slowly(*_):\n"
        "    import time\n"
        "    print('building', flush=True)\n"
        "    time.sleep(300)\n"
        "tiny._seeded_model = slowly\n"
        "from prfaas.cli import main\n"
        "sys.exit(main(['up', '--state-dir', sys.argv[1]]))\n"
    )
    up = subprocess.Popen([sys.executable, "-c", building, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with up:
        assert up.stdout is not None
        assert "building" in up.stdout.readline()
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_is_one(command: str) -> None:
    name, *arguments = shlex.split(COMMANDS[command].example)
    assert (name, parser().parse_args(arguments).command) == ("prfaas", command.split()[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_each_command_and_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "Example: prfaas " in text
    assert unexplained(text) == []
