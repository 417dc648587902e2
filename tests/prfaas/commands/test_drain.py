"""`prfaas drain --node` before a real node with an emulated engine."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prfaas.cli import main
from prfaas.commands.drain import DrainWish, drain_node
from prfaas.errors import ConversionError
from tests.node.running import alone, config, running_node
from tests.node.test_agent import reserve_request
from transport.control.proto import node_pb2 as pb


def file_for(folder: Path, *addresses: str) -> Path:
    nodes = [{"agent": address} for address in addresses]
    (folder / "gateway.toml").write_text(tomli_w.dumps({"gateway": {"tokenizer_dir": ".", "nodes": nodes}}))
    return folder / "gateway.toml"


def test_a_drained_node_takes_requests_again_and_logs_who_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("LOGNAME", "ann")

    async def scenario() -> None:
        async with running_node(config(tmp_path, node_id="d0")) as node:
            file, said = file_for(tmp_path, node.address), []

            async def drain(**wish: Any) -> bool:
                return await drain_node(DrainWish(node="d0", **wish), file, said.append)

            ticket = await node.stub.Reserve(reserve_request(1))
            assert await drain()
            assert said == ["d0: takes nothing new; requests still run"]
            assert not await drain(timeout_s=0.05)
            assert (await node.describe()).state == pb.NODE_STATE_DRAINING
            waiting = asyncio.create_task(drain(timeout_s=60.0))
            while caplog.text.count("draining node=d0 by=ann@") < 3:  # noqa: ASYNC110 no event tells
                await asyncio.sleep(0.01)
            assert await drain(undo=True)
            assert not await waiting
            assert said[-2:] == ["d0: takes requests again", "d0: takes nothing new; undone"]
            assert "taking requests again node=d0 by=ann@" in caplog.text
            assert (await node.describe()).state == pb.NODE_STATE_READY
            await node.stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))
            await node.prefill(list(range(40)))  # its engine takes them, too
            assert await drain(undo=True)  # as it is

    alone(scenario())


def test_a_node_that_is_about_to_end_does_not_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(config(tmp_path, node_id="d0")) as node:
            await node.agent.draining.for_good(0.0)
            said: list[str] = []
            assert not await drain_node(DrainWish(node="d0", undo=True), file_for(tmp_path, node.address), said.append)
            assert "d0 is about to end" in said[0]

    alone(scenario())


def test_what_is_to_be_drained_is_one_thing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["drain"], ["drain", "east:west", "--node", "d0"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
    assert main(["drain", "--node", "d0", "-c", str(tmp_path / "none.toml")]) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(ConversionError, match="does not answer"):
        asyncio.run(drain_node(DrainWish(node="127.0.0.1:1"), file_for(tmp_path, "127.0.0.1:1"), print))
