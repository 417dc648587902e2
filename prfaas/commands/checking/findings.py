"""What `prfaas check` makes of what nodes answered: values in, findings out.

A finding that is an error keeps requests from being served as the files say; a warning makes them slower, or will be an
error one day.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gateway.cluster.agent_values import NodeInfo, NodeLoad
from gateway.config.models import ModelCatalog
from gateway.upstream.pool import is_in_clear
from membership.lines import Line, by_ends
from transport.peers.name import HOW_TO_ISSUE

CLOCKS_APART_S: Final = 1.0
ALIKE: Final = 1.02  # budgets beside what a line has: a smaller difference is one of rounding
"""Beyond this, logs of two machines do not line up."""
CLOCKS_WRONG_S: Final = 60.0
"""Beyond this, budgets by time of day change at the wrong time, and new certificates are not good yet."""
EXPIRES_SOON_S: Final = 14 * 86400.0


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


ONE_MODEL: Final = ModelCatalog()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what it is about, what is so, and what to do about it where something is to be done."""

    level: Level
    about: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A node that answered. `ahead_s` is how far its clock was ahead of ours, halfway between question and answer."""

    address: str
    info: NodeInfo
    load: NodeLoad
    took_s: float
    ahead_s: float


@dataclass(frozen=True, slots=True)
class Silent:
    """A node that did not answer: why, as a label and in words."""

    address: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PortFinding:
    """Whether a port of a node lets us in; `refusal` is empty where it does."""

    node_id: str
    name: str
    address: str
    refusal: str


@dataclass(frozen=True, slots=True)
class WayFinding:
    """From a sender to a receiver over the way of KVCache. `refusal` is empty where an answer came back, after `took_s`."""

    sender: str
    receiver: str
    took_s: float
    refusal: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """A PEM file of ours, and until when (seconds from now) it is good; None: it cannot be read, `problem` says why."""

    path: str
    left_s: float | None
    problem: str = ""
    nameless: str = ""  # why it gives no rights
    is_revoked: bool = False
    is_old_taken: bool = False  # TLS 1.2, by the server that shows it


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A secret that others on this machine can read, or a file that says whom to trust and that they can write."""

    path: str
    mode: int
    is_written: bool = False
    more: int = 0  # files beside it that others can write, too


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFindings:
    """Everything that was asked."""

    described: Sequence[Described] = ()
    silent: Sequence[Silent] = ()
    ports: Sequence[PortFinding] = ()
    ways: Sequence[WayFinding] = ()
    ways_left_out: int = 0
    certificates: Sequence[Certificate] = ()
    open_files: Sequence[OpenFile] = ()
    version: str = ""
    has_identity: bool = False  # the gateway asked
    lines: Sequence[Line] = ()  # that the gateway's file describes
    name_secrets: Sequence[str] = ()  # fingerprints of those that the gateway names blocks by, the newest first
    catalog: ModelCatalog = ONE_MODEL
    names_left_s: float | None = None  # until they look for the earlier one no more; None: they have only one


def findings(seen: CheckFindings) -> list[Finding]:
    """All of it, in the order in which an operator would look."""
    return [
        *_about_certificates(seen.certificates),
        *_about_open_files(seen.open_files),
        *_about_silence(seen.silent),
        *_about_nodes(seen.described),
        *_about_roles(seen.described),
        *_about_models(seen.described, seen.catalog),
        *_about_versions(seen.described, seen.version),
        *_about_clocks(seen.described),
        *_about_names(seen.described, seen.name_secrets),
        *_about_the_earlier_secret(seen),
        *_about_plain(seen.described),
        *_about_open_arenas(seen.described),
        *(_about_engines_in_clear(seen.described) if seen.has_identity else ()),
        *_about_ports(seen.ports),
        *_about_ways(seen.ways, seen.ways_left_out),
        *_about_links(seen.described),
        *_about_lines(seen.described, seen.lines),
    ]


def worst(found: Iterable[Finding]) -> Level:
    """The level of the worst; OK of none."""
    order = list(Level)
    return max((each.level for each in found), key=order.index, default=Level.OK)


