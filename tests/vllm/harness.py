"""Two nodes for tests: real agents, forked vLLM engines, and what a gateway would say to them."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np

from gateway.cluster.served_model import salt_of
from hybrid_cache.hashing.block_hash import block_hashes, tokens_digest
from hybrid_cache.layout.layout import ModelLayout
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.control.tickets import ticket_info

START_S = 600.0
ANSWER_S = 240.0
FIRST_PLAIN_TOKEN, VOCABULARY = 4, 256
TELLING_TOKENS, TRIES = 16, 8


def _serve(*arguments: Any) -> None:
    """Runs where vLLM has been imported already."""
    from tests.vllm.engine_process import serve

    serve(*arguments)


def _serve_apart(*arguments: Any) -> None:
    from tests.vllm.engine_process import serve_apart

    serve_apart(*arguments)


_forge = multiprocessing.get_context("forkserver")


def start_forge() -> None:
    """Says what every engine process has imported before it is forked. Before the first engine."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    _forge.set_forkserver_preload(["tests.vllm.engine_process"])
    forkserver.ensure_running()  # imports while other tests do


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    params: dict[str, Any] | None
    cached_tokens: int | None
    overlaps: bool  # whether a chunk of it was under way while another was
    preemptions: int
    drafts: list[list[int]]  # tokens that were proposed, step by step


