"""`prfaas convert` before real nodes with emulated engines."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest
import tomli_w

from planner.decisions.views import Role
from prfaas.commands.convert import ConvertWish, convert
from prfaas.errors import ConversionError
from tests.node.running import RunningNode, config, new_runner, running_node
from tests.node.test_agent import reserve_request
from transport.control.proto import node_pb2 as pb

T = TypeVar("T")
PATIENCE_S = 100.0


class Site:
    """Two decode nodes, a file that names them, and what has been said about them."""

    def __init__(self, runner: asyncio.Runner, nodes: list[RunningNode], file: Path) -> None:
        self._runner = runner
        self.nodes = nodes
        self.file = file
        self.said: list[str] = []

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(PATIENCE_S):
                return await scenario

        return self._runner.run(bounded())

    def convert(self, node: str, to: Role, **options: Any) -> bool:
        self.said.clear()
        return self.run(convert(ConvertWish(node=node, role=to, **options), self.file, self.said.append))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("site")
    with new_runner() as runner:
        stack = AsyncExitStack()

        async def start(name: str) -> RunningNode:
            return await stack.enter_async_context(running_node(config(home, node_id=name)))

        nodes = [runner.run(start(name)) for name in ("d0", "d1")]
        agents = [{"agent": node.address} for node in nodes]
        (home / "gateway.toml").write_text(tomli_w.dumps({"gateway": {"tokenizer_dir": ".", "nodes": agents}}))
        yield Site(runner, nodes, home / "gateway.toml")
        runner.run(stack.aclose())


@pytest.fixture
def site(running: Site) -> Iterator[Site]:
    yield running
    for node in ("d0", "d1"):
        running.convert(node, Role.DECODE, force=True)


def test_it_tells_what_came_of_it(site: Site) -> None:
    assert site.convert("d0", Role.PREFILL)
    assert site.said[0].startswith("d0: decode -> prefill, epoch ")
    assert site.said[-1].startswith("d0: is a prefill node now (")
    assert site.convert("d0", Role.PREFILL)
    assert site.said[-1] == "d0: is a prefill node already"


def test_the_last_node_of_a_role_is_not_taken_by_mistake(site: Site) -> None:
    assert site.convert(site.nodes[1].address, Role.PREFILL)
    with pytest.raises(ConversionError, match="d0 is the last decode node of west that is ready; --force"):
        site.convert("d0", Role.PREFILL)
    assert site.convert("d0", Role.PREFILL, force=True)


def test_a_node_that_nobody_knows_is_named_beside_those_that_are_known(site: Site) -> None:
    with pytest.raises(ConversionError, match="d7: no such node, or it does not answer; these nodes do: d0, d1"):
        site.convert("d7", Role.PREFILL)


def test_what_does_not_end_is_told(site: Site) -> None:
    (node, _) = site.nodes
    ticket = site.run(_reserve(node))
    assert not site.convert("d0", Role.PREFILL, drain_timeout_s=3.0)
    assert any("d0: drains since" in line for line in site.said)
    assert "d0: drain_timeout: requests still ran after" in site.said[-1]
    assert site.said[-1].endswith("; it is a decode node as before")
    site.run(_abort(node, ticket))


async def _reserve(node: RunningNode) -> pb.Ticket:
    ticket: pb.Ticket = await node.stub.Reserve(reserve_request(3))
    return ticket


async def _abort(node: RunningNode, ticket: pb.Ticket) -> None:
    await node.stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="no such file"):
        asyncio.run(convert(ConvertWish(node="d0", role=Role.DECODE), tmp_path / "none.toml", print))


def test_a_node_whose_epochs_are_used_up_is_named_and_nothing_is_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = site.nodes[0].agent.conversions.report

    def poisoned() -> pb.Conversion:
        conversion = report()
        conversion.epoch = 2**64 - 1
        return conversion

    monkeypatch.setattr(site.nodes[0].agent.conversions, "report", poisoned)
    with pytest.raises(
        ConversionError, match="d0: its newest command has epoch 18446744073709551615, and no higher one"
    ):
        site.convert("d0", Role.PREFILL, force=True)


def test_an_epoch_that_leaps_is_refused_by_the_node(site: Site) -> None:
    async def leap() -> None:
        await site.nodes[0].stub.Convert(pb.ConvertRequest(epoch=2**64 - 1, role="prefill"))

    with pytest.raises(grpc.aio.AioRpcError, match="is too far ahead of"):
        site.run(leap())
    assert site.convert("d0", Role.PREFILL)


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    keys = {"certificate": "g.pem", "key": "g.key", "authority": "a.pem"}
    nodes = [{"agent": "127.0.0.1:1"}]
    file.write_text(tomli_w.dumps({"gateway": {"tokenizer_dir": ".", "nodes": nodes, **keys}}))
    with pytest.raises(ConversionError, match="no such file"):
        asyncio.run(convert(ConvertWish(node="d0", role=Role.DECODE), file, print))