def _about_certificates(certificates: Sequence[Certificate]) -> Iterator[Finding]:
    for each in certificates:
        if each.left_s is None:
            yield Finding(Level.ERROR, each.path, each.problem, "prfaas certificates makes new ones")
        elif each.left_s <= 0:
            yield Finding(Level.ERROR, each.path, "has expired", "prfaas certificates makes a new one; it is read anew")
        else:
            level = Level.WARNING if each.left_s < EXPIRES_SOON_S else Level.OK
            remedy = "prfaas certificates makes a new one; it is read anew" if level is Level.WARNING else ""
            yield Finding(level, each.path, f"good for {each.left_s / 86400:.0f} more days", remedy)
        if each.nameless:
            yield Finding(Level.ERROR, each.path, f"gives no rights: {each.nameless}", HOW_TO_ISSUE)
        if each.is_old_taken:
            yield Finding(
                Level.WARNING,
                each.path,
                "its control_port takes TLS 1.2",
                "run a node of this version: its control_port takes TLS 1.3 alone",
            )
        if each.is_revoked:
            yield Finding(
                Level.ERROR, each.path, "is revoked, so it counts no more", "the gateway's file `revoked` has it"
            )


def _about_open_files(files: Sequence[OpenFile]) -> Iterator[Finding]:
    for each in files:
        more = f", and {each.more} files beside it alike" if each.more else ""
        if each.is_written:
            what = f"others on this machine can write it, and so say whom to trust (mode {each.mode:o}){more}"
            yield Finding(Level.WARNING, each.path, what, f"chmod go-w {each.path}")
        else:
            what = f"others on this machine can read it (mode {each.mode:o})"
            yield Finding(Level.WARNING, each.path, what, f"chmod 600 {each.path}")


def _about_plain(nodes: Sequence[Described]) -> Iterator[Finding]:
    """Ports that other machines reach, and that speak in clear."""
    for node in nodes:
        if node.info.plain:
            hops = (each.partition(" ") for each in node.info.plain)
            ports = ", ".join(f"{listener}_port{space}{of}" for listener, space, of in hops)
            remedy = "certificates and integrity = 'aead' seal control, calls and transfers; carry the rest inside your network"
            yield Finding(Level.WARNING, node.info.node_id, f"in clear to other machines: {ports}", remedy)


def _about_open_arenas(nodes: Sequence[Described]) -> Iterator[Finding]:
    """Nodes that trust those of their cluster with their memory."""
    for node in nodes:
        if node.info.rdma_direct:
            what = f"the NICs of the nodes of {node.info.cluster} can write anywhere in its arena"
            yield Finding(Level.WARNING, node.info.node_id, what, "rdma_direct = false gives each a buffer of its own")


def _about_names(nodes: Sequence[Described], own: Sequence[str]) -> Iterator[Finding]:
    """Whether all name blocks by the same secrets: they compare fingerprints, which tell nothing of them.

    Engines without a cache of their own hear of each request's names from the gateway: their nodes need no secret.
    """
    newest = own[0] if own else ""
    naming = [node for node in nodes if node.info.has_own_cache]
    for node in naming:
        names = node.info.name_secrets
        if newest and newest not in names:
            what = f"names blocks by {_secrets(names)}, and the gateway by {newest}: what its engine's own cache has is not found"
        elif names and names[0] not in own:
            what = f"names blocks by {names[0]}, which this gateway's names_secret does not have"
        else:
            continue
        remedy = (
            "the same file names_secret on every node and gateway, nodes first; prfaas reload and SIGHUP read it again"
        )
        yield Finding(Level.WARNING, node.info.node_id, what, remedy)
    if newest and nodes and all(node.info.name_secrets == tuple(own) for node in naming):
        where = f"on all {len(nodes)} nodes" if len(naming) == len(nodes) else "wherever an engine has its own cache"
        yield Finding(Level.OK, "names", f"of blocks are by {' and '.join(own)} {where}")


