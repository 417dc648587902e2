"""Mooncake's Transfer Engine and NIXL behind the interface of batch. They run where they are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from transport.batch.engine import BatchEngine, BatchTransfer
from transport.batch.mooncake import MooncakeBatch
from transport.batch.nixl import NixlBatch
from transport.batch.registered import Region, Regions, address_of, check_open
from transport.errors import BackendMissing, LocalProtocolError

MODULES = {"mooncake": "mooncake", "nixl": "nixl_cu12"}


@pytest.mark.parametrize("name", MODULES)
def test_a_foreign_engine_writes_and_reads_through_our_interface(name: str) -> None:
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"{MODULES[name]} is not installed (extra {name})")
    environment = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp", "MC_LOG_LEVEL": "FATAL", **os.environ}
    command = [sys.executable, "-m", "tests.transport.batch.backend_ends", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.stdout.rstrip().endswith("ok"), done.stdout + done.stderr


@pytest.mark.parametrize(("backend", "module"), [(MooncakeBatch, "mooncake.engine"), (NixlBatch, "nixl_cu12._api")])
def test_what_is_missing_is_named(
    backend: type[MooncakeBatch] | type[NixlBatch], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendMissing, match=r"pip install \"prfaas\[(mooncake|nixl)\]\""):
        backend()


def test_all_backends_are_one_interface() -> None:
    with BatchEngine() as engine:
        same: BatchTransfer = engine
        assert same is engine
    for backend in (MooncakeBatch, NixlBatch):
        assert all(hasattr(backend, name) for name in vars(BatchTransfer) if not name.startswith("_"))


def test_regions_know_what_lies_in_them() -> None:
    memory = memoryview(bytearray(100))
    regions = Regions()
    regions.add("kv", Region(address_of(memory), 100, memory))
    assert regions.address_of(memory[10:20]) == address_of(memory) + 10
    with pytest.raises(LocalProtocolError, match="no registered memory"):
        regions.address_of(memoryview(bytearray(100)))
    with pytest.raises(LocalProtocolError, match="already"):
        regions.add("kv", Region(0, 1, memory))
    assert regions.remove("kv") is not None
    assert regions.remove("kv") is None


def test_rights_that_cannot_be_kept_are_not_promised() -> None:
    check_open("kv", remote_read=True, remote_write=True, backend="X")
    with pytest.raises(ValueError, match="X cannot forbid"):
        check_open("kv", remote_read=False, remote_write=True, backend="X")
