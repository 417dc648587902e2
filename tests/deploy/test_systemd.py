"""Units for systemd: it finds nothing wrong with them, our commands take their arguments, and they keep their bounds."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.config.gateway import Timeouts
from gateway.workers.generation import REPLACE
from gateway.workers.ports import ListenerName
from node.agent import ENGINE_STOP_S
from node.config import node_config
from planner.commands.cli import parser as plan_parser
from planner.service.config import ServiceConfig
from prfaas.cli import EXIT_BAD_CONFIG
from prfaas.cli import parser as prfaas_parser
from prfaas.commands.init import InitSite, init
from transport.control.durable import STATE_DIRECTORY
from transport.control.secret_files import DIRECTORY, located

ROOT: Final = Path(__file__).parent.parent.parent
FOLDER: Final = ROOT / "deploy" / "systemd"
UNITS: Final = sorted(FOLDER.glob("*.service"))
NAMES: Final = [unit.name for unit in UNITS]
INSTALLED: Final = Path("/opt/prfaas")
SETTINGS: Final = Path("/etc/prfaas")
STATE: Final = Path("/var/lib")
ANALYZE: Final = shutil.which("systemd-analyze")
MAX_EXPOSURE: Final = 2.0  # of 10, by systemd-analyze
BOUNDS: Final = {
    "User": "prfaas",
    "UMask": "0077",
    "MemorySwapMax": "0",
    "LimitCORE": "0",
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "RestrictSUIDSGID": "yes",
    "SystemCallArchitectures": "native",
    "KillMode": "mixed",
    "Restart": "on-failure",
    "RestartPreventExitStatus": str(EXIT_BAD_CONFIG),
    "ExecReload": "/bin/kill -HUP $MAINPID",
}

Settings = dict[str, list[str]]


def read(text: str) -> Settings:
    """Every setting, with all of its values; a comment is no setting."""
    found: Settings = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def settings(unit: Path) -> Settings:
    return read(unit.read_text())


def with_options(unit: Path) -> Settings:
    """With the settings that stand in comments, for those who want them."""
    return read(re.sub(r"^#(?=[A-Z]\w+=)", "", unit.read_text(), flags=re.MULTILINE))


def unit_of(kind: str) -> Path:
    return next(unit for unit in UNITS if unit.name.startswith(f"prfaas-{kind}"))


def test_there_is_one_for_each_process() -> None:
    assert NAMES == ["prfaas-gateway.service", "prfaas-node@.service", "prfaas-plan.service"]


@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_our_commands_take_what_it_says(unit: Path) -> None:
    (command,) = settings(unit)["ExecStart"]
    program, *arguments = shlex.split(command.replace("%i", "home-d0"))
    # By its path: Python then takes modules of that folder and of the environment, none of the current folder.
    assert Path(program).parent == INSTALLED / ".venv/bin"
    parser = plan_parser() if Path(program).name == "prfaas-plan" else prfaas_parser()
    assert Path(program).name in (ROOT / "pyproject.toml").read_text()
    assert Path(parser.parse_args(arguments).config).parent == SETTINGS


@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_it_keeps_its_bounds(unit: Path) -> None:
    found = settings(unit)
    assert {key: found.get(key, ["missing"])[-1] for key in BOUNDS} == BOUNDS
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged"]


@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_paths_are_where_the_guide_puts_them(unit: Path) -> None:
    found, optional = settings(unit), with_options(unit)
    (state,) = found["StateDirectory"]
    assert found["WorkingDirectory"] == [str(STATE / state)]
    (document,) = found["Documentation"]
    assert (ROOT / Path(document.removeprefix("file:")).relative_to(INSTALLED)).is_file()
    for credential in optional.get("LoadCredential", []):
        name, _, source = credential.partition(":")
        assert Path(source).is_relative_to(SETTINGS)
        # It is read as the unit's comment says.
        assert located(SETTINGS, f"${DIRECTORY}/{name}", {DIRECTORY: "/run/c"}) == Path("/run/c") / name
    for said in re.findall(r'^# .*?(\w+) = "\$CREDENTIALS_DIRECTORY', unit.read_text(), re.MULTILINE):
        assert said in ServiceConfig.__slots__


def site_of(folder: Path) -> InitSite:
    """In `folder`, as `prfaas init` writes it; with a profile, which it leaves to its operator."""
    site = InitSite(model="m", gateway="127.0.0.4", decode=("127.0.0.2",), remote=("127.0.0.3",), tls=True)
    init(site, folder, overwrite=False, say=lambda line: None)
    plan = folder / "plan.toml"
    profile = ROOT / "configs/profiles/internal-1t.json"
    chosen = f'profile = "{profile}"\npd_hardware = "h20x8"\nprfaas_hardware = "h200x8"'
    plan.write_text(
        re.sub("^# profile.*", chosen, plan.read_text(), flags=re.MULTILINE).replace("port = 8100", "port = 0")
    )
    return site


@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_it_needs_no_file_that_init_does_not_write(unit: Path, tmp_path: Path) -> None:
    site_of(tmp_path)
    for wanted in settings(unit).get("LoadCredential", []):
        name = Path(wanted.partition(":")[2]).relative_to(SETTINGS)
        assert (tmp_path / str(name).replace("%i", "home-d0")).exists()
    (command,) = settings(unit)["ExecStart"]
    assert (tmp_path / Path(shlex.split(command.replace("%i", "home-d0"))[-1]).relative_to(SETTINGS)).is_file()


@pytest.mark.parametrize("is_unit", [True, False], ids=["under systemd", "by hand"])
def test_a_plan_service_of_init_keeps_its_state_where_it_may_write(tmp_path: Path, is_unit: bool) -> None:
    (tmp_path / "etc").mkdir()
    site_of(tmp_path / "etc")
    before = set((tmp_path / "etc").rglob("*"))
    environment = {key: each for key, each in os.environ.items() if key not in (DIRECTORY, STATE_DIRECTORY)}
    if is_unit:
        (tmp_path / "var").mkdir()
        environment[STATE_DIRECTORY] = str(tmp_path / "var")
    command = [sys.executable, "-m", "planner", "serve", "-c", str(tmp_path / "etc/plan.toml")]
    with subprocess.Popen(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        said = ran.stdout.readline()
        ran.terminate()
    assert said.startswith("plan service ready url=http://127.0.0.4:")
    folder = tmp_path / ("var" if is_unit else "etc") / "plan"
    assert (folder / "ledger.json").is_file()
    new = set((tmp_path / "etc").rglob("*")) - before
    assert all(each.is_relative_to(folder) for each in new)


READ_PLAN_FILE: Final = """
import sys
from pathlib import Path
from gateway.config.gateway import load
print(load(Path(sys.argv[1])).plan.plan_file)
"""


def test_a_gateway_of_init_keeps_the_plan_where_it_may_write(tmp_path: Path) -> None:
    site_of(tmp_path)
    file = tmp_path / "gateway.toml"
    file.write_text(re.sub("# (.gateway.plan.|url|plan_file)", r"\1", file.read_text()))
    command = [sys.executable, "-c", READ_PLAN_FILE, str(file)]
    for given, folder in (({STATE_DIRECTORY: "/var/lib/g"}, Path("/var/lib/g")), ({}, tmp_path)):
        environment = {"PYTHONPATH": str(ROOT), **given}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert Path(found.stdout.strip()) == folder / "followed-plan.json"


def test_a_gateway_that_kept_its_plan_beside_its_file_still_does(tmp_path: Path) -> None:
    """Under a unit of one's own, whose process could write there: it had a state directory that nothing was relative to."""
    site_of(tmp_path / "etc")
    (tmp_path / "var").mkdir()
    file = tmp_path / "etc/gateway.toml"
    file.write_text(re.sub("# (.gateway.plan.|url|plan_file)", r"\1", file.read_text()))
    (tmp_path / "etc/followed-plan.json").write_text("{}")
    command = [sys.executable, "-c", READ_PLAN_FILE, str(file)]
    environment = {"PYTHONPATH": str(ROOT), STATE_DIRECTORY: str(tmp_path / "var")}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == tmp_path / "etc/followed-plan.json"