def _about_the_earlier_secret(seen: CheckFindings) -> Iterator[Finding]:
    """Whether it can be removed. Nodes that are behind put that off, and have findings of their own."""
    newest = seen.name_secrets[:1]
    is_behind = any(node.info.has_own_cache and node.info.name_secrets[:1] != newest for node in seen.described)
    if seen.names_left_s is None or is_behind:
        return
    earlier = _secrets(seen.name_secrets[1:])
    if seen.names_left_s:
        yield Finding(Level.OK, "names", f"by {earlier}, too, for {seen.names_left_s / 3600:.1f} more hours")
    else:
        remedy = "remove its line from the file names_secret; prfaas reload and SIGHUP read it again"
        yield Finding(Level.WARNING, "names", f"by {earlier} are not looked for any more", remedy)


def _secrets(fingerprints: Sequence[str]) -> str:
    return " and ".join(fingerprints) or "no secret"


def _about_engines_in_clear(nodes: Sequence[Described]) -> Iterator[Finding]:
    """The gateway asks no such engine."""
    for node in nodes:
        if is_in_clear(node.info.engine_url):
            what = (
                f"its engine at {node.info.engine_url} is in clear, and this gateway has certificates: it is not asked"
            )
            yield Finding(Level.ERROR, node.info.node_id, what, "start the node with certificates and this version")


WHY_SILENT: Final = {
    "unreachable": "is the node running, and may this machine reach its control_port?",
    "timeout": "the port takes connections and does not answer: is the machine overloaded, or a firewall in between?",
    "identity": "the node's certificate is not the one that is expected: compare authority, and name in [[gateway.nodes]]",
}


def _about_silence(silent: Sequence[Silent]) -> Iterator[Finding]:
    for node in silent:
        detail = f" ({node.detail})" if node.detail else ""
        yield Finding(Level.ERROR, node.address, f"no answer: {node.reason}{detail}", WHY_SILENT.get(node.reason, ""))


WHAT_STATES_MEAN: Final = {
    "ready": (Level.OK, ""),
    "starting": (Level.WARNING, "its engine is not up yet; ask again"),
    "converting": (Level.WARNING, "it is changing its role and takes nothing meanwhile; ask again"),
    "draining": (Level.WARNING, "it is about to end, or was drained: prfaas drain --node NODE --undo"),
    "engine_down": (Level.ERROR, "its engine has died and is started again; the engine's log in its run_dir says why"),
    "engine_silent": (Level.ERROR, "its engine runs without answering: stopped, or stuck; the agent's log says which"),
}


def _about_nodes(nodes: Sequence[Described]) -> Iterator[Finding]:
    for node in nodes:
        info = node.info
        level, remedy = WHAT_STATES_MEAN.get(info.state, (Level.WARNING, "a state that this version does not know"))
        what = f"{info.role} node of {info.cluster} ({info.cluster_kind}), {info.state}, answers in {node.took_s * 1e3:.0f} ms"
        yield Finding(level, info.node_id, what, remedy)
    for name, count in Counter(node.info.node_id for node in nodes).items():
        if count > 1:
            yield Finding(Level.ERROR, name, f"{count} nodes have this node_id", "give each a node_id of its own")


def _about_roles(nodes: Sequence[Described]) -> Iterator[Finding]:
    if not nodes:
        return
    if not any(node.info.role == "decode" for node in nodes):
        yield Finding(
            Level.ERROR,
            "roles",
            "no decode node answers: nothing can be served",
            'role = "decode" for one of a pd cluster',
        )
    elif idle := _none_serves(nodes, "decode"):
        yield Finding(
            Level.ERROR,
            "roles",
            f"no decode node is ready ({idle}): every request is refused (no_decode_node)",
            "a node that is draining takes requests again by prfaas drain --node NODE --undo",
        )
    if not any(node.info.role == "prefill" for node in nodes):
        yield Finding(Level.WARNING, "roles", "no prefill node answers: decode nodes compute every prompt themselves")
    elif idle := _none_serves(nodes, "prefill"):
        what = f"no prefill node is ready ({idle}): decode nodes compute every prompt themselves"
        yield Finding(Level.WARNING, "roles", what)