class Engine:
    """A forked vLLM engine; requests are futures."""

    def __init__(
        self, name: str, folder: Path, options: dict[str, Any], role: str, connector: dict[str, Any] | None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._arguments = (name, folder, options, role, connector)
        self._pipe, theirs = _forge.Pipe()
        self._ready: Future[None] = Future()
        self._was_reset: Future[bool] = Future()
        self._unsilenced: Future[int] = Future()
        self._kept: Future[dict[str, Any]] = Future()
        self._answers: dict[str, Future[Answer]] = {}
        self.progress: dict[str, int] = {}
        # With ranks of its own it must be allowed children; those end with it, it ends with its pipe.
        self.process = _forge.Process(
            target=_serve,
            args=(theirs, str(self.log), options, role, connector),
            daemon=options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) == 1,
        )
        self.process.start()
        theirs.close()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        try:
            self._ready.result(START_S)
        except BaseException as exc:
            raise AssertionError(f"{self.name} did not start:\n{self.log.read_text()[-4000:]}") from exc

    def submit(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self._answers[request_id] = future
        self._pipe.send(("submit", (request_id, list(prompt), max_tokens, params)))
        return future

    def abort(self, request_id: str) -> None:
        self._pipe.send(("abort", request_id))

    def inspect(self, request_id: str, layers: str) -> "Future[dict[str, Any]]":
        """Before a request is submitted: the blocks that it has with its first token, of layers whose name has `layers` in it."""
        self._kept = Future()
        self._pipe.send(("inspect", (request_id, layers)))
        return self._kept

    def foretell(self, tokens: Sequence[int]) -> None:
        """Drafts of an engine that was started with `foretold` are these, when what it has of a request begins so."""
        self._pipe.send(("foretell", list(tokens)))

    def forget_prefixes(self) -> None:
        """Empties vLLM's own prefix cache: what is reused from here on comes from the agent's pages."""
        self._was_reset = Future()
        self._pipe.send(("reset", None))
        assert self._was_reset.result(ANSWER_S), f"{self.name} still uses its prefix cache"

    @contextlib.contextmanager
    def silenced(self, layer: int, *, never_saved: bool = False) -> Iterator[None]:
        """Inside, a layer of attention does not say that its KVCache is final. It must have tried to."""
        self._unsilenced = Future()
        self._pipe.send(("silence", {"number": layer, "never_saved": never_saved}))
        yield
        self._pipe.send(("unsilence", None))
        assert self._unsilenced.result(ANSWER_S), f"{self.name} has not computed that layer"

    def successor(self) -> "Engine":
        """Another engine like this one."""
        return Engine(*self._arguments)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10.0)

    def close(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(("stop", None))
            self.process.join(10.0)
        self.kill()

    def _read(self) -> None:
        error = "it ended"
        try:
            while True:
                kind, value = self._pipe.recv()
                if kind == "ready":
                    self._ready.set_result(None)
                elif kind == "was_reset":
                    self._was_reset.set_result(value)
                elif kind == "unsilenced":
                    self._unsilenced.set_result(value)
                elif kind == "kept":
                    self._kept.set_result(value)
                elif kind == "token":
                    self.progress[value[0]] = value[1]
                elif kind == "died":
                    error = value
                    break
                else:
                    request_id, *answer = value
                    self._answers.pop(request_id).set_result(Answer(*answer))
        except (EOFError, OSError):
            pass
        for future in (self._ready, *self._answers.values()):
            if not future.done():
                future.set_exception(RuntimeError(f"{self.name}: {error}"))


class EngineApart:
    """A vLLM engine whose EngineCore and rank are processes of their own, as a server's are."""

    def __init__(self, folder: Path, options: dict[str, Any], connector: dict[str, Any]) -> None:
        self._pipe, theirs = _forge.Pipe()
        arguments = (theirs, str(folder / "apart.log"), options, connector)
        self.server = _forge.Process(target=_serve_apart, args=arguments)
        self.server.start()
        theirs.close()

    def wait_started(self) -> list[int]:
        """The ids of its processes, the server's own not among them."""
        assert self._pipe.poll(START_S), "it did not start"
        started: list[int] = self._pipe.recv()
        return started

    def kill_server(self) -> None:
        self.server.kill()
        self.server.join(10.0)
        self._pipe.close()


class Agent:
    """A node's agent process; its engine joins over `socket`."""

    def __init__(self, name: str, folder: Path, role: str, **settings: Any) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(exist_ok=True)
        self.socket = self.folder / "agent.sock"
        self.log = self.folder / "agent.log"
        self._settings = {
            "node_id": f"{name}-{os.getpid()}",
            "cluster": name,
            "cluster_kind": "pd",
            "role": role,
            "model": "tiny",
            "run_dir": str(self.folder),
            "cache_bytes": 256 << 20,
            "transport": "tcp",
            "connections": 2,
            "lease_s": 20.0,
            "room_timeout_s": 5.0,
            "socket": str(self.socket),
        } | settings
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.agent_process", json.dumps(self._settings)],
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} did not start:\n{self.log.read_text()[-4000:]}"
        self.channel = grpc.insecure_channel(json.loads(line)["control"])
        self.stub = rpc.NodeAgentStub(self.channel)

    def describe(self) -> pb.NodeDescription:
        return self.stub.Describe(pb.DescribeRequest(check_integrity=True), timeout=10.0)

    def abort(self, transfer_id: str) -> None:
        self.stub.Abort(pb.AbortRequest(transfer_id=transfer_id, reason="client left"), timeout=10.0)

    def kill(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10.0)
        self.kill()


@dataclass
class Node:
    """Agent and engine."""

    agent: Agent
    engine: Engine

    def close(self) -> None:
        self.engine.close()
        self.agent.close()


@dataclass
class Pair:
    """A prefill node and a decode node of one model, and a gateway's part between them."""

    producer: Node
    consumer: Node
    patience_s: float = 20.0  # of a reservation; a landing may take half as long again
    salt: bytes = b""
    _count: int = 0
    layout: ModelLayout = field(init=False)

    def __post_init__(self) -> None:
        self.wait_ready()
        self.layout = ModelLayout.from_json(self.consumer.agent.describe().layout_json)
        self.salt = salt_of(self.layout)

    def wait_ready(self) -> None:
        for node in (self.producer, self.consumer):
            node.engine.wait_ready()
            until(lambda node=node: node.agent.describe().state == pb.NODE_STATE_READY, f"{node.agent.name} is ready")

    def name(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def next_name(self, leg: str) -> str:
        """What the prefill leg (`p`) or the decode leg (`d`) that is handed over next will be called."""
        return f"r{self._count + 1}-{leg}"

    def reserve(self, prompt: Sequence[int]) -> TicketInfo:
        prefill = list(prompt[:-1])
        hashes = block_hashes(prefill, self.layout.block_size, self.salt)
        ticket = self.consumer.agent.stub.Reserve(
            pb.ReserveRequest(
                block_hashes=b"".join(hashes),
                num_tokens=len(prefill),
                tokens_digest=tokens_digest(prompt, self.salt),
                ttl_s=self.patience_s,
            ),
            timeout=10.0,
        )
        return ticket_info(ticket)

    def leg_params(self, ticket: TicketInfo) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "ticket": json.loads(msgspec.json.encode(ticket)),
            "salt": self.salt.hex(),
        }

    def landing_params(self, ticket: TicketInfo, timeout_s: float | None = None) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": ticket.transfer_id,
            "salt": self.salt.hex(),
            "timeout_s": 1.5 * self.patience_s if timeout_s is None else timeout_s,
        }

    @property
    def local_params(self) -> dict[str, Any]:
        return {"salt": self.salt.hex()}

    def hand_over(self, prompt: Sequence[int], max_tokens: int) -> "tuple[Future[Answer], Future[Answer]]":
        """Both legs at once, as a gateway starts them."""
        ticket, name = self.reserve(prompt), self.name()
        leg = self.producer.engine.submit(f"{name}-p", prompt, 1, self.leg_params(ticket))
        decode = self.consumer.engine.submit(f"{name}-d", prompt, max_tokens, self.landing_params(ticket))
        return leg, decode

    def assert_idle(self) -> None:
        """Every page has been given back, and the books balance."""
        for node in (self.producer, self.consumer):
            until(lambda node=node: _held(node.agent.describe()) == (0, 0, 0), f"{node.agent.name} is idle")
            assert not node.agent.describe().integrity_error

    def is_alive(self) -> bool:
        """Whether all four processes run."""
        return all(
            node.engine.process.is_alive() and node.agent.process.poll() is None
            for node in (self.producer, self.consumer)
        )

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def _held(description: pb.NodeDescription) -> tuple[int, int, int]:
    pool = description.pool
    return pool.reservations, pool.pages_transfer, pool.pages_locked


def make_node(name: str, folder: Path, options: dict[str, Any], kv_role: str, role: str, **agent_settings: Any) -> Node:
    agent = Agent(name, folder, role, **agent_settings)
    connector = {"agent_socket": str(agent.socket), "http_url": "http://127.0.0.1:1"}
    return Node(agent, Engine(name, folder, dict(options), kv_role, connector))


def make_pair(folder: Path, options: dict[str, Any], **agent_settings: Any) -> Pair:
    with contextlib.ExitStack() as started:
        nodes = []
        for name, kv_role, role in (("east", "kv_producer", "prefill"), ("west", "kv_consumer", "decode")):
            nodes.append(make_node(name, folder, options, kv_role, role, **agent_settings))
            started.callback(nodes[-1].close)
        pair = Pair(*nodes)
        started.pop_all()
    return pair


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random plain tokens; equal seeds share their beginning."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, num_tokens)]


def telling_prompt(
    reference: "Engine", num_tokens: int, seeds: Iterator[int], beginning: Sequence[int] = ()
) -> list[int]:
    """A prompt to which one server alone says more than one token over and over, as tiny models do now and then."""
    for _ in range(TRIES):
        prompt = [*beginning, *prompt_of(num_tokens, next(seeds))]
        answer = reference.submit(f"t{uuid.uuid4().hex}", prompt, TELLING_TOKENS).result(ANSWER_S)
        if len(set(answer.tokens)) > 2:
            return prompt
    raise AssertionError(f"a degenerate model proves nothing: {TRIES} prompts, {answer.tokens}")


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Waits for what other processes do."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
