"""`prfaas check`: asks every node that a gateway's file names what it is, and whether each process reaches those that it must.

Nothing is changed: of a receiver a block is reserved for the addresses on its ticket, and given back before a sender asks there.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cluster.agent_client import AgentClient
from gateway.config.gateway import GatewayConfig
from gateway.config.models import ModelCatalog
from gateway.errors import AgentCallFailed, GatewayConfigError
from gateway.models.upkeep import brought
from gateway.routing.block_naming import name_secrets
from gateway.routing.name_rotation import NameOverlap, put_at
from membership.member import Member
from prfaas.commands.checking.access_findings import access_findings, tls_findings
from prfaas.commands.checking.file_modes import authority_files, open_files
from prfaas.commands.checking.findings import (
    Certificate,
    CheckFindings,
    Described,
    Finding,
    Level,
    PortFinding,
    Silent,
    WayFinding,
    findings,
    worst,
)
from prfaas.commands.checking.member_findings import etcd_findings, fleet_findings, member_findings
from prfaas.commands.checking.plan_findings import plan_findings
from prfaas.commands.fleet.members import listed_members
from prfaas.commands.operator import gateway_of
from prfaas.errors import CheckError
from transport.control.certificates import expires_at
from transport.control.credentials import server_certificate, takes_old_tls
from transport.control.messages import TicketInfo
from transport.control.release import release
from transport.path.tcp import format_address
from transport.peers.authorities import Authorities
from transport.peers.name import of_pem
from transport.peers.revocation import RevocationList, Revoked
from transport.wire.identity import Identity

RPC_S: Final = 5.0
ROOM_S: Final = 5.0  # a lease of the block, should we die before we give it back
MAX_WAYS: Final = 1024
AT_ONCE: Final = 16
SIGNS: Final = {Level.OK: ("✓", "green"), Level.WARNING: ("!", "yellow"), Level.ERROR: ("✗", "red")}


async def check(gateway_file: Path, console: Console, as_json: bool) -> bool:
    """Whether nothing is an error. Raises CheckError."""
    try:
        config = gateway_of(gateway_file)
    except GatewayConfigError as error:
        raise CheckError(str(error)) from error
    try:
        secrets = name_secrets(config.names_secret) if config.names_secret is not None else None
    except GatewayConfigError as error:
        raise CheckError(f"{gateway_file}: {error}") from error
    access = [
        *access_findings(config, _wall_clock_s()),
        *await tls_findings(config),
        *await plan_findings(config, _wall_clock_s()),
        *etcd_findings(config.membership.etcd, config.identity is not None),
        *fleet_findings(config.fleet.etcd),
    ]
    names = secrets.fingerprints if secrets is not None else ()
    listed = await asyncio.to_thread(listed_members, config)
    left_s = _names_left_s(config) if len(names) > 1 else None
    seen = replace(await look(config, listed.members), name_secrets=names, names_left_s=left_s)
    found = [*access, *member_findings(listed, seen.described), *findings(seen)]
    if as_json:
        console.out(json.dumps([asdict(each) for each in found], indent=2), highlight=False)
    else:
        tell(console, gateway_file, found)
    return worst(found) is not Level.ERROR


def tell(console: Console, file: Path, found: Sequence[Finding]) -> None:
    """A line each, and how many of what."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for each in found:
        sign, colour = SIGNS[each.level]
        text = Text(each.what)
        if each.remedy:
            text.append(f"\n{each.remedy}", style="italic")
        table.add_row(Text(sign, style=colour), Text(each.about), text)
    console.print(table)
    counts = {level: sum(each.level is level for each in found) for level in Level}
    console.print(
        f"{file}: {counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.OK]} checks passed",
        highlight=False,
        markup=False,
    )


