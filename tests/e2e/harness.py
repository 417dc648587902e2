"""A running system for tests: real processes, one event loop that outlives the single test, prompts, and the yardstick."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc.aio
import numpy as np

from gateway.cluster.served_model import salt_of
from hybrid_cache.layout.layout import ModelLayout
from prfaas.demo.client import DemoCompletion, complete
from prfaas.system.system import StartedNode, System
from prfaas.system.topology import parse_topology
from tests.e2e import tls
from tests.e2e.beliefs import believed_queues_s, is_sent_home, known_tokens
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

T = TypeVar("T")

FIRST_PLAIN_TOKEN, VOCABULARY = 4, 512
IDLE_TIMEOUT_S = 120.0
CALL_S = 60.0  # only a hang takes so long
CALM_S = 60.0
UNASKED_SEED = 1 << 41  # of prompts that are only explained
UNTIED_TRIES = 20


def topology_document(model: Path, *, threshold: int, decode_nodes: int = 1, **node: Any) -> dict[str, Any]:
    """One PrfaaS node, one PD prefill node, and some decode nodes."""
    return {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {
            "port": 0,
            "threshold_tokens": threshold,
            # What a node holds stays there: these tests are about what travels for a request (but for test_increments).
            "routing": {"prefill_tokens_per_s": 1000.0, "increment_tokens": 0, "fetch_bytes_per_s": 0.0},
        },
        "node": {"lease_s": 30.0, **node},
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {
                "name": "west",
                "kind": "pd",
                "nodes": [
                    {"node_id": "near", "role": "prefill"},
                    *({"node_id": f"decode{i}", "role": "decode"} for i in range(decode_nodes)),
                ],
            },
        ],
    }


class Bench:
    """A system, started once for many tests; `run` runs a test's coroutine on its loop.

    Where the environment wants mutual TLS, it has that on every hop, unless its document has a way of its own.
    """

    def __init__(self, document: dict[str, Any], model: Path, state_dir: Path, *, start_s: float | None = None) -> None:
        """`start_s` is how long its start may take; without, a node that fails is started again several times."""
        self.model = model
        self._start_s = start_s
        self._runner = asyncio.Runner()
        self._state_dir = state_dir
        self.certificates = tls.folder_for(document, state_dir)
        if self.certificates is not None:
            document = tls.secured(document, self.certificates)
        self._topology = parse_topology(document, state_dir)
        self._reference: Any = None
        self._reference_lock = threading.Lock()
        self._count = 0
        self.system = System(self._topology, state_dir, lambda line: None)
        self.session: aiohttp.ClientSession

    def __enter__(self) -> "Bench":
        try:
            self._runner.run(_bounded(self._start(), self._start_s))
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.run(self._stop())
        self._runner.close()

    async def _start(self) -> None:
        await self.system.__aenter__()
        identity = self.system.gateway_identity()
        self.session = tls.client_session(identity, self.certificates)

    async def _stop(self) -> None:
        await self.session.close()
        in_clear = await asyncio.to_thread(self._in_clear)
        await self.system.stop()
        assert not in_clear, "\n".join(in_clear)

    def _in_clear(self) -> list[str]:
        """What speaks in clear at the end, where nothing should."""
        return [] if self.certificates is None else tls.faults_of(self.system, self.certificates)

    def run(self, scenario: Coroutine[Any, Any, T], timeout_s: float = 240.0) -> T:
        return self._runner.run(_bounded(scenario, timeout_s))

    # Requests

    def prompt(self, num_tokens: int, seed: int) -> list[int]:
        """Random plain tokens; equal seeds share their beginning."""
        rng = np.random.default_rng(seed)
        return [int(token) for token in rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, num_tokens)]

    def name(self) -> str:
        """A request id that no other request has."""
        self._count += 1
        return f"test-{self._count}"

    async def generate(
        self, prompt: Sequence[int], max_tokens: int = 16, *, name: str = "", url: str = "", **options: Any
    ) -> DemoCompletion:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return await complete(self.session, url or self.system.api_url, body | options, name or self.name())

    async def prime(self, name: str, prompt: Sequence[int]) -> None:
        """Makes one node's engine compute `prompt`, under the salt of the gateway, without anything leaving it.

        Returns when the gateway has heard of it.
        """
        layout = ModelLayout.from_json((await self.describe(name)).layout_json)
        params = {"salt": salt_of(layout).hex()}
        await self.generate(prompt, 1, url=await self.engine_url(name), kv_transfer_params=params)
        await self.wait_until_heard(name, prompt, (len(prompt) - 1) // layout.block_size * layout.block_size)

    async def wait_until_heard(self, name: str, prompt: Sequence[int], num_tokens: int) -> None:
        """Until the gateway knows that a node has the first tokens of `prompt`: it hears of blocks up to 0.1 s late."""

        async def is_heard_of() -> bool:
            return await known_tokens(self.session, self.system.api_url, name, prompt) >= num_tokens

        await self.wait_until(is_heard_of)

    async def until_link_takes(self, num_tokens: int, timeout_s: float = CALM_S) -> None:
        """Until load would not keep a new prompt of that length from the link: what was sent before may show for a while."""
        prompt = self.prompt(num_tokens, seed=UNASKED_SEED)

        async def is_taken() -> bool:
            return not await is_sent_home(self.session, self.system.api_url, prompt)

        await self.wait_until(is_taken, timeout_s)

    def expected(self, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
        """What a plain transformers.generate gives."""
        from engine.torch.embedded import load_model
        from engine.torch.reference import first_tie, reference_tokens

        with self._reference_lock:
            if self._reference is None:
                self._reference = load_model(self.model)
            tokens = reference_tokens(self._reference, prompt, max_tokens)
            tie = first_tie(self._reference, prompt, tokens)
        assert tie is None, f"token {tie} is a tie, which machines break differently: take another prompt"
        return tokens

    def untied(self, num_tokens: int, rng: np.random.Generator, max_tokens: int = 16) -> tuple[list[int], list[int]]:
        """A random prompt, and what a plain transformers.generate gives: nothing in them depends on the order of sums."""
        from engine.torch.embedded import load_model
        from engine.torch.reference import TIE, closest_routing, first_tie, reference_tokens

        with self._reference_lock:
            if self._reference is None:
                self._reference = load_model(self.model)
            for _ in range(UNTIED_TRIES):
                prompt = self.prompt(num_tokens, seed=int(rng.integers(1 << 40)))
                tokens = reference_tokens(self._reference, prompt, max_tokens)
                if first_tie(self._reference, prompt, tokens) is not None:
                    continue
                if closest_routing(self._reference, [*prompt, *tokens]) >= TIE:
                    return prompt, tokens
        raise AssertionError(f"each of {UNTIED_TRIES} prompts of {num_tokens} tokens has a tie")

    async def record(self, name: str) -> dict[str, Any]:
        """The gateway's record of a finished request."""
        async with asyncio.timeout(CALL_S):
            while True:
                async with self.session.get(f"{self.system.api_url}/prfaas/requests") as answer:
                    records = [line for line in (await answer.text()).splitlines() if f'"{name}"' in line]
                for line in records:
                    record: dict[str, Any] = json.loads(line)
                    if record["id"] == name:
                        return record
                await asyncio.sleep(0.05)

    # Nodes

    def node(self, name: str) -> StartedNode:
        return self.system.nodes[name]

    async def engine_url(self, name: str) -> str:
        """Where its present engine answers: one that another test killed came back at another port."""
        return (await self.describe(name)).engine_url

    async def describe(self, name: str) -> pb.NodeDescription:
        async with self._channel(name) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            description: pb.NodeDescription = await stub.Describe(
                pb.DescribeRequest(check_integrity=True), timeout=CALL_S
            )
            return description

    def _channel(self, name: str) -> grpc.aio.Channel:
        """To a node's agent, as its gateway has it."""
        return self.system.agent_channel(name)

    async def metric(self, url: str, line: str) -> float:
        """The value of a line of /metrics that begins so, its cluster aside; 0 where there is no such line."""
        async with self.session.get(f"{url}/metrics") as answer:
            lines = re.sub(r'cluster="[^"]*",|,?cluster="[^"]*"', "", await answer.text()).splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(line))

    async def gateway_sees(self, name: str) -> str:
        """The state of a node as the gateway knows it."""
        async with self.session.get(f"{self.system.api_url}/health") as answer:
            state: str = (await answer.json())["nodes"][name]
            return state

    async def wait_for_engine(self, name: str, former_pid: int, timeout_s: float) -> None:
        """Until the node has another engine than the former one, and then the gateway sees it ready."""

        async def is_back() -> bool:
            pid = (await self.describe(name)).engine_pid  # 0 for none; the gateway may hear of that later
            return pid not in (0, former_pid) and await self.gateway_sees(name) == "ready"

        await self.wait_until(is_back, timeout_s)

    async def wait_until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float = 90.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 other processes have no Event of ours
                await asyncio.sleep(0.02)

    async def wait_idle(self) -> None:
        """Every node has given back everything, its books balance, and the gateway has heard of it.

        What a test leaves behind shows here.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        for name, node in self.system.nodes.items():
            if node.process.returncode is not None:
                continue
            while True:
                description = await self.describe(name)
                pool, load = description.pool, description.load
                held = (pool.reservations, pool.pages_transfer, pool.pages_locked, load.running, load.waiting)
                assert not description.integrity_error, f"{name}: {description.integrity_error}"
                if held == (0, 0, 0, 0, 0):
                    break
                assert time.monotonic() < deadline, f"{name} still holds {held}"
                await asyncio.sleep(0.05)
        while waits := await believed_queues_s(self.session, self.system.api_url):
            assert time.monotonic() < deadline, f"the gateway still believes in queues: {waits}"
            await asyncio.sleep(0.05)

    async def crowd_out(self, name: str) -> None:
        """Reserves all the memory of a node for a moment: what was there is on its disk afterwards, if it has one."""
        description = await self.describe(name)
        layout = ModelLayout.from_json(description.layout_json)
        of_block = sum(layout.pages_per_block(group) for group in layout.full_groups)
        async with self._channel(name) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            for blocks in range(description.pool.pages_total // of_block, 0, -1):
                request = pb.ReserveRequest(num_tokens=blocks * layout.block_size, prefix_only=True)
                with contextlib.suppress(grpc.aio.AioRpcError):  # no room for that much
                    ticket = await stub.Reserve(request)
                    await stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))
                    break

        async def written() -> bool:
            return not (await self.describe(name)).ssd.queued_bytes

        await self.wait_until(written)

    async def reads_given_up(self, name: str) -> int:
        """How often a node did not wait for its disk, or did not ask it: computing was sooner done, or there was no room.

        Prefixes of tests are short, so computing one takes milliseconds, and on a busy machine a read may take longer.
        """
        promotions = (await self.describe(name)).ssd.promotions
        return sum(promotions[reason] for reason in ("late", "slow", "busy", "no_room"))

    async def kill(self, name: str) -> None:
        """kill -9 of a whole node: the agent, and the engine with it."""
        engine = (await self.describe(name)).engine_pid
        for pid in (self.node(name).process.pid, engine):
            os.kill(pid, signal.SIGKILL)
        await self.node(name).process.stop(10.0)

    async def restart(self, *names: str) -> None:
        """Starts killed nodes again, at their old addresses, and waits for the gateway to see all nodes."""
        for name in names:
            await self.start_again(name)
        await self.system.wait_ready(len(self.system.nodes))

    async def start_again(self, name: str) -> None:
        """Starts a node that has ended, at its old address."""
        node = self.node(name)
        port = int(node.agent_address.rpartition(":")[2])
        await self.system.start_node(dataclasses.replace(node.config, control_port=port))


async def _bounded(scenario: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    async with asyncio.timeout(timeout_s):
        return await scenario
