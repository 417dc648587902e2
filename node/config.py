"""Configuration of one node: a frozen value whose constructor is the validator, read from TOML."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from node.errors import ConfigError

CLUSTER_KINDS: Final = ("prfaas", "pd")
ROLES: Final = ("prefill", "decode")
ENGINES: Final = ("embedded", "emulated")
TRANSPORTS: Final = ("auto", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node of a cluster. Ports of 0 mean: any free one (the node prints what it got).

    `transport` "auto" hands KVCache over in shared memory where both ends are on one host; "tcp" never does.
    `transfer_advertise` is the host:port that others should send KVCache to, where a relay or NAT stands before this node.
    `block_size` and `max_model_len` of 0 leave the choice to the engine.
    """

    node_id: str
    cluster: str
    cluster_kind: str
    role: str
    model: str
    served_model: str = ""
    engine: str = "embedded"
    engine_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    control_port: int = 0
    transfer_port: int = 0
    transfer_advertise: str = ""
    engine_port: int = 0
    metrics_port: int = 0
    run_dir: str = ".prfaas/run"
    cache_bytes: int = 256 << 20
    hugepages: bool = False
    chunk_tokens: int = 512
    max_model_len: int = 0
    block_size: int = 0
    connections: int = 4
    transport: str = "auto"
    threads: int = 1
    lease_s: float = 900.0
    room_timeout_s: float = 20.0
    drain_timeout_s: float = 60.0
    engine_start_timeout_s: float = 120.0
    engine_max_restarts: int = 5

    def __post_init__(self) -> None:
        for name in ("node_id", "cluster", "model", "host", "run_dir"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty; it must name something")
        if not all(c.isalnum() or c in "-_." for c in self.node_id):
            raise ConfigError(f"node_id = {self.node_id!r}: only letters, digits, '-', '_' and '.' are allowed")
        _one_of("cluster_kind", self.cluster_kind, CLUSTER_KINDS)
        _one_of("role", self.role, ROLES)
        _one_of("engine", self.engine, ENGINES)
        _one_of("transport", self.transport, TRANSPORTS)
        if self.cluster_kind == "prfaas" and self.role != "prefill":
            raise ConfigError(f"role = {self.role!r}: nodes of a PrfaaS cluster only prefill")
        for name in ("control_port", "transfer_port", "engine_port", "metrics_port"):
            _in_range(name, getattr(self, name), 0, 65535)
        _in_range("cache_bytes", self.cache_bytes, 1 << 20, 1 << 50)
        _in_range("chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _in_range("max_model_len", self.max_model_len, 0, 1 << 30)
        _in_range("block_size", self.block_size, 0, 1 << 16)
        _in_range("connections", self.connections, 1, 256)
        _in_range("threads", self.threads, 1, 1024)
        _in_range("engine_max_restarts", self.engine_max_restarts, 0, 1000)
        for name in ("lease_s", "room_timeout_s", "drain_timeout_s", "engine_start_timeout_s"):
            _in_range(name, getattr(self, name), 0.1, 86400.0)

    @property
    def model_name(self) -> str:
        """The name that API users ask for."""
        return self.served_model or Path(self.model).name


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: allowed are {', '.join(map(repr, allowed))}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value!r}: allowed is {low} to {high}")


def node_config(table: Mapping[str, Any], where: str = "[node]") -> NodeConfig:
    """Parses a TOML table. Raises ConfigError that names the key, the value and what is allowed."""
    known = {f.name: f for f in fields(NodeConfig)}
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known keys are {', '.join(sorted(known))}")
    values = dict(table)
    for key, value in values.items():
        values[key] = _typed(where, key, value, known[key].type)
    missing = [name for name in ("node_id", "cluster", "cluster_kind", "role", "model") if name not in values]
    if missing:
        raise ConfigError(f"{where}: missing key{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    try:
        return NodeConfig(**values)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from None


def _typed(where: str, key: str, value: Any, wanted: Any) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    if wanted == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if wanted in (str, int, float, bool) and type(value) is wanted:
        return value
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted).replace("collections.abc.", "")
    raise ConfigError(f"{where}: {key} = {value!r}: it must be of type {name}")


def load_node_config(path: Path) -> NodeConfig:
    """Reads the [node] table of a TOML file. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    for key in document:
        if key != "node":
            raise ConfigError(f"{path}: unknown table {key!r}; a node's configuration has one table, [node]")
    config = node_config(document.get("node", {}), f"{path}: [node]")
    if config.engine == "emulated":
        return config
    return replace(config, model=str(path.parent / config.model))  # a relative path is relative to its file
