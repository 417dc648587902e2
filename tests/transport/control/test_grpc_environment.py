"""A control port speaks nothing older than TLS 1.3, and a look at it finds that out."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from planner.commands.cli import main as plan
from prfaas.cli import main as command
from transport.control.certificates import Authority
from transport.control.credentials import server_certificate, takes_old_tls
from transport.control.grpc_environment import CIPHER_SUITES, SETTINGS, for_grpc
from transport.control.python_command import SAFE_PATH
from transport.wire.identity import Identity

PATIENCE_S = 20.0
SERVER = """
import asyncio, sys
from pathlib import Path
import grpc.aio
from transport.control.credentials import server_credentials
from transport.wire.identity import Identity

async def serve(certificate, key, authority):
    server = grpc.aio.server()
    identity = Identity(certificate=Path(certificate), key=Path(key), authority=Path(authority))
    print(server.add_secure_port("127.0.0.1:0", server_credentials(identity)), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)

asyncio.run(serve(*sys.argv[1:]))
"""


@contextmanager
def control_port(identity: Identity, environment: Mapping[str, str]) -> Iterator[str]:
    """gRPC reads its environment as it is imported: in a process of its own."""
    files = [str(path) for path in (identity.certificate, identity.key, identity.authority)]
    server = subprocess.Popen(
        [sys.executable, SAFE_PATH, "-c", SERVER, *files],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        yield f"127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.communicate()


@pytest.mark.parametrize("environment", [SETTINGS, {}], ids=["ours", "without it"])
def test_only_with_our_environment_a_control_port_refuses_tls_1_2(
    environment: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CIPHER_SUITES, raising=False)
    authority = Authority(tmp_path)
    node, gateway = authority.issue("node", ["127.0.0.1"]), authority.issue("gateway")
    with control_port(node, environment) as address:
        shown = asyncio.run(server_certificate(address, replace(gateway, peer_name="node"), PATIENCE_S))
        assert shown.peer.problem  # of this authority, without a name of ours: TLS 1.3 is spoken
        assert asyncio.run(takes_old_tls(address, gateway, PATIENCE_S)) is (CIPHER_SUITES not in environment)


def test_what_an_environment_says_holds() -> None:
    assert for_grpc({}) == dict(SETTINGS)
    assert CIPHER_SUITES not in for_grpc({CIPHER_SUITES: "mine"})


@pytest.mark.parametrize("main", [command, plan])
def test_every_command_sets_it_before_it_loads_grpc(
    main: Callable[[Sequence[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in SETTINGS:
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert {key: os.environ.get(key) for key in SETTINGS} == dict(SETTINGS)
