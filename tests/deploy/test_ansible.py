"""The playbook: it names files that are there, keeps secrets, and restarts what has changed, one node after the other.

Runs of it need `ansible-playbook`, and go to a folder. A stand-in for systemctl writes down what it is asked for.
"""

import base64
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from prfaas.commands.init import InitSite, init, members

ROOT: Final = Path(__file__).parent.parent.parent
FOLDER: Final = ROOT / "deploy" / "ansible"
ROLE: Final = FOLDER / "roles" / "prfaas"
TASKS: Final = sorted((ROLE / "tasks").glob("*.yml"))
SYSTEMD: Final = ROOT / "deploy" / "systemd"
PLAYBOOK: Final = os.environ.get("ANSIBLE_PLAYBOOK") or shutil.which("ansible-playbook") or ""
needs_ansible = pytest.mark.skipif(not PLAYBOOK, reason="no ansible-playbook: ANSIBLE_PLAYBOOK names it")
RUN_S: Final = 600.0  # a run takes half a minute, and many times that beside other suites

SITE: Final = InitSite(model="m", gateway="127.0.0.4", decode=("127.0.0.2",), remote=("127.0.0.3",), tls=True)
SYSTEMCTL: Final = """#!%s -S
import sys
from pathlib import Path

folder = Path(__file__).parent / "units"
words = [word for word in sys.argv[1:] if not word.startswith("-")]
action, unit = words[0], words[1].removesuffix(".service") if len(words) > 1 else ""
state = folder / unit
if action == "show":
    process = state.read_text() if state.exists() else "0"
    active = "active" if process != "0" else "inactive"
    print("LoadState=loaded", "ActiveState=" + active, "MainPID=" + process, sep="\\n")
elif action == "is-enabled":
    enabled = (folder / (unit + ".enabled")).exists()
    print("enabled" if enabled else "disabled")
    sys.exit(not enabled)
else:
    if action == "enable":
        (folder / (unit + ".enabled")).touch()
    if action in ("start", "restart", "kill"):
        state.write_text(str(int(state.read_text() if state.exists() else "0") + 1))
    with (folder.parent / "log").open("a") as log:
        print(" ".join(sys.argv[1:]).replace("'", ""), file=log)
"""


def tasks_of(file: Path) -> Iterator[dict[str, Any]]:
    """All tasks of a file, those in its blocks included."""
    left = yaml.safe_load(file.read_text())
    while left:
        task = left.pop(0)
        yield task
        left += task.get("block", [])


def all_tasks() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((file.name, task) for file in TASKS for task in tasks_of(file))


def plays() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load((FOLDER / "site.yml").read_text())
    return loaded


def copies() -> list[dict[str, Any]]:
    return [task for _, task in all_tasks() if "ansible.builtin.copy" in task]


def test_files_that_it_names_are_there() -> None:
    text = "".join(file.read_text() for file in TASKS)
    units = {name for name in re.findall(r"[\w@.-]+\.(?:service|socket|sysusers\.conf)\b", text) if "/" not in name}
    assert units == {each.name for each in SYSTEMD.iterdir()}
    files = {
        each for _, task in all_tasks() for key, each in task.items() if key.endswith(("import_tasks", "include_tasks"))
    }
    entries = {f"{task['ansible.builtin.import_role']['tasks_from']}.yml" for play in plays() for task in play["tasks"]}
    assert files | entries == {file.name for file in TASKS}


def test_ansible_core_alone_has_all_modules() -> None:
    keywords = {
        "name", "block", "vars", "tags", "when", "loop", "loop_control", "register", "until", "delay", "retries",
        "changed_when", "check_mode", "environment", "args", "no_log", "delegate_to", "become",
    }  # fmt: skip
    for file, task in all_tasks():
        assert all(key.startswith("ansible.builtin.") for key in task.keys() - keywords), (file, task["name"])


def test_settings_are_for_their_user_alone() -> None:
    inside = [each for each in copies() if "prfaas_settings" in each["ansible.builtin.copy"]["dest"]]
    assert len(inside) == 6
    assert {each["ansible.builtin.copy"]["mode"] for each in inside} == {"0600"}
    assert {each["ansible.builtin.copy"]["owner"] for each in inside} == {"{{ prfaas_user }}"}


def test_no_secret_is_shown() -> None:
    secret = re.compile(r"\.key\b|secret|digest")
    found = [each for each in copies() if secret.search(str(each["ansible.builtin.copy"]) + str(each.get("loop", "")))]
    assert sorted(each["name"] for each in found if each.get("no_log")) == [
        "Put keys of certificates in place", "Put secrets in place", "Write down what it runs with",
    ]  # fmt: skip
    assert all(each.get("no_log") for each in found)


