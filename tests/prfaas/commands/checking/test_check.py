"""`prfaas check` before a real node with an emulated engine, and without one."""

import asyncio
import io
import json
from pathlib import Path

import pytest
import tomli_w
from rich.console import Console

from gateway.config.gateway import GatewayConfig, NodeAddress
from prfaas.commands.checking.check import check, look
from prfaas.errors import CheckError
from tests.node.running import config, running_node
from tests.transport.path.ports import free_port
from transport.control.certificates import Authority
from transport.peers.name import PeerName, PeerRole


def gateway_file(folder: Path, agents: list[str]) -> Path:
    file = folder / "gateway.toml"
    nodes = [{"agent": agent} for agent in agents]
    file.write_text(tomli_w.dumps({"gateway": {"tokenizer_dir": ".", "nodes": nodes}}))
    return file


async def _look_at(tmp_path: Path, dead: str) -> tuple[bool, list[dict[str, str]], bool, str]:
    json_said, said = io.StringIO(), io.StringIO()
    async with running_node(config(tmp_path, node_id="d0")) as node:
        well = await check(gateway_file(tmp_path, [node.address]), Console(file=json_said, width=200), as_json=True)
        file = gateway_file(tmp_path, [node.address, dead])
        ill = await check(file, Console(file=said, width=200), as_json=False)
        assert not (await node.describe()).pool.reservations
    return well, json.loads(json_said.getvalue()), ill, said.getvalue()


def test_a_node_that_is_there_and_one_that_is_not(tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    well, found, ill, said = asyncio.run(_look_at(tmp_path, dead))
    assert well  # without a prefill node that is only a warning
    levels = {each["about"]: each["level"] for each in found}
    assert levels == {"d0": "ok", "roles": "warning", "layout": "ok", "version": "ok", "clocks": "ok", "ports": "ok"}
    assert not ill
    assert dead in said
    assert "no answer: unreachable" in said
    assert "1 errors, 1 warnings" in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="no such file"):
        asyncio.run(check(tmp_path / "none.toml", Console(file=io.StringIO()), as_json=False))


def test_a_file_with_two_uses_is_looked_at_once(tmp_path: Path) -> None:
    identity = Authority(tmp_path).issue("gateway", peer=PeerName("prfaas", "west", PeerRole.GATEWAY, "gateway"))
    config = GatewayConfig(
        tokenizer_dir=tmp_path,
        nodes=(NodeAddress(agent=f"127.0.0.1:{free_port()}"),),
        certificate=identity.certificate,
        key=identity.key,
        authority=identity.authority,
        tls_certificate=identity.certificate,
        tls_key=identity.key,
    )
    looked_at = [each.path for each in asyncio.run(look(config)).certificates]
    assert looked_at == [str(identity.certificate), str(identity.authority)]