async def look(config: GatewayConfig, members: Sequence[Member] | None = None) -> CheckFindings:
    """Asks `members`, or those of the gateway's file; takes as long as the slowest of a few rounds of calls, RPC_S each."""
    nodes_asked = [node.member for node in config.nodes] if members is None else members
    async with AsyncExitStack() as stack:
        agents = [AgentClient(node.agent, RPC_S, config.identity, node.name) for node in nodes_asked]
        for agent in agents:
            stack.push_async_callback(agent.close)
        answers = await asyncio.gather(*map(_describe, agents))
        nodes = [
            (agent, answer) for agent, answer in zip(agents, answers, strict=True) if isinstance(answer, Described)
        ]
        ports = await asyncio.gather(*[_try(*port) for _, node in nodes for port in _ports(node)])
        catalog = _catalog(config, [node for _, node in nodes])
        pairs = _pairs(nodes, catalog)
        ways = await _ask_ways(pairs[:MAX_WAYS])
        revoked, authorities = _revoked(config), _authorities(config)
        shown = await asyncio.gather(
            *[_shown(node.agent, config.identity, revoked, authorities) for node in nodes_asked]
        )
    return CheckFindings(
        described=[node for _, node in nodes],
        silent=[answer for answer in answers if isinstance(answer, Silent)],
        ports=ports,
        ways=ways,
        ways_left_out=max(0, len(pairs) - MAX_WAYS),
        certificates=[*_certificates(config), *(each for each in shown if each is not None)],
        open_files=open_files(config),
        version=release(),
        has_identity=config.identity is not None,
        catalog=catalog,
        lines=config.lines,
    )


def _catalog(config: GatewayConfig, nodes: Sequence[Described]) -> ModelCatalog:
    """The models of the file, and those that these nodes bring to a folder of their own."""
    names = {node.info.model_id for node in nodes}
    return config.catalog if config.models_dir is None else config.catalog.with_found(brought(config, names))


Asked = tuple[AgentClient, Described]


async def _describe(agent: AgentClient) -> Described | Silent:
    asked_at, began = _wall_clock_s(), time.monotonic()
    try:
        info, load_report = await agent.describe()
    except AgentCallFailed as error:
        return Silent(agent.address, error.reason, error.detail)
    took_s = time.monotonic() - began
    ahead_s = info.wall_clock_s - (asked_at + took_s / 2) if info.wall_clock_s else 0.0
    return Described(address=agent.address, info=info, load=load_report, took_s=took_s, ahead_s=ahead_s)


def _ports(node: Described) -> list[tuple[str, str, str, int]]:
    """Node, name, host and port of what gateways, and servers that decode, connect to beside the control port."""
    info, ports = node.info, []
    if info.engine_url:
        url = urlsplit(info.engine_url)
        ports.append((info.node_id, "engine_port", url.hostname or "", url.port or 80))
    if info.calls_port:
        ports.append((info.node_id, "calls_port", node.address.rpartition(":")[0].strip("[]"), info.calls_port))
    if info.rooms is not None and info.rooms.port:
        ports.append((info.node_id, "bootstrap_port", info.rooms.host, info.rooms.port))
    return ports