def test_machines_follow_each_other_and_a_failure_ends_the_run() -> None:
    assert [play.get("serial") for play in plays()] == [None, 1, 1, 1]
    assert all(play["any_errors_fatal"] for play in plays())
    assert [play["hosts"] for play in plays()[1:]] == ["nodes", "gateways", "plan_services"]


def test_a_socket_is_written_for_the_port_of_a_new_site(tmp_path: Path) -> None:
    init(SITE, tmp_path, overwrite=False, say=lambda line: None)
    port = re.search(r"^port = (\d+)", (tmp_path / "gateway.toml").read_text(), re.MULTILINE)
    assert port is not None
    assert f":{port[1]}\n" in (SYSTEMD / "prfaas-gateway.socket").read_text()


def test_the_example_is_of_a_site_that_init_writes() -> None:
    groups = yaml.safe_load((FOLDER / "inventory.example.yml").read_text())
    assert set(groups) == {"all", *(play["hosts"] for play in plays()[1:])}
    machines = groups["nodes"]["hosts"].values()
    site = InitSite(model="m", gateway="10.0.0.1", decode=("10.0.0.2",), remote=("10.1.0.1", "10.1.0.2"))
    written = {(node.name, node.host) for node in members(site)}
    assert {(name, each["ansible_host"]) for each in machines for name in each["prfaas_nodes"]} == written


class HealthPort(ThreadingHTTPServer):
    """Of a process that is well, or is not."""

    is_well = True


