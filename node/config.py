"""Configuration of one node: a frozen value whose constructor is the validator, read from TOML."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias

from node.coding import Coding, coding_of
from node.errors import ConfigError
from transport.checksum import Integrity
from transport.crypto import Identity
from transport.pacing import Budget, DailyBudget

CLUSTER_KINDS: Final = ("prfaas", "pd")
ROLES: Final = ("prefill", "decode")
ENGINES: Final = ("embedded", "emulated", "vllm")
# A vLLM server imports itself three times, and compiles where it has a GPU.
START_TIMEOUT_S: Final = {"embedded": 120.0, "emulated": 120.0, "vllm": 900.0}
TRANSPORTS: Final = ("auto", "rdma", "tcp")
CONGESTION_CONTROLS: Final = ("auto", "bbr", "cubic")
INTEGRITIES: Final = {"plain": Integrity.NONE, "checksum": Integrity.CHECKSUM, "aead": Integrity.AEAD}
IDENTITY_KEYS: Final = ("certificate", "key", "authority")
ANY_CLUSTER: Final = "*"
# What may be changed while the node runs, by SIGHUP.
RELOADABLE: Final = ("egress_bytes_per_s",)

# A rate, rates by time of day, or either of them by destination cluster.
EgressTable: TypeAlias = float | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node of a cluster. Ports of 0 mean: any free one (the node prints what it got).

    `transport` "auto" hands KVCache over in shared memory where both ends are on one host, else by RDMA within a cluster
    whose nodes have NICs on a common fabric, else by TCP; "rdma" insists on NICs and uses no shared memory; "tcp" is TCP only.
    `rdma_devices` names the NICs to use; empty: all. Bytes that go by RDMA are checked, but never encrypted: with
    `integrity` "aead" only "rdma" uses it.
    `transfer_advertise` is the host:port that others should send KVCache to, where a relay or NAT stands before this node.
    `block_size` and `max_model_len` of 0 leave the choice to the engine, `engine_start_timeout_s` of 0 to the kind of engine.
    `connections` "auto" begins with a few and lets long links have more; a number is what every receiver gets.
    `certificate`, `key` and `authority` are PEM files, and make the control service speak mutual TLS; `integrity` "aead"
    needs them, too. They are read again when they change.
    `egress_bytes_per_s` limits what leaves for each destination cluster; 0 is no limit.
    `coding` makes KVCache smaller on its way, by kind of group (see `node.coding`); an empty table does nothing.
    `ssd_dir` is where blocks go that leave memory, up to `ssd_bytes`, in a directory named after the node; empty: nowhere.
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
    ssd_dir: str = ""
    ssd_bytes: int = 0
    chunk_tokens: int = 512
    max_model_len: int = 0
    block_size: int = 0
    connections: int | str = "auto"
    transport: str = "auto"
    rdma_devices: tuple[str, ...] = ()
    congestion_control: str = "auto"
    integrity: str = "checksum"
    certificate: str = ""
    key: str = ""
    authority: str = ""
    egress_bytes_per_s: EgressTable = 0.0
    coding: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    lease_s: float = 900.0
    room_timeout_s: float = 20.0
    drain_timeout_s: float = 60.0
    engine_start_timeout_s: float = 0.0
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
        if self.rdma_devices and self.transport == "tcp":
            raise ConfigError("rdma_devices: allowed only with transport 'rdma' or 'auto', which is 'tcp'")
        if self.cluster_kind == "prfaas" and self.role != "prefill":
            raise ConfigError(f"role = {self.role!r}: nodes of a PrfaaS cluster only prefill")
        for name in ("control_port", "transfer_port", "engine_port", "metrics_port"):
            _in_range(name, getattr(self, name), 0, 65535)
        _in_range("cache_bytes", self.cache_bytes, 1 << 20, 1 << 50)
        if self.ssd_dir:
            _in_range("ssd_bytes", self.ssd_bytes, 1 << 20, 1 << 50)
        elif self.ssd_bytes:
            raise ConfigError(f"ssd_bytes = {self.ssd_bytes!r}: allowed only with ssd_dir, which is empty")
        _in_range("chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _in_range("max_model_len", self.max_model_len, 0, 1 << 30)
        _in_range("block_size", self.block_size, 0, 1 << 16)
        if self.connections != "auto" and (isinstance(self.connections, str) or not 1 <= self.connections <= 256):
            raise ConfigError(f"connections = {self.connections!r}: allowed is 1 to 256, or 'auto'")
        _one_of("congestion_control", self.congestion_control, CONGESTION_CONTROLS)
        _one_of("integrity", self.integrity, tuple(INTEGRITIES))
        self._check_identity()
        egress_budgets(self.egress_bytes_per_s)
        coding_of(self.coding)
        _in_range("threads", self.threads, 1, 1024)
        _in_range("engine_max_restarts", self.engine_max_restarts, 0, 1000)
        for name in ("lease_s", "room_timeout_s", "drain_timeout_s"):
            _in_range(name, getattr(self, name), 0.1, 86400.0)
        _in_range("engine_start_timeout_s", self.engine_start_timeout_s, 0.0, 86400.0)

    def _check_identity(self) -> None:
        missing = [name for name in IDENTITY_KEYS if not getattr(self, name)]
        if missing and len(missing) < len(IDENTITY_KEYS):
            raise ConfigError(f"{missing[0]} is missing: {', '.join(IDENTITY_KEYS)} go together")
        if missing and self.integrity == "aead":
            raise ConfigError(
                f"integrity = 'aead': it needs {', '.join(IDENTITY_KEYS)}; `prfaas certificates` makes them"
            )

    @property
    def model_name(self) -> str:
        """The name that API users ask for."""
        return self.served_model or Path(self.model).name

    @property
    def start_timeout_s(self) -> float:
        """How long the engine may take until it can be used."""
        return self.engine_start_timeout_s or START_TIMEOUT_S[self.engine]

    @property
    def identity(self) -> Identity | None:
        """Who the node is to other nodes and to gateways; None where nobody asks."""
        if not self.certificate:
            return None
        return Identity(certificate=Path(self.certificate), key=Path(self.key), authority=Path(self.authority))

    def codings(self) -> Coding:
        """What may be done to KVCache that leaves, and what is taken of what comes."""
        return coding_of(self.coding)

    def budgets(self) -> dict[str, Budget]:
        """Egress budget by destination cluster; under ANY_CLUSTER that of all others."""
        return egress_budgets(self.egress_bytes_per_s)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} = {value!r}: allowed are {', '.join(map(repr, allowed))}")


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} = {value!r}: allowed is {low} to {high}")


def egress_budgets(table: EgressTable) -> dict[str, Budget]:
    """Budgets by destination cluster. Raises ConfigError."""
    if not isinstance(table, Mapping):
        return {ANY_CLUSTER: _rate("egress_bytes_per_s", table)}
    if any(":" in str(key) for key in table):
        return {ANY_CLUSTER: _daily("egress_bytes_per_s", table)}
    budgets: dict[str, Budget] = {ANY_CLUSTER: None}
    for cluster, budget in table.items():
        name = f"egress_bytes_per_s.{cluster}"
        budgets[cluster] = _daily(name, budget) if isinstance(budget, Mapping) else _rate(name, budget)
    return budgets


def _rate(name: str, value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(
            f"{name} = {value!r}: allowed are bytes per second from 0 (no limit) on, or a table"
            ' of them by time of day ("08:00" = 50e6) or by destination cluster (west = 50e6)'
        )
    return float(value) or None


def _daily(name: str, table: Mapping[str, Any]) -> DailyBudget:
    steps = {_second_of_day(name, at): _rate(f"{name}.{at}", rate) for at, rate in table.items()}
    if not steps or None in steps.values():
        raise ConfigError(f"{name} = {dict(table)!r}: allowed are rates above 0, by time of day")
    return DailyBudget(tuple((second, rate) for second, rate in sorted(steps.items()) if rate))


def _second_of_day(name: str, text: str) -> float:
    hour, _, minute = text.partition(":")
    if not (len(hour) == len(minute) == 2 and (hour + minute).isdecimal() and int(hour) < 24 and int(minute) < 60):
        raise ConfigError(f'{name}: {text!r} is no time of day; allowed are "00:00" to "23:59"')
    return int(hour) * 3600.0 + int(minute) * 60.0


def node_config(table: Mapping[str, Any], where: str = "[node]") -> NodeConfig:
    """Parses a TOML table. Raises ConfigError that names the key, the value and what is allowed."""
    known = {f.name: f for f in fields(NodeConfig)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}{meant}; known keys are {', '.join(sorted(known))}")
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
    if key in ("egress_bytes_per_s", "coding"):
        return value  # its own parser says what is wrong with it
    if wanted == int | str and type(value) in (int, str):
        return value
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
    _only_a_node(document, path)
    config = node_config(document["node"], f"{path}: [node]")
    # A relative path is relative to its file.
    paths = [name for name in ("model", *IDENTITY_KEYS) if getattr(config, name)]
    if config.engine == "emulated" or (config.engine == "vllm" and not (path.parent / config.model).exists()):
        paths.remove("model")  # a name, not a path
    absolute: dict[str, Any] = {name: str(path.parent / getattr(config, name)) for name in paths}
    return replace(config, **absolute)


def _only_a_node(document: Mapping[str, Any], path: Path) -> None:
    if "clusters" in document:
        raise ConfigError(f"{path}: this is a topology, for `prfaas up`; a node's file has one table, [node]")
    if "gateway" in document:
        raise ConfigError(f"{path}: this is a gateway's file, for `prfaas gateway`; a node's has one table, [node]")
    for key in document:
        if key != "node":
            raise ConfigError(f"{path}: unknown table {key!r}; a node's configuration has one table, [node]")
    if not isinstance(document.get("node"), dict):
        raise ConfigError(f"{path}: a node's configuration has one table, [node]; there is none")
