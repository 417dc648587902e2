"""A whole system in one TOML file: the model, the gateway, and the clusters with their nodes.

[model]                       # arch = built on demand, tiny and seeded; or path = a local model directory
arch = "kimi_linear"
name = "prfaas-tiny"

[gateway]                     # as in a gateway's own file; its nodes and tokenizer are filled in
port = 8000

[node]                        # what all nodes have in common, as in a node's own file
cache_bytes = 268435456

[[clusters]]
name = "east"
kind = "prfaas"
nodes = [{ node_id = "east-p0", role = "prefill" }]
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models import ARCHITECTURES
from gateway.config import parse as parse_gateway
from gateway.errors import ConfigError as GatewayConfigError
from node.config import IDENTITY_KEYS, NodeConfig, node_config
from node.errors import ConfigError as NodeConfigError
from prfaas.certificates import GATEWAY_NAME, paths
from prfaas.errors import TopologyError

DEFAULT_FILE = Path(__file__).parent / "data" / "local.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Which model all nodes run: exactly one of `arch` (built when missing) and `path`."""

    arch: str = ""
    path: str = ""
    name: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.arch) == bool(self.path):
            raise TopologyError(f"[model]: arch = {self.arch!r}, path = {self.path!r}: give exactly one of them")
        if self.arch and self.arch not in ARCHITECTURES:
            raise TopologyError(f"[model]: arch = {self.arch!r}: allowed are {', '.join(ARCHITECTURES)}")

    @property
    def served_name(self) -> str:
        """The name that API users ask for."""
        return self.name or self.arch or Path(self.path).name

    def directory(self, state_dir: Path) -> Path:
        """Where the model lies or will be built."""
        return (Path(self.path) if self.path else state_dir / "models" / f"{self.arch}-{self.seed}").absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A parsed file, as values. Ports that are 0 become known when the processes say them."""

    model: ModelChoice
    gateway: Mapping[str, Any]
    nodes: tuple[NodeConfig, ...]
    certificates: Path | None = None  # where certificates are to be made; None: none are needed, or there are some

    def replace_gateway(self, **values: Any) -> "Topology":
        """The same system with other gateway settings."""
        return replace(self, gateway={**self.gateway, **values})


def load_topology(path: Path, state_dir: Path) -> Topology:
    """Reads and checks a file. Raises TopologyError that names the key, the value and what is allowed."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise TopologyError(f"{path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise TopologyError(f"{path}: not valid TOML: {exc}") from exc
    try:
        return parse_topology(_relative_to(path.parent, document), state_dir)
    except (TopologyError, NodeConfigError, GatewayConfigError) as exc:
        raise TopologyError(f"{path}: {exc}") from exc


def _relative_to(directory: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Relative paths of the model and of certificates are relative to the file that names them."""
    return {key: _with_paths(value, directory) if key != "clusters" else value for key, value in document.items()}


def _with_paths(table: Any, directory: Path) -> Any:
    if not isinstance(table, dict):
        return table
    paths = {key: str(directory / table[key]) for key in ("path", *IDENTITY_KEYS) if isinstance(table.get(key), str)}
    return {**table, **paths}


def parse_topology(document: Mapping[str, Any], state_dir: Path) -> Topology:
    """The system in a TOML document. Raises TopologyError, or the ConfigError of the part that is wrong."""
    if "clusters" not in document:
        raise TopologyError(_what_it_is(document))
    _only_keys(document, ("model", "gateway", "node", "clusters"), "")
    model = _model(document.get("model", {}))
    common = _table(document.get("node", {}), "[node]")
    common = {**common, "model": str(model.directory(state_dir)), "served_model": model.served_name}
    tables = [
        entry
        for index, cluster in enumerate(_list(document.get("clusters", []), "clusters"))
        for entry in _nodes(cluster, index, common)
    ]
    gateway = _table(document.get("gateway", {}), "[gateway]")
    certificates = _certificates(state_dir, [table for _, table in tables])
    if certificates is not None:
        tables = [(where, {**paths(certificates, str(table.get("node_id"))), **table}) for where, table in tables]
        gateway = {**paths(certificates, GATEWAY_NAME), **gateway}
    nodes = tuple(node_config(table, where) for where, table in tables)
    _check_nodes(nodes)
    if any(node.certificate for node in nodes) and not gateway.keys() >= set(IDENTITY_KEYS):
        raise TopologyError(f"[gateway]: {', '.join(IDENTITY_KEYS)}: missing, nodes with certificates ask for one")
    # Checked now, so that a typo is reported before anything starts; the agents' real addresses are known later.
    parse_gateway({"gateway": {**gateway, "tokenizer_dir": ".", "nodes": [{"agent": "127.0.0.1:1"}]}})
    return Topology(model=model, gateway=gateway, nodes=nodes, certificates=certificates)


def _what_it_is(document: Mapping[str, Any]) -> str:
    node, gateway = document.get("node"), document.get("gateway")
    if isinstance(node, dict) and "node_id" in node:
        return "this is a node's file, for `prfaas node`; a topology has [[clusters]]"
    if isinstance(gateway, dict) and "nodes" in gateway:
        return "this is a gateway's file, for `prfaas gateway`; a topology has [[clusters]]"
    return "this is no topology: it has no [[clusters]]"


def _model(table: Any) -> ModelChoice:
    table = _table(table, "[model]")
    _only_keys(table, ("arch", "path", "name", "seed"), "[model]: ")
    for key, value in table.items():
        wanted = int if key == "seed" else str
        if type(value) is not wanted:
            raise TopologyError(f"[model]: {key} = {value!r}: it must be of type {wanted.__name__}")
    return ModelChoice(**table)


def _certificates(state_dir: Path, nodes: list[dict[str, Any]]) -> Path | None:
    """Where certificates are made for nodes that ask for "aead" and have none of their own."""
    needed = any(node.get("integrity") == "aead" and not node.keys() & set(IDENTITY_KEYS) for node in nodes)
    return state_dir / "certificates" if needed else None


def _nodes(cluster: Any, index: int, common: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """What each node's own file would say, and where it is said here."""
    where = f"clusters[{index}]"
    table = _table(cluster, where)
    _only_keys(table, ("name", "kind", "nodes"), f"{where}: ")
    for key in ("name", "kind"):
        if not isinstance(table.get(key), str):
            raise TopologyError(f"{where}: {key} = {table.get(key)!r}: it must be a string")
    about = {"cluster": table["name"], "cluster_kind": table["kind"]}
    return [
        (f"{where}.nodes[{i}]", {**common, **about, **_table(node, f"{where}.nodes[{i}]")})
        for i, node in enumerate(_list(table.get("nodes", []), f"{where}.nodes"))
    ]


def _check_nodes(nodes: tuple[NodeConfig, ...]) -> None:
    if not any(node.role == "decode" for node in nodes):
        raise TopologyError("clusters: no node has role = 'decode'; a PD cluster needs at least one")
    names = [node.node_id for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise TopologyError(f"clusters: node_id = {name!r} is used {names.count(name)} times; it must be unique")


def _only_keys(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise TopologyError(f"{where}unknown key {key!r}; allowed are {', '.join(allowed)}")


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TopologyError(f"{where} = {value!r}: it must be a table")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise TopologyError(f"{where} = {value!r}: it must be an array of tables")
    return value
