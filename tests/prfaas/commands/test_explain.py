import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gateway.auth.keyring import digest_of
from gateway.config.tenants import TenantConfig
from prfaas.cli import main
from prfaas.commands.asking import KEY_VARIABLE, GatewayClient
from prfaas.commands.explain import ExplainWish, ask, show
from prfaas.errors import AskError
from tests.gateway.layouts import LAYOUT
from tests.gateway.worlds import on_loop, until, world
from transport.control.proto import node_pb2 as pb


def shown(found: dict) -> str:
    page = io.StringIO()
    show(found, Console(file=page, width=160))
    return page.getvalue()


@on_loop
async def test_a_gateway_explains_bodies_prompts_and_lengths(tmp_path: Path) -> None:
    async with world(remote=2) as w:
        gateway = GatewayClient(w.gateway.url)

        async def asked(**fields: object) -> dict:
            return await asyncio.to_thread(ask, gateway, ExplainWish(**fields))

        text = shown(await asked(tokens=1000))
        assert "1000 tokens to /v1/completions, class default, plan none\nprefill on r0, decode on d0 (long)\n" in text
        assert "→ r0" in text
        assert "no sooner than r0" in text
        assert "stays in west" in shown(await asked(prompt="hello there"))
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}))
        assert "/v1/chat/completions" in shown(await asked(file=str(body)))
        for node in w.nodes.decode:
            node.become(pb.NODE_STATE_DRAINING)
        known = w.gateway.clusters
        assert await known.wait_for(lambda: not known.is_ready, 60)
        text = shown(await asked(prompt="hello there"))
        assert "refused with 503 no_decode_node, to come again after 1.0 s" in text
        assert "left out: d0 of west (decode): it is draining" in text
        with pytest.raises(AskError, match=r"says 400: .*does not exist|says 404"):
            await asked(prompt="hello", model="another")


@on_loop
async def test_an_operators_key_is_all_that_a_length_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-operator")
    tenants = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
    async with world(tenants=tenants, operator_keys=(digest_of("sk-operator"),)) as w:
        for tenant in (None, "acme"):
            found = await asyncio.to_thread(ask, GatewayClient(w.gateway.url), ExplainWish(tokens=1000, tenant=tenant))
            assert found["verdict"]["accepted"]


def test_where_no_gateway_is_that_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["explain", "-u", "http://127.0.0.1:1", "--tokens", "5"]) == 2
    assert "no gateway answers at http://127.0.0.1:1: Connection refused\n" in capsys.readouterr().err
    assert main(["explain", "-u", "127.0.0.1:1", "--tokens", "5"]) == 2
    assert "must be an http(s) URL" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json: No such file" in capsys.readouterr().err


@on_loop
async def test_the_share_of_each_revision_is_shown() -> None:
    async with world(remote=2, local=1, decode=2) as w:
        for node in (w.nodes.remote[0], w.nodes.decode[0]):
            node.layout = replace(LAYOUT, block_size=32)
            node.become(pb.NODE_STATE_READY)
            known = w.clusters.by_id(node.node_id)
            await until(lambda known=known, node=node: known.info.layout_fingerprint == node.layout.fingerprint)
        text = shown(await asyncio.to_thread(ask, GatewayClient(w.gateway.url), ExplainWish(tokens=1000)))
        assert "by decode and remote prefill: drawn by its share\n" in text
        for layout in (LAYOUT, node.layout):
            (line,) = [line for line in text.splitlines() if line[2:].startswith(layout.fingerprint[:12])]
            assert "50%" in line
