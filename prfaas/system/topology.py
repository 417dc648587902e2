"""A whole system in one TOML file: the model, the gateway, and the clusters with their nodes.

[model]                       # arch = built on demand, tiny and seeded; or path = a local model directory;
                              # or profile = a planner's profile, whose times and KVCache emulated engines have
arch = "kimi_linear"
name = "prfaas-tiny"

[gateway]                     # as in a gateway's own file; its nodes and tokenizer are filled in
port = 8000

[node]                        # what all nodes have in common, as in a node's own file
cache_bytes = 268435456

[plan]                        # a plan service, as in a file of its own; what the tables here say is filled in
mode = "advisory"

[[clusters]]
name = "east"
kind = "prfaas"
nodes = [{ node_id = "east-p0", role = "prefill" }]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine.torch.tiny import ARCHITECTURES
from gateway.config.gateway import GatewayConfig
from membership.lines import BYTES_PER_S_PER_GBPS, Line, by_ends, check_lines
from node.config import BOOT_KEY, IDENTITY_KEYS, NodeConfig
from planner.service.config import ServiceConfig
from prfaas.errors import TopologyError
from prfaas.system.certificates import GATEWAY_NAME, PLANNER_NAME, paths
from prfaas.system.standin import Scale, stand_in_file
from transport.control.secret_files import located
from transport.control.settings import (
    SettingsError,
    build,
    in_file,
    mapped,
    read_toml,
    require,
    require_one_of,
)

PATHS = (
    "path", "profile", "tokenizer_dir", "models_dir", "token_file", "gateway_key_file", "tls_certificate", "tls_key",
    "metrics_key", "names_secret", "ssd_key", "lines_file",
)  # fmt: skip
DEFAULT_FILE = Path(__file__).parents[1] / "data" / "local.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model all nodes run: exactly one of `arch` (built when missing), `path`, and `profile`.

    A profile (a planner's file) is emulated, on the hardware that each cluster names, at the scales of `prfaas.system.standin`.
    """

    arch: str = ""
    path: str = ""
    profile: str = ""
    name: str = ""
    seed: int = 0
    time_scale: float = 1.0
    token_scale: float = 1.0
    byte_scale: float = 1.0

    def __post_init__(self) -> None:
        if sum(map(bool, (self.arch, self.path, self.profile))) != 1:
            raise SettingsError(
                f"arch = {self.arch!r}, path = {self.path!r}, profile = {self.profile!r}: give exactly one of them"
            )
        if self.arch:
            require_one_of("arch", self.arch, tuple(ARCHITECTURES))
        if not self.profile and self.scale != Scale():
            raise SettingsError("time_scale, token_scale and byte_scale: allowed only with a profile")

    @property
    def scale(self) -> Scale:
        return Scale(time=self.time_scale, tokens=self.token_scale, bytes=self.byte_scale)

    @property
    def served_name(self) -> str:
        """The name that API users ask for."""
        return self.name or self.arch or Path(self.path).name or Path(self.profile).stem

    def directory(self, state_dir: Path) -> Path:
        """Where the model lies or will be built, or what stands in for it."""
        built = f"{self.arch}-{self.seed}" if self.arch else f"profile-{Path(self.profile).stem}"
        return (Path(self.path) if self.path else state_dir / "models" / built).absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTable:
    """One of [[clusters]]; its nodes' tables say what is theirs beyond [node]. `hardware` is a name in the model's profile."""

    name: str
    kind: str
    hardware: str = ""
    nodes: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """The tables that a file may have."""

    clusters: tuple[ClusterTable, ...]
    model: ModelChoice
    links: tuple[Line, ...] = ()
    gateway: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A parsed file, as values. Ports that are 0 become known when the processes say them."""

    model: ModelChoice
    gateway: Mapping[str, Any]
    nodes: tuple[NodeConfig, ...]
    tokenizer_dir: Path
    plan: Mapping[str, Any] | None = None  # of the plan service; None: no plan service
    certificates: Path | None = None  # where certificates are to be made; None: none are needed, or there are some

    def replace_gateway(self, **values: Any) -> "Topology":
        """The same system with other gateway settings."""
        return replace(self, gateway={**self.gateway, **values})


def load_topology(path: Path, state_dir: Path) -> Topology:
    """Reads and checks a file. Raises TopologyError that names the key, the value and what is allowed."""
    with in_file(path, TopologyError):
        return _parse(_relative_to(path.parent.absolute(), read_toml(path)), state_dir)


def _relative_to(directory: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Relative paths of models, of certificates and of secrets are relative to the file that names them."""
    return {
        key: _with_paths(value, directory) if key != "clusters" else [_with_models(each, directory) for each in value]
        for key, value in document.items()
    }