def _none_serves(nodes: Sequence[Described], role: str) -> str:
    """The states of the nodes of a role, where none of them serves; "" where one does, or may for all that is known here."""
    infos = [node.info for node in nodes if node.info.role == role]
    if any(info.state == "ready" or info.state not in WHAT_STATES_MEAN for info in infos):
        return ""
    return ", ".join(f"{info.node_id} {info.state}" for info in infos)


def _about_models(nodes: Sequence[Described], catalog: ModelCatalog) -> Iterator[Finding]:
    """What each model of the gateway has for nodes, and nodes of no model."""
    known = [node.info for node in nodes if node.info.layout_fingerprint]
    for info in known:
        if catalog.of_node(info.model_id) is None:
            what = f"no model of the gateway has nodes that call theirs {info.model_id!r}"
            yield Finding(Level.WARNING, info.node_id, what, "name it in [[gateway.models]], or give it a folder")
    for model in catalog.models:
        infos = [info for info in known if catalog.of_node(info.model_id) == model.name]
        name = catalog.shown(model.name)
        if not catalog.is_single and not infos:
            yield Finding(Level.WARNING, f"model {name}", "no node has it: its requests are refused")
        yield from _about_model(infos, "" if catalog.is_single else f" of {name or 'the other nodes'}")


def _about_model(known: Sequence[NodeInfo], of_model: str) -> Iterator[Finding]:
    """KVCache moves only between nodes whose layouts have one fingerprint (model, sizes, block size)."""
    layouts = Counter(info.layout_fingerprint for info in known)
    if len(layouts) > 1:
        usual, _ = layouts.most_common(1)[0]
        for info in known:
            if info.layout_fingerprint != usual:
                what = (
                    f"its layout {info.layout_fingerprint[:12]} is not the others' {usual[:12]}: they exchange nothing"
                )
                yield Finding(
                    Level.ERROR, info.node_id, what, "the same model files, model_revision and block_size on every node"
                )
    elif known:
        what = f"{known[0].layout_fingerprint[:12]}, the same on {len(known)} nodes"
        yield Finding(Level.OK, f"layout{of_model}", what)
    lengths = {info.max_model_len for info in known}
    if len(lengths) > 1:
        what = f"max_model_len differs: {', '.join(str(length) for length in sorted(lengths))}"
        yield Finding(
            Level.WARNING, f"max_model_len{of_model}", what, "prompts above the least go to a part of the nodes only"
        )


def _about_versions(nodes: Sequence[Described], own: str) -> Iterator[Finding]:
    versions = Counter(node.info.version or "unknown" for node in nodes)
    if not versions:
        return
    if set(versions) == {own}:
        yield Finding(Level.OK, "version", f"{own} everywhere")
        return
    for node in nodes:
        version = node.info.version or "unknown"
        if version != own:
            other = " (other code of the same version)" if version.partition("+")[0] == own.partition("+")[0] else ""
            yield Finding(
                Level.WARNING, node.info.node_id, f"runs version {version}, this is {own}{other}", "upgrade one of them"
            )


def _about_clocks(nodes: Sequence[Described]) -> Iterator[Finding]:
    worst_ahead_s = 0.0
    for node in nodes:
        # Halfway is a guess: the clock may be wrong by half of what the answer took, unnoticed.
        sure_s = max(0.0, abs(node.ahead_s) - node.took_s / 2)
        worst_ahead_s = max(worst_ahead_s, abs(node.ahead_s))
        if sure_s > CLOCKS_APART_S:
            level = Level.ERROR if sure_s > CLOCKS_WRONG_S else Level.WARNING
            way = "ahead of" if node.ahead_s > 0 else "behind"
            yield Finding(
                level, node.info.node_id, f"its clock is {abs(node.ahead_s):.1f} s {way} this machine's",
                "keep clocks by NTP: budgets by time of day and certificates go by them",
            )  # fmt: skip
    if nodes and worst_ahead_s <= CLOCKS_APART_S:
        yield Finding(Level.OK, "clocks", f"within {worst_ahead_s * 1e3:.0f} ms of this machine's")


