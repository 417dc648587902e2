"""The demo with nodes of one commit and the gateway of another, both ways: `python -m tests.e2e.mixed_versions --other COMMIT`.

Wire, proto and the lines that processes say must fit. Passes if both demos pass: every request answered, tokens those of
`transformers.generate`, nothing left behind. Both commits run with the packages of this environment.
"""

import argparse
import asyncio
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from node.config import NodeConfig
from prfaas.demo.demo import Demo
from prfaas.system.models import ensure_model
from prfaas.system.process import Process
from prfaas.system.system import StartedNode, System
from prfaas.system.topology import DEFAULT_FILE, Topology, load_topology
from transport.control.python_command import SAFE_PATH

ROOT: Final = Path(__file__).resolve().parents[2]
PATH: Final = "PYTHONPATH"


def unpacked(commit: str, into: Path) -> Path:
    """The files of a commit. Raises CalledProcessError if there is no such commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(into, filter="data")
    return into


def check_imports(checkout: Path) -> None:
    """Raises RuntimeError if a process with this path would import a package from elsewhere."""
    code = "import gateway, node, engine, transport; print(*(each.__file__ for each in (gateway, node, engine, transport)))"
    environment = os.environ | {PATH: str(checkout)}
    said = subprocess.run(
        [sys.executable, SAFE_PATH, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    if not all(Path(file).is_relative_to(checkout) for file in said.split()):
        raise RuntimeError(f"packages are not imported from {checkout}: {said}")


class MixedSystem(System):
    """A system whose nodes run from one checkout and whose gateway runs from another."""

    def __init__(self, topology: Topology, run_dir: Path, report: Callable[[str], None], nodes: Path, gateway: Path):
        super().__init__(topology, run_dir, report)
        self._nodes_checkout = nodes
        self._gateway_checkout = gateway

    async def start_node(self, config: NodeConfig) -> StartedNode:
        os.environ[PATH] = str(self._nodes_checkout)  # children inherit it; the gateway starts after all nodes
        return await super().start_node(config)

    async def start_gateway(self) -> Process:
        os.environ[PATH] = str(self._gateway_checkout)
        return await super().start_gateway()


async def demo(nodes: Path, gateway: Path, num_requests: int, state_dir: Path) -> bool:
    """True if the demo's claims held."""
    console = Console(width=160)
    topology = load_topology(DEFAULT_FILE, state_dir).replace_gateway(port=0)
    model_dir = ensure_model(topology.model, state_dir, console.print)

    def system(topology: Topology, run_dir: Path, report: Callable[[str], None]) -> System:
        return MixedSystem(topology, run_dir, report, nodes, gateway)

    return await Demo(topology, model_dir, state_dir, num_requests, console, system).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True, metavar="COMMIT", help="the other commit, beside this checkout")
    parser.add_argument(
        "--requests", type=int, default=110, metavar="N", help="requests of the demo (default: %(default)s)"
    )
    arguments = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory(prefix="mixed-") as folder:
        other = unpacked(arguments.other, Path(folder) / "other")
        for name, nodes, gateway in (("nodes", other, ROOT), ("gateway", ROOT, other)):
            print(f"=== {name} of {arguments.other}", flush=True)
            check_imports(other)
            check_imports(ROOT)
            held = asyncio.run(demo(nodes, gateway, arguments.requests, Path(folder) / "state"))
            print(f"=== {name} of {arguments.other}: {'passed' if held else 'FAILED'}", flush=True)
            passed &= held
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