def _with_models(cluster: Any, directory: Path) -> Any:
    """The table of a cluster whose nodes may have models of their own."""
    if not isinstance(cluster, dict) or not isinstance(cluster.get("nodes"), list):
        return cluster
    return {**cluster, "nodes": [_with_model(each, directory) for each in cluster["nodes"]]}


def _with_model(node: Any, directory: Path) -> Any:
    if not isinstance(node, dict) or not isinstance(node.get("model"), str) or node.get("engine") == "emulated":
        return node
    return {**node, "model": _where(directory, node["model"])}


def _with_paths(table: Any, directory: Path) -> Any:
    if not isinstance(table, dict):
        return table
    names = (*PATHS, *IDENTITY_KEYS, "revoked")
    paths = {key: _where(directory, table[key]) for key in names if isinstance(table.get(key), str)}
    if table.get("ssd_key") == BOOT_KEY:  # a word, no path
        del paths["ssd_key"]
    models = table.get("models")
    tables = {"models": [_with_paths(each, directory) for each in models]} if isinstance(models, list) else {}
    return {**table, **paths, **tables}


def _where(directory: Path, text: str) -> str:
    try:
        return str(located(directory, text))
    except ValueError as exc:
        raise SettingsError(f"{text}: {exc}") from exc


def parse_topology(document: Mapping[str, Any], state_dir: Path) -> Topology:
    """The system in a TOML document. Raises TopologyError."""
    with mapped(TopologyError):
        return _parse(document, state_dir)


def _parse(table: Mapping[str, Any], state_dir: Path) -> Topology:
    """Raises SettingsError."""
    if "clusters" not in table:
        raise SettingsError(_what_it_is(table))
    document = build(_Document, dict(table), "")
    _check_links(document)
    model, gateway = document.model, {**_lines(document), **document.gateway}
    common = {**document.node, "served_model": model.served_name}
    tables = [
        (where, {**egress, **table, **_model_of(table, cluster, model, state_dir)})
        for index, cluster in enumerate(document.clusters)
        for egress in [_egress(document, cluster)]
        for where, table in _nodes(cluster, index, common)
    ]
    certificates = _certificates(state_dir, [table for _, table in tables])
    if certificates is not None:
        tables = [(where, {**paths(certificates, str(table.get("node_id"))), **table}) for where, table in tables]
        gateway = {**paths(certificates, GATEWAY_NAME), **gateway}
    shown = paths(certificates, PLANNER_NAME) if certificates is not None else {}
    asks_nodes: dict[str, Any] = {key: shown[key] for key in (*IDENTITY_KEYS, "revoked") if key in shown}
    nodes = tuple(build(NodeConfig, table, where) for where, table in tables)
    _check_nodes(nodes)
    if any(node.certificate for node in nodes) and not gateway.keys() >= set(IDENTITY_KEYS):
        raise SettingsError(f"[gateway]: {', '.join(IDENTITY_KEYS)}: missing; nodes with certificates require them")
    # Checked now, so that a typo is reported before anything starts; the agents' real addresses are known later.
    build(GatewayConfig, {**gateway, "tokenizer_dir": ".", "nodes": [{"agent": "127.0.0.1:1"}]}, "[gateway]")
    return Topology(
        model=model,
        gateway=gateway,
        nodes=nodes,
        tokenizer_dir=model.directory(state_dir),
        plan=_plan({**asks_nodes, **document.plan}, document) if document.plan is not None else None,
        certificates=certificates,
    )


def _model_of(
    table: Mapping[str, Any], cluster: ClusterTable, model: ModelChoice, state_dir: Path
) -> Mapping[str, str]:
    """What a node's engine is started with: the model's directory or its own, but for one that only emulates it."""
    directory = model.directory(state_dir)
    if model.profile:
        if not cluster.hardware:
            raise SettingsError(f"clusters: {cluster.name!r} names no hardware, by which a profile lists its times")
        if table.get("engine", "emulated") != "emulated":
            raise SettingsError(f"engine = {table['engine']!r}: a profile can only be emulated")
        return {"engine": "emulated", "model": str(stand_in_file(directory, cluster.hardware))}
    if "model" in table:
        return {}
    return {"model": model.arch if table.get("engine") == "emulated" and model.arch else str(directory)}