WHY_A_PORT: Final = {
    "engine_port": (Level.ERROR, "gateways send requests there"),
    "bootstrap_port": (Level.WARNING, "decode servers ask there: see that it lets them in, if not this machine"),
    "calls_port": (Level.WARNING, "without it reservations go by gRPC, at ten times the CPU"),
}


def _about_ports(ports: Sequence[PortFinding]) -> Iterator[Finding]:
    closed = [port for port in ports if port.refusal]
    for port in closed:
        level, why = WHY_A_PORT[port.name]
        yield Finding(level, port.node_id, f"{port.name} {port.address}: {port.refusal}", why)
    if ports and not closed:
        yield Finding(Level.OK, "ports", f"{len(ports)} of engines and calls let this machine in")


def _about_ways(ways: Sequence[WayFinding], left_out: int) -> Iterator[Finding]:
    """Whether KVCache finds its way: what a sender asked a receiver, over the connections that transfers take."""
    for way in ways:
        if way.refusal:
            yield Finding(
                Level.ERROR, f"{way.sender} -> {way.receiver}", f"no way for KVCache: {way.refusal}",
                "may the sender reach the receiver's transfer_port (transfer_advertise), with the same integrity and authority?",
            )  # fmt: skip
    good = [way.took_s for way in ways if not way.refusal]
    if good:
        more = f" ({left_out} more were not asked)" if left_out else ""
        what = f"{len(good)} ways for KVCache answer, the slowest in {max(good) * 1e3:.0f} ms{more}"
        yield Finding(Level.OK, "transfers", what)


def _about_links(nodes: Sequence[Described]) -> Iterator[Finding]:
    """What links have carried lately: nothing is sent to find out, so an unused link says nothing."""
    for node in nodes:
        for link in node.load.links:
            if link.peer == node.info.cluster:
                continue
            about = f"{node.info.node_id} -> {link.peer}"
            budget = f", budget {_rate(link.budget_bytes_per_s)}" if link.budget_bytes_per_s else ", no egress budget"
            if not link.available_bytes_per_s:
                yield Finding(Level.OK, about, f"bandwidth not measured yet{budget}")
                continue
            what = f"gives {_rate(link.available_bytes_per_s)} to who is busy, RTT {link.rtt_s * 1e3:.1f} ms{budget}"
            if link.congested:
                what = f"congested: {link.retransmit_ratio:.2%} retransmitted; {what}"
            yield Finding(Level.WARNING if link.congested else Level.OK, about, what)


def _about_lines(nodes: Sequence[Described], lines: Sequence[Line]) -> Iterator[Finding]:
    """Whether clusters send over lines that nothing describes, or may send more than their lines have."""
    described = by_ends(lines)
    kinds = {node.info.cluster: node.info.cluster_kind for node in nodes}
    for line in lines:
        for end, kind in ((line.source, "prfaas"), (line.destination, "pd")):
            if kinds.get(end, kind) != kind:
                what = f"{end} is a cluster of kind {kinds[end]}: a line goes from a prfaas cluster to a pd one"
                yield Finding(Level.ERROR, f"line {line.label}", what)
    for (source, destination), line in described.items():
        budgets = [
            node.load.budgets.get(destination, node.load.budgets.get("", 0.0))
            for node in nodes
            if node.info.cluster == source
        ]
        if not budgets:
            continue
        about, total = f"line {line.label}", sum(budgets)
        if not all(budgets):
            what = f"carries {_rate(line.bytes_per_s)} of ours, and a node of {source} has no egress budget for it"
            yield Finding(Level.WARNING, about, what, f"set egress_bytes_per_s of {source}'s nodes for {destination!r}")
        elif total > ALIKE * line.bytes_per_s:
            what = f"nodes of {source} may send {_rate(total)}, and only {_rate(line.bytes_per_s)} is ours"
            yield Finding(Level.WARNING, about, what, f"set egress_bytes_per_s of {source}'s nodes for {destination!r}")
        else:
            yield Finding(Level.OK, about, f"{_rate(line.bytes_per_s)} is ours, nodes may send {_rate(total)}")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f} Gbit/s"
