"""Configuration of one node: a frozen value whose constructor is the validator, read from TOML."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from hybrid_cache.eviction.choice import DEFAULT, HISTORY_BLOCKS, POLICIES
from membership.etcd.settings import EtcdConfig
from node.coding import Coding, coding_of
from node.errors import NodeConfigError
from node.known_peers import KnownPeers
from node.process.ports import ListenPort
from transport.control.secret_files import located
from transport.control.settings import (
    SettingsError,
    build,
    in_file,
    mapped,
    read_toml,
    require,
    require_known,
    require_one_of,
    require_range,
)
from transport.path.pacing import Budget, DailyBudget
from transport.path.tcp import is_loopback
from transport.wire.checksum import Integrity
from transport.wire.identity import Identity

CLUSTER_KINDS: Final = ("prfaas", "pd")
ROLES: Final = ("prefill", "decode")
ENGINES: Final = ("embedded", "emulated", "vllm", "sglang")
# Servers of their own: they listen some time after their Hello, and keep a prefix cache that the agent knows from events.
SERVERS: Final = ("vllm", "sglang")
ENGINES_OF_ONE_ROLE: Final = ("sglang",)  # started to prefill or to decode, and for nothing else
CHUNK_TOKENS: Final = 512
# A vLLM server imports itself three times, and compiles where it has a GPU; SGLang's does as much.
START_TIMEOUT_S: Final = {"embedded": 120.0, "emulated": 120.0, "vllm": 900.0, "sglang": 900.0}
TRANSPORTS: Final = ("auto", "rdma", "tcp")
CONGESTION_CONTROLS: Final = ("auto", "bbr", "cubic")
INTEGRITIES: Final = {"plain": Integrity.NONE, "checksum": Integrity.CHECKSUM, "aead": Integrity.AEAD}
IDENTITY_KEYS: Final = ("certificate", "key", "authority")
ANY_CLUSTER: Final = "*"
ANY_ADDRESS: Final = ("0.0.0.0", "::")
# Each with a key ..._port, and one ..._host; gateways look for calls at the host of control.
SECRET_FLAGS: Final = ("--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password")
THIS_MACHINE: Final = "127.0.0.1"
BOOT_KEY: Final = "boot"  # of `ssd_key`
LISTENERS: Final = ("control", "calls", "transfer", "engine", "metrics")
PICKED: Final = "picked"  # a listener that not every node has
GUARDED: Final = ("control", "calls", "transfer", "engine", PICKED)  # by certificates
# What may be changed while the node runs, by SIGHUP.
RELOADABLE: Final = ("egress_bytes_per_s",)

# A rate, rates by time of day, or either of them by destination cluster.
EgressTable: TypeAlias = float | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node of a cluster. Ports of 0 mean: any free one (the node prints what it got).

    `host` is where all of them listen, but those whose own `..._host` says another address: KVCache may come over a WAN while
    engine and control stay inside. Metrics stay on this machine unless `metrics_key` names a file with the SHA-256 of the key
    that a reader of them must show; it is read again for every question.
    `transport` "auto" hands KVCache over in shared memory where both ends are on one host. Else it takes RDMA within
    a cluster whose nodes have NICs on a common fabric, and TCP otherwise; "rdma" insists on NICs and uses no shared
    memory; "tcp" is TCP only.
    `rdma_devices` names the NICs to use; empty: all. Bytes that go by RDMA are checked, but never encrypted: with
    `integrity` "aead" only "rdma" uses it. With `rdma_direct` the nodes of the cluster write into the node's arena by
    themselves, anywhere in it; else each one's NIC reaches a buffer of its own only.
    `picked_port` is where a proxy sends what an endpoint picker has picked the node for; None: nowhere. Other nodes ask there
    for the prefill of such requests, too. One that this node asks for may take `picked_leg_s`.
    `registry` is a folder in which the node writes a file of its own while it runs, for gateways that read the folder; in
    `etcd` it has a key. `control_advertise` is the host, or host:port, at which they reach `control_port`. It is needed where
    that listens at any address.
    `transfer_advertise` is the host:port that others should send KVCache to, where a relay or NAT stands before this node.
    `model_revision` stands for what the model's weight files hold, which is hashed unless given.
    `bootstrap_port` is where an SGLang server that prefills is asked for by those that decode, at the host of `engine_port`.
    `chunk_tokens` not given is 512, and vLLM's own choice where it runs on an accelerator.
    `block_size` and `max_model_len` of 0 leave the choice to the engine, `engine_start_timeout_s` of 0 to the kind of engine.
    `connections` "auto" begins with a few and lets long links have more; a number is what every receiver gets.
    `certificate`, `key` and `authority` are PEM files. With them the control service, calls and `engine_port` speak mutual TLS:
    the agent listens there, and the engine on loopback only. `integrity` "aead" needs them, too. They are read again when they
    change, as is `revoked`, the list of certificates that count no more. Without them a node that other machines reach starts
    only if `plain` says that this is known.
    `integrity` "" is "aead" with certificates, and "checksum" without. With nodes of `plain_clusters` KVCache goes in clear
    all the same, with checksums: they and the way to them are a trusted fabric.
    `peers` are the nodes that KVCache is exchanged with, as CLUSTER/NAME or CLUSTER/*, and `peer_networks` where they are
    called; empty: any. No gateway can have the node send elsewhere.
    `names_secret` is a file of secrets that blocks are named by, the gateways' own (`hybrid_cache.hashing.name_secrets`).
    `egress_bytes_per_s` limits what leaves for each destination cluster; 0 is no limit.
    `coding` makes KVCache smaller on its way, by kind of group (see `node.coding`); an empty table does nothing.
    `stages` is how many share the layers, so that chunks of a prompt follow each other through them: of vLLM the size of its
    pipeline, of the embedded engine processes (experimental), of an emulated engine how it counts. SGLang has one.
    `eviction` is the policy that says which cached block leaves when room is needed, by name; the default one remembers the
    last uses of `eviction_history_blocks` blocks, up to 480 bytes each.
    vLLM fetches media at addresses of `allowed_media_domains` only, and follows no redirect.
    `ssd_dir` is where blocks go that leave memory, up to `ssd_bytes`, in a directory named after the node; empty: nowhere.
    With `ssd_key` they are encrypted there: under the secret in that file, or under one of each start, "boot".
    """

    node_id: str
    cluster: str
    cluster_kind: str
    role: str
    model: str
    served_model: str = ""
    model_revision: str = ""
    engine: str = "embedded"
    engine_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    control_host: str = ""
    transfer_host: str = ""
    engine_host: str = ""
    metrics_host: str = ""
    picked_host: str = ""
    picked_port: int | None = None
    picked_leg_s: float = 600.0
    control_port: int = 0
    control_advertise: str = ""
    registry: str = ""
    etcd: EtcdConfig | None = None
    calls_port: int = 0
    transfer_port: int = 0
    transfer_advertise: str = ""
    engine_port: int = 0
    bootstrap_port: int = 0
    metrics_port: int = 0
    metrics_key: str = ""
    run_dir: str = ".prfaas/run"
    cache_bytes: int = 256 << 20
    hugepages: bool = False
    eviction: str = DEFAULT
    eviction_history_blocks: int = HISTORY_BLOCKS
    ssd_dir: str = ""
    ssd_bytes: int = 0
    ssd_key: str = ""
    allowed_media_domains: tuple[str, ...] = ()
    chunk_tokens: int | None = None
    stages: int = 1
    max_model_len: int = 0
    block_size: int = 0
    connections: int | str = "auto"
    transport: str = "auto"
    rdma_devices: tuple[str, ...] = ()
    rdma_direct: bool = False
    congestion_control: str = "auto"
    integrity: str = ""
    plain_clusters: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    peer_networks: tuple[str, ...] = ()
    certificate: str = ""
    key: str = ""
    authority: str = ""
    revoked: str = ""
    names_secret: str = ""
    plain: bool = False
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
            require(bool(getattr(self, name)), name, getattr(self, name), "a name of something")
        plain = all(c.isalnum() or c in "-_." for c in self.node_id)
        require(plain, "node_id", self.node_id, "of letters, digits, '-', '_' and '.' only")
        require_one_of("cluster_kind", self.cluster_kind, CLUSTER_KINDS)
        require_one_of("role", self.role, ROLES)
        if self.cluster_kind == "prfaas" and self.role != "prefill":
            raise SettingsError(f"role = {self.role!r}: nodes of a PrfaaS cluster only prefill")
        require_one_of("engine", self.engine, ENGINES)
        for name in self.listeners:
            require_range(f"{name}_port", getattr(self, f"{name}_port"), 0, 65535)
        if self.picked_port is not None and self.engine == "sglang":
            raise SettingsError(
                f"picked_port = {self.picked_port}: engine 'sglang' has none: "
                "its servers are paired by rooms, and take no tickets"
            )
        require_range("bootstrap_port", self.bootstrap_port, 0, 65535)
        require_range("chunk_tokens", self.prefill_chunk_tokens, 1, 1 << 20)
        require_range("stages", self.stages, 1, 256)
        if self.stages > 1 and self.engine == "sglang":
            raise SettingsError(f"stages = {self.stages}: the sglang engine has one; other engines have more")
        if self.bootstrap_port and self.engine != "sglang":
            raise SettingsError(f"bootstrap_port = {self.bootstrap_port}: only engine 'sglang' has one")
        require_range("max_model_len", self.max_model_len, 0, 1 << 30)
        require_range("block_size", self.block_size, 0, 1 << 16)
        if self.prefill_chunk_tokens < self.block_size and not (self.engine == "vllm" and self.chunk_tokens is None):
            raise SettingsError(
                f"chunk_tokens = {self.prefill_chunk_tokens}: less than a block, block_size = {self.block_size}"
            )
        require_range("threads", self.threads, 1, 1024)
        require_range("engine_max_restarts", self.engine_max_restarts, 0, 1000)
        for name in ("lease_s", "room_timeout_s", "drain_timeout_s", "picked_leg_s"):
            require_range(name, getattr(self, name), 0.1, 86400.0)
        for argument in self.engine_args:
            if argument.partition("=")[0] in SECRET_FLAGS:
                raise SettingsError(
                    f"engine_args: {argument.partition('=')[0]}: every user of this machine sees it in the process list; "
                    "pass the secret in the engine's environment"
                )
        require_range("engine_start_timeout_s", self.engine_start_timeout_s, 0.0, 86400.0)
        self._check_metrics()
        self._check_memory()
        self._check_links()
        self._check_identity()
        is_listed = self.registry or self.etcd is not None
        if is_listed and not self.control_advertise and self.port("control").host in ANY_ADDRESS:
            key = "registry" if self.registry else "etcd"
            raise SettingsError(f"{key}: control_advertise is missing: the host at which gateways reach control_port")

    def _check_metrics(self) -> None:
        if self.metrics_host and not self.metrics_key and not is_loopback(self.metrics_host):
            raise SettingsError(
                f"metrics_host = {self.metrics_host!r}: other machines reach it without a key: "
                "set metrics_key, a file with the SHA-256 of a key"
            )

    def _check_memory(self) -> None:
        require_range("cache_bytes", self.cache_bytes, 1 << 20, 1 << 50)
        require_one_of("eviction", self.eviction, tuple(POLICIES))
        require_range("eviction_history_blocks", self.eviction_history_blocks, 1, 1 << 30)
        if self.ssd_dir:
            require_range("ssd_bytes", self.ssd_bytes, 1 << 20, 1 << 50)
        elif self.ssd_bytes:
            raise SettingsError(f"ssd_bytes = {self.ssd_bytes!r}: allowed only with ssd_dir, which is empty")
        if self.ssd_key and not self.ssd_dir:
            raise SettingsError(f"ssd_key = {self.ssd_key!r}: allowed only with ssd_dir, which is empty")

    def _check_links(self) -> None:
        require_one_of("transport", self.transport, TRANSPORTS)
        if self.rdma_devices and self.transport == "tcp":
            raise SettingsError("rdma_devices: allowed only with transport 'rdma' or 'auto', which is 'tcp'")
        if self.rdma_direct and self.transport == "tcp":
            raise SettingsError("rdma_direct: allowed only with transport 'rdma' or 'auto', which is 'tcp'")
        require_one_of("congestion_control", self.congestion_control, CONGESTION_CONTROLS)
        require_one_of("integrity", self.sealing, tuple(INTEGRITIES))
        if self.plain_clusters and self.sealing != "aead":
            raise SettingsError("plain_clusters: allowed only with integrity 'aead': without, all KVCache is in clear")
        try:
            self.known_peers()
        except ValueError as exc:
            raise SettingsError(f"peers, peer_networks: {exc}") from exc
        in_range = self.connections == "auto" or (isinstance(self.connections, int) and 1 <= self.connections <= 256)
        require(in_range, "connections", self.connections, "1 to 256, or 'auto'")
        egress_budgets(self.egress_bytes_per_s)
        coding_of(self.coding)

    def _check_identity(self) -> None:
        missing = [name for name in IDENTITY_KEYS if not getattr(self, name)]
        if missing and len(missing) < len(IDENTITY_KEYS):
            raise SettingsError(f"{missing[0]} is missing: {', '.join(IDENTITY_KEYS)} go together")
        if (
            missing
            and not self.plain
            and (far := [name for name in self._guarded if not is_loopback(self.port(name).host)])
        ):
            raise SettingsError(
                f"host = {self.port(far[0]).host!r}: other machines reach {', '.join(f'{name}_port' for name in far)} "
                f"without certificates: set {', '.join(IDENTITY_KEYS)} (`prfaas certificates` makes them), or set plain = true"
            )
        if self.revoked and missing:
            raise SettingsError(f"revoked = {self.revoked!r}: allowed only with {', '.join(IDENTITY_KEYS)}")
        if self.certificate and self.engine == "sglang":
            raise SettingsError(
                "certificate: engine 'sglang' cannot use certificates, neither with its agent nor between its servers"
            )
        if missing and self.sealing == "aead":
            raise SettingsError(
                f"integrity = 'aead': it needs {', '.join(IDENTITY_KEYS)}; `prfaas certificates` makes them"
            )

    @property
    def listeners(self) -> tuple[str, ...]:
        """All that the node listens for: LISTENERS, and picked requests if it takes any."""
        return LISTENERS if self.picked_port is None else (*LISTENERS, PICKED)

    @property
    def _guarded(self) -> tuple[str, ...]:
        return tuple(name for name in self.listeners if name in GUARDED)

    @property
    def plain_listeners(self) -> tuple[str, ...]:
        """Those of `listeners` that other machines reach, and whose words anybody on the way can read."""
        secured = {"control", "calls", "engine", "metrics", PICKED} if self.certificate else set()
        secured |= {"transfer"} if self.sealing == "aead" and not self.plain_clusters else set()
        return tuple(name for name in self.listeners if name not in secured and not is_loopback(self.port(name).host))

    @property
    def plain_hops(self) -> tuple[str, ...]:
        """The same in words, with the clusters whose KVCache comes in clear."""
        only = f" with {', '.join(self.plain_clusters)}" if self.plain_clusters else ""
        return tuple(name + (only if name == "transfer" else "") for name in self.plain_listeners)

    @property
    def sealing(self) -> str:
        """What `integrity` comes to."""
        return self.integrity or ("aead" if self.certificate else "checksum")

    def sealing_with(self, cluster: str) -> Integrity:
        """What protects KVCache between this node and those of a cluster."""
        return Integrity.CHECKSUM if cluster in self.plain_clusters else INTEGRITIES[self.sealing]

    def known_peers(self) -> KnownPeers:
        """Whom KVCache is exchanged with."""
        return KnownPeers(self.peers, self.peer_networks)

    def port(self, listener: str) -> ListenPort:
        """Where one of `listeners` is to listen."""
        host = getattr(self, f"{'control' if listener == 'calls' else listener}_host") or self.host
        if listener == "metrics" and not self.metrics_key and not is_loopback(host):
            host = THIS_MACHINE
        return ListenPort(f"{listener}_port", host, getattr(self, f"{listener}_port") or 0)

    def inner_engine_port(self) -> ListenPort:
        """Where the engine itself is to listen: on loopback where its agent faces the network for it."""
        return self.port("engine") if self.identity is None else ListenPort("engine_port", "127.0.0.1", 0)

    @property
    def model_name(self) -> str:
        """The name that API users ask for."""
        return self.served_model or Path(self.model).name

    @property
    def prefill_chunk_tokens(self) -> int:
        """Tokens per prefill chunk, of an engine that leaves them to the node."""
        return CHUNK_TOKENS if self.chunk_tokens is None else self.chunk_tokens

    @property
    def start_timeout_s(self) -> float:
        """How long the engine may take until it can be used."""
        return self.engine_start_timeout_s or START_TIMEOUT_S[self.engine]

    @property
    def identity(self) -> Identity | None:
        """Who the node is to other nodes and to gateways; None where it is not asked for."""
        if not self.certificate:
            return None
        return Identity(
            certificate=Path(self.certificate),
            key=Path(self.key),
            authority=Path(self.authority),
            revoked=Path(self.revoked) if self.revoked else None,
        )

    def codings(self) -> Coding:
        """What may be done to KVCache that leaves, and what is taken of what comes."""
        return coding_of(self.coding)

    def budgets(self) -> dict[str, Budget]:
        """Egress budget by destination cluster; under ANY_CLUSTER that of all others."""
        return egress_budgets(self.egress_bytes_per_s)

    def reloaded(self, new: "NodeConfig") -> tuple["NodeConfig", list[str]]:
        """What holds once the node has read `new` while it runs, and every key that differs, as a log tells it."""
        told = []
        for name in (each.name for each in fields(self)):
            if (was := getattr(self, name)) != (says := getattr(new, name)):
                told.append(f"{name}: {was!r} -> {says!r}" + ("" if name in RELOADABLE else " (needs a restart)"))
        return replace(self, **{name: getattr(new, name) for name in RELOADABLE}), told