def _plan(table: Mapping[str, Any], document: _Document) -> Mapping[str, Any]:
    """What the plan service's own file would say but for its gateways and its folder."""
    model, hardware = document.model, {cluster.kind: cluster.hardware for cluster in reversed(document.clusters)}
    homes = [cluster.name for cluster in document.clusters if cluster.kind == "pd"]
    known = {
        "profile": model.profile,
        "pd_hardware": hardware.get("pd", ""),
        "prfaas_hardware": hardware.get("prfaas", ""),
        "egress_gbps": sum(
            line.capacity_gbps - line.shared_gbps for line in document.links if line.destination in homes
        ),
        "time_scale": model.time_scale,
        "token_scale": model.token_scale,
        "byte_scale": model.byte_scale,
    }
    filled = {**{name: value for name, value in known.items() if value}, **table}
    if "profile" not in filled:
        raise SettingsError("[plan]: profile is missing: a plan needs a model's times, and [model] names no profile")
    try:
        build(ServiceConfig, {"state_dir": ".", **filled}, "[plan]")
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc
    return filled


def _check_links(document: _Document) -> None:
    known = [cluster.name for cluster in document.clusters]
    check_lines(document.links, "links")
    for link in document.links:
        require(link.capacity_gbps > 0, "capacity_gbps", link.capacity_gbps, "a number above 0")
        for end in link.ends:
            require_one_of("links", end, tuple(known))


def _lines(document: _Document) -> Mapping[str, Any]:
    """The lines as the gateway reads them, at the scale of what stands in for the model."""
    scale = document.model.scale.bytes_per_s(1.0) / BYTES_PER_S_PER_GBPS
    rates = {"capacity_gbps", "shared_gbps"}
    tables = [
        {
            each.name: getattr(line, each.name) * scale if each.name in rates else getattr(line, each.name)
            for each in fields(line)
            if getattr(line, each.name) != each.default and each.name != "quantiles_gbps"
        }
        for line in document.links
    ]
    is_said = {"lines", "lines_file"} & document.gateway.keys()
    return {"lines": tables} if tables and not is_said else {}


def _egress(document: _Document, cluster: ClusterTable) -> Mapping[str, Any]:
    """What all lines to a cluster carry, in equal parts: nodes know nothing of each other's egress."""
    rates = {
        destination: document.model.scale.bytes_per_s(line.capacity_gbps - line.shared_gbps) / len(cluster.nodes)
        for (source, destination), line in by_ends(document.links).items()
        if source == cluster.name and cluster.nodes
    }
    return {"egress_bytes_per_s": rates} if rates else {}


def _what_it_is(document: Mapping[str, Any]) -> str:
    node, gateway = document.get("node"), document.get("gateway")
    if isinstance(node, dict) and "node_id" in node:
        return "this is a node's file, for `prfaas node`; a topology has [[clusters]]"
    if isinstance(gateway, dict) and "nodes" in gateway:
        return "this is a gateway's file, for `prfaas gateway`; a topology has [[clusters]]"
    return "this is no topology: it has no [[clusters]]"


def _certificates(state_dir: Path, nodes: list[dict[str, Any]]) -> Path | None:
    """Where certificates are made for nodes that ask for "aead" and have none of their own."""
    needed = any(node.get("integrity") == "aead" and not node.keys() & set(IDENTITY_KEYS) for node in nodes)
    return state_dir / "certificates" if needed else None


def _nodes(cluster: ClusterTable, index: int, common: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What each node's own file would say, and where it is said here. One with a model of its own has that one's name."""
    about = {"cluster": cluster.name, "cluster_kind": cluster.kind}
    return [
        (f"clusters[{index}].nodes[{number}]", {**common, **about, **_own_name(node), **node})
        for number, node in enumerate(cluster.nodes)
    ]


def _own_name(node: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"served_model": Path(str(node["model"])).name} if "model" in node else {}


def _check_nodes(nodes: tuple[NodeConfig, ...]) -> None:
    if not any(node.role == "decode" for node in nodes):
        raise SettingsError("clusters: no node has role = 'decode'; a PD cluster needs at least one")
    names = [node.node_id for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"clusters: node_id = {name!r} is used {names.count(name)} times; it must be unique")