async def _try(node_id: str, name: str, host: str, port: int) -> PortFinding:
    address = format_address(host, port)
    try:
        async with asyncio.timeout(RPC_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return PortFinding(node_id, name, address, f"no answer within {RPC_S:.0f} s")
    except OSError as error:
        return PortFinding(node_id, name, address, error.strerror or str(error))
    writer.close()
    return PortFinding(node_id, name, address, "")


def _pairs(nodes: Sequence[Asked], catalog: ModelCatalog) -> list[tuple[Asked, Asked]]:
    """The pairs that send KVCache: every prefill node of a model to every decode node, a receiver's senders one after
    the other."""
    ready = [node for node in nodes if node[1].info.state == "ready" and node[1].info.block_size]
    senders = [node for node in ready if node[1].info.role == "prefill"]
    receivers = [node for node in ready if node[1].info.role == "decode"]
    return [
        (sender, receiver)
        for sender in senders
        for receiver in receivers
        if catalog.of_node(sender[1].info.model_id) == catalog.of_node(receiver[1].info.model_id)
    ]


async def _ask_ways(pairs: Sequence[tuple[Asked, Asked]]) -> list[WayFinding]:
    room = asyncio.Semaphore(AT_ONCE)
    receivers = {receiver[1].address: receiver for _, receiver in pairs}
    tickets = dict(zip(receivers, await asyncio.gather(*map(_ticket, receivers.values())), strict=True))

    async def ask(sender: Asked, receiver: Asked) -> WayFinding:
        ticket, names = tickets[receiver[1].address], (sender[1].info.node_id, receiver[1].info.node_id)
        if isinstance(ticket, str):
            return WayFinding(*names, 0.0, f"{names[1]} gives no ticket: {ticket}")
        async with room:
            began = time.monotonic()
            try:
                refusal = await sender[0].probe(ticket, RPC_S)
            except AgentCallFailed as error:
                refusal = str(error)
            return WayFinding(*names, time.monotonic() - began, refusal)

    return await asyncio.gather(*[ask(*pair) for pair in pairs])


async def _ticket(receiver: Asked) -> TicketInfo | str:
    """What names a receiver's addresses, or why it is missing."""
    agent, node = receiver
    try:
        ticket = await agent.reserve_prefix("check", (), node.info.block_size, ROOM_S)
        await agent.abort(ticket.transfer_id, "request_ended")
    except AgentCallFailed as error:
        return str(error)
    return ticket


def _names_left_s(config: GatewayConfig) -> float:
    """Until the earlier secret is of no use, by the time of the file: what nodes put that off for is for gateways to say."""
    now = _wall_clock_s()
    return NameOverlap(put_at(config.names_secret, now), config.names_overlap_s).left_s(now)


def _certificates(config: GatewayConfig) -> Iterator[Certificate]:
    """Those of the gateway's file, and of a list of authorities; authorities need no name."""
    authorities = _authorities(config)
    listed = authority_files(config.authority, authorities)
    etcd = config.membership.etcd
    of_etcd = (etcd.authority, etcd.certificate) if etcd is not None else ()
    kubernetes = config.membership.kubernetes
    of_api_server = (kubernetes.authority,) if kubernetes is not None and kubernetes.is_tls else ()
    for path in dict.fromkeys((config.certificate, *listed, config.tls_certificate, *of_etcd, *of_api_server)):
        if path is None:
            continue
        try:
            peer = of_pem(path.read_bytes()) if path == config.certificate else None
            why = peer.problem or (authorities.refusal(peer) if authorities is not None else "") if peer else ""
            yield Certificate(str(path), expires_at(path) - _wall_clock_s(), nameless=why)
        except (OSError, ValueError) as error:
            yield Certificate(str(path), None, f"cannot be read: {error}")


def _authorities(config: GatewayConfig) -> Authorities | None:
    """None without certificates, and where they cannot be read."""
    try:
        return config.identity.authorities() if config.identity is not None else None
    except OSError:
        return None


def _revoked(config: GatewayConfig) -> Revoked:
    """What the gateway's list says; nothing while it cannot be read, which the gateway itself tells."""
    try:
        return RevocationList(config.revoked).load()
    except (OSError, ValueError):
        return Revoked()


async def _shown(
    agent: str, identity: Identity | None, revoked: Revoked, authorities: Authorities | None
) -> Certificate | None:
    """What a node shows; None where there is nothing to see, which others find out."""
    if identity is None:
        return None
    try:
        shown = await server_certificate(agent, identity, RPC_S)
        is_old_taken = await takes_old_tls(agent, identity, RPC_S)
    except (OSError, ValueError):
        return None
    left_s, peer = shown.ends_at - _wall_clock_s(), shown.peer
    return Certificate(
        f"certificate of {agent}",
        left_s,
        nameless=peer.problem or (authorities.refusal(peer) if authorities is not None else ""),
        is_revoked=revoked.has(peer),
        is_old_taken=is_old_taken,
    )


def _wall_clock_s() -> float:
    return datetime.now(UTC).timestamp()