def egress_budgets(table: EgressTable) -> dict[str, Budget]:
    """Budgets by destination cluster. Raises SettingsError."""
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
    is_rate = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    require(is_rate, name, value, (
        'bytes per second from 0 (no limit) on, or a table of them by time of day ("08:00" = 50e6)'
        " or by destination cluster (west = 50e6)"
    ))  # fmt: skip
    return float(value) or None


def _daily(name: str, table: Mapping[str, Any]) -> DailyBudget:
    steps = {_second_of_day(name, at): _rate(f"{name}.{at}", rate) for at, rate in table.items()}
    require(bool(steps) and None not in steps.values(), name, dict(table), "rates above 0, by time of day")
    return DailyBudget(tuple((second, rate) for second, rate in sorted(steps.items()) if rate))


def _second_of_day(name: str, text: str) -> float:
    hour, _, minute = text.partition(":")
    if not (len(hour) == len(minute) == 2 and (hour + minute).isdecimal() and int(hour) < 24 and int(minute) < 60):
        raise SettingsError(f'{name}: {text!r} must be a time of day, "00:00" to "23:59"')
    return int(hour) * 3600.0 + int(minute) * 60.0


def node_config(table: Mapping[str, Any], where: str = "[node]") -> NodeConfig:
    """Parses a TOML table. Raises NodeConfigError that names the key, the value and what is allowed."""
    with mapped(NodeConfigError):
        return build(NodeConfig, dict(table), where)