class HealthPage(BaseHTTPRequestHandler):
    """What such a port answers."""

    def do_GET(self) -> None:
        assert isinstance(self.server, HealthPort)
        self.send_response(200 if self.server.is_well else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def health_port(host: str, certificate: Path) -> Iterator[HealthPort]:
    with HealthPort((host, 0), HealthPage) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def change(file: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE)
    assert count == 1
    file.write_text(changed)


def a_wheel(folder: Path, version: str) -> Path:
    """Of a product with our commands, which do nothing."""
    info = f"prfaas-{version}.dist-info"
    files = {
        "product.py": "def main() -> int:\n    return 0\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: prfaas\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nprfaas = product:main\nprfaas-plan = product:main\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(text)}\n" for name, text in files.items())
    wheel = folder / f"prfaas-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return wheel


@dataclass
class Trial:
    """A site, a machine `here` of a decode node, gateway and plan service, and `away`, of a prefill node."""

    folder: Path
    read: int = field(default=0, init=False)  # lines of the stand-in's log
    ports: dict[str, HealthPort] = field(default_factory=dict, init=False)

    @property
    def site(self) -> Path:
        return self.folder / "site"

    def settings(self, machine: str) -> Path:
        return self.folder / machine / "etc/prfaas"

    def run(self, wheel: Path, *arguments: str, fails: bool = False) -> dict[str, int]:
        """How many tasks changed something, by machine. Raises AssertionError for a run that ends otherwise."""
        user = {"prfaas_user": self.folder.owner(), "prfaas_admin": self.folder.owner()}
        inventory = {
            "all": {"vars": {
                "ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable,
                "prfaas_site": str(self.site), "prfaas_wheel": str(wheel), "prfaas_python": sys.executable,
                "prfaas_root": f"{self.folder}/{{{{ inventory_hostname }}}}", **user,
                "prfaas_pip_arguments": "--no-index --no-deps", "prfaas_extras_by_group": {},
                "prfaas_node_ready_within_s": 4, "prfaas_service_ready_within_s": 10,
            }},
            "nodes": {"hosts": {"away": {"prfaas_nodes": ["remote-p0"]}, "here": {"prfaas_nodes": ["home-d0"]}}},
            "gateways": {"hosts": {"here": None}},
            "plan_services": {"hosts": {"here": None}},
        }  # fmt: skip
        file = self.folder / "inventory.yml"
        file.write_text(yaml.safe_dump(inventory))
        environment = {
            **os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_PIPELINING": "1",
            "HOME": str(self.folder),
        }  # fmt: skip
        command = [PLAYBOOK, "-i", str(file), str(FOLDER / "site.yml"), "--skip-tags", "users", *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=RUN_S, cwd=self.folder
        )
        assert (done.returncode != 0) is fails, done.stdout[-6000:] + done.stderr[-2000:]
        return {name: int(count) for name, count in re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+)", done.stdout, re.M)}

    def asked(self) -> list[str]:
        """What systemctl was asked for since the last look, beside reading units and enabling them."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        new, self.read = lines[self.read :], len(lines)
        return [line for line in new if not line.startswith(("daemon-reload", "enable"))]


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    init(SITE, made.site, overwrite=False, say=lambda line: None)
    (tmp_path / "units").mkdir()
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL % sys.executable)
    systemctl.chmod(0o755)
    (made.site / "profiles").mkdir()
    (made.site / "profiles/mine.json").write_text("{}")
    change(made.site / "plan.toml", r"^# profile = .*", 'profile = "profiles/mine.json"')
    with ExitStack() as stack:
        for host, name, key in (
            ("127.0.0.2", "home-d0", "metrics_port"), ("127.0.0.3", "remote-p0", "metrics_port"),
            ("127.0.0.4", "gateway", "port"), ("127.0.0.4", "plan", "port"),
        ):  # fmt: skip
            certificate = made.site / "certificates" / f"{'planner' if name == 'plan' else name}.pem"
            made.ports[name] = stack.enter_context(health_port(host, certificate))
            change(made.site / f"{name}.toml", rf"^{key} = \d+", f"{key} = {made.ports[name].server_port}")
        pair = 'tls_certificate = "certificates/gateway.pem"\ntls_key = "certificates/gateway.key"'
        change(made.site / "gateway.toml", r"^names_secret", f"{pair}\nnames_secret")
        yield made


@needs_ansible
def test_ansible_reads_it() -> None:
    inventory = str(FOLDER / "inventory.example.yml")
    subprocess.run([PLAYBOOK, "-i", inventory, str(FOLDER / "site.yml"), "--syntax-check"], check=True, timeout=RUN_S)


@needs_ansible
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize(("sign", "is_refused"), [("", True), ("# ", False)], ids=["named", "in a comment"])
def test_keys_that_the_unit_no_longer_hands_over_are_refused_first(tmp_path: Path, sign: str, is_refused: bool) -> None:
    said = f'[plan]\nprofile = "p.json"\n{sign}gateway_key_file = "$CREDENTIALS_DIRECTORY/operator.key"\n'
    tasks = [{"ansible.builtin.import_tasks": str(ROLE / "tasks/plan.yml")}]
    play = {"hosts": "localhost", "gather_facts": False, "vars": {"prfaas_plan_text": said}, "tasks": tasks}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    command = [PLAYBOOK, "-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S, cwd=tmp_path)
    assert ('gateway_key_file = \\"plan.key\\"' in done.stdout) is is_refused
    assert ("Make folders of settings" in done.stdout) is not is_refused


@needs_ansible
@pytest.mark.timeout(5 * RUN_S)
def test_it_installs_a_site_and_then_restarts_what_has_changed(trial: Trial) -> None:
    wheel = a_wheel(trial.folder, "1.0")
    assert all(trial.run(wheel, "--check").values())
    assert not (trial.folder / "here").exists()
    assert trial.asked() == []

    trial.run(wheel)
    assert trial.asked() == [
        "start prfaas-node@remote-p0", "start prfaas-node@home-d0", "start prfaas-gateway", "start prfaas-plan",
    ]  # fmt: skip
    found = {path for path in trial.settings("away").rglob("*") if path.is_file()}
    assert {path.name for path in found if path.suffix == ".key"} == {"remote-p0.key"}
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in trial.settings("here").rglob("*.key")} == {0o600}
    command = trial.folder / "here/opt/prfaas/.venv/bin/prfaas"
    assert command.read_text().splitlines()[0] == f"#!{command.parent}/python"
    subprocess.run([command], check=True, timeout=RUN_S)

    assert trial.run(wheel) == {"away": 0, "here": 0}
    assert trial.asked() == []

    settings = trial.settings("here")
    for name in ("plan.toml", "plan.key", "profiles/mine.json", "certificates/planner.key"):
        assert (settings / name).read_bytes() == (trial.site / name).read_bytes()

    # Of these two files a process reads the first by itself.
    (trial.site / "certificates/revoked").write_text("remote-p7\n")
    (trial.site / "names.secret").write_text("another\n")
    change(trial.site / "remote-p0.toml", r"^cache_bytes = \d+", "cache_bytes = 2147483648")
    (trial.site / "profiles/mine.json").write_text("{ }")
    trial.run(wheel)
    assert (trial.settings("here") / "certificates/revoked").read_text() == "remote-p7\n"
    assert trial.asked() == [
        "restart prfaas-node@remote-p0", "reload prfaas-node@home-d0", "reload prfaas-gateway", "restart prfaas-plan",
    ]  # fmt: skip

    # The first node does not come up: the others keep what they have, and the next run begins with it again.
    newer = a_wheel(trial.folder, "1.1")
    trial.ports["remote-p0"].is_well = False
    trial.run(newer, fails=True)
    assert trial.asked() == ["restart prfaas-node@remote-p0"]
    assert (trial.folder / "here/opt/prfaas/.venv").readlink().name.startswith("prfaas-1.0")
    trial.ports["remote-p0"].is_well = True
    trial.run(newer)
    assert trial.asked() == [
        "restart prfaas-node@remote-p0", "restart prfaas-node@home-d0",
        "kill --kill-whom=main --signal=SIGUSR2 prfaas-gateway", "restart prfaas-plan",
    ]  # fmt: skip
