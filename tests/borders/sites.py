"""Two sites as an operator makes them: `prfaas init`, a look over its files, and a process on each machine.

home    a gateway, two decode nodes, a client          away    a node that prefills
"""

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import msgspec

from engine.byte_tokenizer import save_byte_tokenizer
from prfaas.system.process import ENVIRONMENT
from tests.borders.network import Machine, Network, run
from transport.control.python_command import python_module

GATEWAY, CLIENT, FIRST, SECOND, AWAY = "gateway", "client", "home-d0", "home-d1", "remote-p0"
ADDRESSES: Final = {
    GATEWAY: "10.77.1.10",
    CLIENT: "10.77.1.11",
    FIRST: "10.77.1.20",
    SECOND: "10.77.1.21",
    AWAY: "10.77.2.20",
}
NODES: Final = {FIRST: "pd_cluster", SECOND: "pd_cluster", AWAY: "prfaas_cluster"}
API_PORT: Final = 8000
METRICS_PORT: Final = 7301
THRESHOLD_TOKENS: Final = 256
BLOCK_SIZE: Final = 64
ARCH: Final = "kimi_linear"
PROFILE: Final = Path(__file__).parents[2] / "configs" / "profiles" / "internal-1t.json"
TENANT: Final = "zebra-clinic-77"
START_S: Final = 90.0
STOP_S: Final = 20.0
POLL_S: Final = 0.05

# A tiny system in place of one that fills machines.
OF_NODES: Final = f"""
engine = "emulated"
engine_args = ["--decode-step-s", "0.02"]
transport = "tcp"                                # all machines are on one host
block_size = {BLOCK_SIZE}
drain_timeout_s = 10
"""
# Beside the gateway: the plan service speaks HTTP, so it stays on one machine with those that ask it.
OF_GATEWAY: Final = """
[gateway.plan]
url = "http://127.0.0.1:8100"
token_file = "plan.token"

[gateway.classes.bulk]
priority = -10
"""
OF_PLAN: Final = f"""
[plan]
gateways = ["https://{ADDRESSES[GATEWAY]}:{API_PORT}"]
gateway_key_file = "operator.key"
token_file = "plan.token"
state_dir = "plan"
profile = "{PROFILE}"
pd_hardware = "h20x8"
prfaas_hardware = "h200x8"
egress_gbps = 100
"""


def write_model(directory: Path) -> Path:
    """Something with a tokenizer that emulated engines take for a model."""
    directory.mkdir()
    (directory / "config.json").write_bytes(msgspec.json.encode({"model_type": ARCH}))
    save_byte_tokenizer(directory, 32768)
    return directory


@dataclass(slots=True)
class FirstFiles:
    """What `prfaas init` has written, and the keys that it has shown."""

    folder: Path
    tenant_key: str
    operator_key: str
    prometheus_key: str
    plan_token: str
    is_plain: bool


def write_files(folder: Path, model: Path, *, plain: bool) -> FirstFiles:
    hosts = {"--gateway": ADDRESSES[GATEWAY], "--remote": ADDRESSES[AWAY]}
    hosts |= {"--decode": f"{ADDRESSES[FIRST]},{ADDRESSES[SECOND]}", "--model": str(model)}
    arguments = [part for pair in hosts.items() for part in pair]
    done = subprocess.run(
        [*python_module("prfaas"), "init", str(folder), "--yes", *arguments, *(["--plain"] if plain else [])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tenant_key, operator_key = re.findall(r"sk-prfaas-[\w-]+", done.stdout)
    for name in NODES:
        path = folder / f"{name}.toml"
        before = re.sub(r"cache_bytes = \d+", f"cache_bytes = {32 << 20}", path.read_text())
        path.write_text(before + OF_NODES + f'run_dir = "{folder}"\n')
    path = folder / "gateway.toml"
    text = path.read_text().replace("gateway.tenants.first", f"gateway.tenants.{TENANT}")
    text = text.replace("threshold_tokens = 2048", f"threshold_tokens = {THRESHOLD_TOKENS}")
    path.write_text(text + OF_GATEWAY)
    token = secrets.token_urlsafe()
    (folder / "plan.token").write_text(token)
    (folder / "operator.key").write_text(operator_key)
    (folder / "plan.toml").write_text(OF_PLAN)
    return FirstFiles(folder, tenant_key, operator_key, (folder / "prometheus.key").read_text().strip(), token, plain)


@dataclass(slots=True)
class Sites:
    """The running processes."""

    files: FirstFiles
    network: Network
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._stop)
            for name, module in NODES.items():
                self._start(name, module)
            self._start(GATEWAY, "gateway")
            for name in NODES:
                self._wait(name, "node ready ")
            self._wait(GATEWAY, "gateway ready ")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def machine(self, name: str) -> Machine:
        return self.network.machines[name]

    def log(self, name: str) -> Path:
        return self.files.folder / f"{name}.out"

    def prfaas(self, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """What a command of ours says that an operator runs where the gateway is."""
        done = run(self.machine(GATEWAY), [*python_module("prfaas"), *arguments], environment)
        assert done.returncode == 0, f"prfaas {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def kill(self, name: str) -> None:
        """kill -9 of a node: the agent, and its engine with it."""
        agent = self.processes[name]
        children = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=False)
        for pid in (agent.pid, *map(int, children.stdout.split())):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def start_again(self, name: str) -> None:
        """A node that has ended."""
        self._start(name, NODES[name])
        self._wait(name, "node ready ")

    def start_plan(self) -> None:
        """The plan service, on the gateway's machine."""
        trust = {"SSL_CERT_FILE": str(self.files.folder / "certificates" / "authority.pem")}
        self._start("plan", "planner", "serve", on=GATEWAY, environment=trust)
        self._wait("plan", "plan service ready ")

    def _start(
        self,
        name: str,
        module: str,
        *arguments: str,
        on: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = [*python_module(module), *arguments, "-c", str(self.files.folder / f"{name}.toml")]
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*self.machine(on or name).enter, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )  # fmt: skip

    def _wait(self, name: str, line: str) -> None:
        deadline = time.monotonic() + START_S
        while line not in (said := self.log(name).read_text()):
            assert self.processes[name].poll() is None, f"{name} has ended: {said[-3000:]}"
            assert time.monotonic() < deadline, f"{name} is not there after {START_S:.0f} s: {said[-3000:]}"
            time.sleep(POLL_S)

    def _stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