def load_node_config(path: Path) -> NodeConfig:
    """Reads the [node] table of a TOML file. Raises NodeConfigError."""
    with in_file(path, NodeConfigError):
        document = read_toml(path)
        _only_a_node(document)
        config = build(NodeConfig, document["node"], "[node]", path.parent)
    # A relative path is relative to its file.
    paths = ["model", "metrics_key", "names_secret", *IDENTITY_KEYS, "revoked", "registry"]
    paths = [name for name in paths if getattr(config, name)]
    paths += ["ssd_key"] if config.ssd_key not in ("", BOOT_KEY) else []
    if config.engine != "embedded" and not (path.parent / config.model).exists():
        paths.remove("model")  # a name, not a path
    try:
        absolute: dict[str, Any] = {name: str(located(path.parent, getattr(config, name))) for name in paths}
    except ValueError as exc:
        raise NodeConfigError(f"{path}: {exc}") from exc
    return replace(config, **absolute)


def _only_a_node(document: Mapping[str, Any]) -> None:
    if "clusters" in document:
        raise SettingsError("this is a topology, for `prfaas up`; a node's file has one table, [node]")
    if "gateway" in document:
        raise SettingsError("this is a gateway's file, for `prfaas gateway`; a node's file has one table, [node]")
    require_known(document, ["node"])
    if not isinstance(document.get("node"), dict):
        raise SettingsError("a node's file has one table, [node]; it is missing")