def test_a_stop_is_waited_for_as_long_as_ours_take() -> None:
    node, gateway = (int(settings(unit_of(kind))["TimeoutStopSec"][0]) for kind in ("node", "gateway"))
    least = node_config({"node_id": "n", "cluster": "c", "cluster_kind": "pd", "role": "decode", "model": "m"})
    assert node > least.drain_timeout_s + ENGINE_STOP_S
    assert gateway > Timeouts().drain_s


def test_a_gateway_says_when_it_serves_and_who_replaces_it() -> None:
    unit = unit_of("gateway")
    assert (settings(unit)["Type"], settings(unit)["NotifyAccess"]) == (["notify"], ["main"])
    assert f"--signal={REPLACE.name} " in unit.read_text()
    names = settings(unit.with_suffix(".socket"))["FileDescriptorName"]
    assert names == [ListenerName.CLIENTS]


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_socket(tmp_path: Path) -> None:
    assert ANALYZE is not None
    unit = unit_of("gateway")
    (tmp_path / unit.name).write_text(re.sub(rf"(?<=ExecStart=){INSTALLED}\S+", sys.executable, unit.read_text()))
    made = tmp_path / f"{unit.stem}.socket"
    made.write_text(unit.with_suffix(".socket").read_text())
    verified = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--generators=no", str(made)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, made.name in verified.stderr) == (0, False), verified.stderr


def test_nodes_have_what_private_devices_and_users_would_take() -> None:
    """Their arenas are of one user in /dev/shm; GPUs and NICs are devices."""
    found = settings(unit_of("node"))
    assert not found.keys() & {"DynamicUser", "PrivateDevices", "ProtectClock", "PrivateIPC", "MemoryDenyWriteExecute"}
    assert f"u {found['User'][0]} " in (FOLDER / "prfaas.sysusers.conf").read_text()


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=NAMES)
def test_systemd_finds_nothing_wrong_and_little_exposed(unit: Path, tmp_path: Path) -> None:
    assert ANALYZE is not None
    # Programs must be there: any will do. So must the instance of a template.
    made = tmp_path / unit.name.replace("@", "@home-d0")
    made.write_text(re.sub(rf"(?<=ExecStart=){INSTALLED}\S+", sys.executable, unit.read_text()))
    verified = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--generators=no", str(made)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, made.name in verified.stderr) == (0, False), verified.stderr
    judged = subprocess.run(
        [ANALYZE, "security", "--offline=true", "--no-pager", f"--threshold={int(MAX_EXPOSURE * 10)}", str(made)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout
