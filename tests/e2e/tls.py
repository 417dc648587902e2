"""Mutual TLS on every hop of a system under test, though all of it is on one machine: `make test-e2e TLS=1`.

A document that says something of certificates or integrity by itself keeps that.
"""

import os
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio

from gateway.auth.keyring import digest_of
from prfaas.commands.keys import new_key
from prfaas.system.certificates import GATEWAY_NAME, OPERATOR_NAME, PLANNER_NAME, clusterless, issue, node_holder, paths
from prfaas.system.site_authorities import AUTHORITY
from prfaas.system.system import System
from transport.control.asking import trusting
from transport.control.credentials import channel_credentials, channel_options
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentStub
from transport.peers.name import PeerRole
from transport.wire.identity import Identity

VARIABLE: Final = "PRFAAS_TLS"
DAYS: Final = 2
METRICS_KEY: Final = "metrics.key"  # a node without one shows its metrics to this machine only, in clear
METRICS_DIGEST: Final = "metrics.digest"
CHOSEN: Final = frozenset(
    {"integrity", "certificate", "tls_certificate"}
)  # with any of these a document has its own way
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")  # where the API is asked
LISTENING: Final = "0A"
PROBE_S: Final = 10.0
QUESTION: Final = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
REFUSED: Final = b"HTTP/1.1 401"
IN_CLEAR: Final = (b"HTTP/", b"\x00\x00")  # how an answer begins over HTTP/1.1, and over HTTP/2


def is_wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def has_own_way(document: Mapping[str, Any]) -> bool:
    """Whether a topology says itself what protects it."""
    nodes = [node for cluster in document["clusters"] for node in cluster["nodes"]]
    tables = [document.get("gateway", {}), document.get("node", {}), *nodes]
    return any(CHOSEN & table.keys() for table in tables)


def folder_for(document: Mapping[str, Any], state_dir: Path) -> Path | None:
    """Where certificates for a topology belong; None where none are wanted."""
    return state_dir / "certificates" if is_wanted() and not has_own_way(document) else None


def secured(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same system with TLS at all of its ports and sealed KVCache; an authority for each cluster in `folder`."""
    nodes = [
        node_holder(cluster["name"], cluster["kind"], node["node_id"])
        for cluster in document["clusters"]
        for node in cluster["nodes"]
    ]
    host = _own_address()
    others = [
        clusterless(PeerRole.GATEWAY, LOOPBACK),
        clusterless(PeerRole.OPERATOR),
        clusterless(PeerRole.PLANNER, (host,)),
    ]
    issue(folder, [*nodes, *others], DAYS, by_cluster=True)
    key = new_key()
    (folder / METRICS_KEY).write_text(key)
    (folder / METRICS_DIGEST).write_text(digest_of(key))
    shown = paths(folder, GATEWAY_NAME)
    pages = {"tls_certificate": shown["certificate"], "tls_key": shown["key"]}
    clusters = [
        {**cluster, "nodes": [{**paths(folder, node["node_id"]), **node} for node in cluster["nodes"]]}
        for cluster in document["clusters"]
    ]
    plan = {"plan": {"host": host, **paths(folder, PLANNER_NAME), **document["plan"]}} if "plan" in document else {}
    return {
        **document,
        **plan,
        "gateway": {**shown, **pages, **document.get("gateway", {})},
        "node": {"integrity": "aead", "metrics_key": str(folder / METRICS_DIGEST), **document.get("node", {})},
        "clusters": clusters,
    }


def _own_address() -> str:
    """This machine's, as others see it: a plan service on a loopback address speaks no TLS. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
        return address


def identity(folder: Path, name: str = GATEWAY_NAME) -> Identity:
    """Who `name` is, by what `secured` has written; the operator and the planner have theirs, too."""
    files = paths(folder, name)
    return Identity(certificate=Path(files["certificate"]), key=Path(files["key"]), authority=Path(files["authority"]))


def client_session(who: Identity | None, folder: Path | None = None) -> aiohttp.ClientSession:
    """For as many requests at once as one likes; `folder` is that of `secured`, whose key of metrics is shown, too."""
    connector = aiohttp.TCPConnector(limit=0, ssl=who.client_context() if who is not None else True)
    shown = {} if folder is None else {"authorization": f"Bearer {(folder / METRICS_KEY).read_text()}"}
    return aiohttp.ClientSession(connector=connector, headers=shown)


def channel(address: str, name: str, folder: Path | None) -> grpc.aio.Channel:
    """To a node's agent, as its operator has it."""
    if folder is None:
        return grpc.aio.insecure_channel(address)
    credentials = channel_credentials(identity(folder, OPERATOR_NAME))
    return grpc.aio.secure_channel(address, credentials, channel_options(name))


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that a process listens on."""

    pid: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"port {self.port} of {_arguments(self.pid)}"


def faults(root: int, folder: Path) -> list[str]:
    """What speaks in clear, by an old TLS or with strangers, one line each: of the process `root` and those below it.

    Engines are behind their agents, and listen on this machine only. So does gRPC, which refuses every call that has not
    come through its front.
    """
    agents, engines = _below(root)
    context, old = identity(folder).client_context(), identity(folder).old_client_context()
    nameless = trusting(folder / AUTHORITY, checks_names=False)
    found = []
    for each in [each for pid in agents for each in listeners(pid) if not _is_behind_a_front(each)]:
        is_public = "-m gateway" in _arguments(each.pid)
        tried = [_why_not(each, context), () if is_public else _why_old(each, old), _why_open(each, nameless)]
        found += [f"{each}: {why}" for reasons in tried for why in reasons]
    return found + [
        f"{each}: an engine, at {each.host}"
        for pid in engines
        for each in listeners(pid)
        if not each.host.startswith("127.") and each.host != "::1"
    ]


def faults_of(system: System, folder: Path) -> list[str]:
    """The same of all processes of a system that live."""
    processes = [node.process for node in system.nodes.values()]
    processes += [each for each in (system.gateway, system.plan) if each is not None]
    return [line for each in processes if each.returncode is None for line in faults(each.pid, folder)]


def listeners(pid: int) -> list[Listener]:
    """The TCP ports that a process listens on; none for one that has ended."""
    try:
        own = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        tables = [(Path(f"/proc/{pid}/net/{name}")).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return []
    rows = (line.split() for table in tables for line in table)
    places = {_place(row[1]) for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in own}
    return [Listener(pid, host, port) for host, port in sorted(places)]


def _place(text: str) -> tuple[str, int]:
    """As the kernel writes it: words of four bytes in the machine's order, and a port."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed), int(port, 16)


def _is_behind_a_front(listener: Listener) -> bool:
    """Whether a node's gRPC listens there, on this machine alone, and refuses a direct call."""
    host = listener.host.removeprefix("::ffff:")  # gRPC's sockets are of both families
    if not host.startswith("127.") or "-m gateway" in _arguments(listener.pid):
        return False
    with grpc.insecure_channel(f"{host}:{listener.port}") as channel:
        try:
            NodeAgentStub(channel).Describe(pb.DescribeRequest(), timeout=PROBE_S)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code is grpc.StatusCode.PERMISSION_DENIED
    return False


def _why_not(listener: Listener, context: ssl.SSLContext) -> Iterator[str]:
    try:
        with _connected(listener, context) as tls:
            if tls.version() != "TLSv1.3":
                yield f"speaks {tls.version()}"
    except OSError as exc:
        yield f"no TLS: {exc}"
    answer = b""
    # It hangs up, as it should.
    with suppress(OSError), socket.create_connection((listener.host, listener.port), PROBE_S) as plain:
        plain.sendall(QUESTION)
        answer = plain.recv(64)
    if answer.startswith(IN_CLEAR):
        yield f"answers in clear: {answer!r}"


def _why_old(listener: Listener, context: ssl.SSLContext) -> Iterator[str]:
    """Only the API takes TLS 1.2."""
    with suppress(OSError), _connected(listener, context) as tls:
        yield f"takes {tls.version()}"


def _why_open(listener: Listener, nameless: ssl.SSLContext) -> Iterator[str]:
    """A caller without a certificate gets nothing but a page's refusal, or the API, which is for all here."""
    answer = b""
    with suppress(OSError), _connected(listener, nameless) as tls:
        tls.sendall(QUESTION)
        answer = tls.recv(64)
    if answer and "-m gateway" not in _arguments(listener.pid) and not answer.startswith(REFUSED):
        yield f"answers a caller without a certificate: {answer!r}"


@contextmanager
def _connected(listener: Listener, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    place = (listener.host, listener.port)
    with socket.create_connection(place, PROBE_S) as plain, context.wrap_socket(plain) as tls:
        yield tls


def _below(root: int) -> tuple[list[int], list[int]]:
    """`root` and its descendants: what is an engine or below one, and the others."""
    agents: list[int] = []
    engines: list[int] = []
    open_ = [(root, False)]
    while open_:
        pid, of_engine = open_.pop()
        of_engine = of_engine or "-m engine" in _arguments(pid)
        (engines if of_engine else agents).append(pid)
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            children = [child for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
        open_ += [(int(child), of_engine) for child in children]
    return agents, engines


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""
