"""The gateway's configuration: one TOML file, checked where it is read, with an error that says what is allowed.

[gateway]
port = 8000
tokenizer_dir = "models/tiny"

[gateway.routing]
threshold_tokens = 16384

[[gateway.nodes]]
agent = "127.0.0.1:7001"      # cluster, role and URLs are asked of the agent

[gateway.membership]
file = "nodes.toml"           # more nodes, which may come and go
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self

from gateway.config.audit import AuditConfig
from gateway.config.classes import AdmissionConfig, ClassConfig, check_classes, names_of
from gateway.config.fleet import FleetConfig
from gateway.config.membership import MembershipConfig
from gateway.config.models import REST, ModelCatalog, ModelTable, check_models, ordered
from gateway.config.oidc import OidcConfig
from gateway.config.operators import OperatorConfig, check_operators, nameless
from gateway.config.plan import PlanConfig
from gateway.config.request_log import RequestLogConfig
from gateway.config.tenants import TenantConfig, check_digest, check_tenants
from gateway.config.timeouts import Timeouts
from gateway.config.traces import TracesConfig
from gateway.config.wrong_keys import WrongKeysConfig
from gateway.errors import GatewayConfigError
from membership.lines import Line, check_lines, read_lines
from membership.member import Member, is_here, require_address
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.placement import PLACERS
from transport.control.settings import (
    SettingsError,
    WrittenPath,
    build,
    in_file,
    read_toml,
    require,
    require_known,
    require_one_of,
    require_range,
)
from transport.path.tcp import is_loopback
from transport.wire.identity import Identity

MAX_BODY_BYTES: Final = 10 * 1024 * 1024
MAX_SEVERAL_BYTES: Final = 256 * 1024 * 1024
MAX_WORKERS: Final = 64
HOST: Final = re.compile(r"[a-z0-9._-]+")
STRICT_TRANSPORT: Final = "max-age=31536000"
POLICY: Final = re.compile(r"max-age=\d{1,10}(; includeSubDomains)?(; preload)?")  # RFC 6797


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where a node's agent answers gRPC, as `host:port`.

    `name` is what its certificate must carry, where that is not the host; only with mutual TLS.
    """

    agent: str
    name: str = ""

    def __post_init__(self) -> None:
        require_address("agent", self.agent)

    @property
    def is_here(self) -> bool:
        """Whether the way to it does not leave this machine."""
        return is_here(self.agent)

    @property
    def member(self) -> Member:
        """As a member of the fleet: its address is its identity."""
        return Member(id=self.agent, agent=self.agent, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """What the routing decision is told beyond the threshold.

    `tie_share` of the prompts with exactly as many uncached tokens as the threshold stay local.
    An empty `home_cluster` lets load choose the decode cluster.
    With `cross_cluster_cache` a prefix that only the other cluster has is sent where the prefill runs, while the link between
    them has room to spare; `link_bytes_per_s` is the bandwidth of a link that is not measured yet, 0 is unknown and counts
    as none to spare. `fetch_bytes_per_s` is how fast prefixes move inside a cluster, until some have shown it; 0 keeps them
    where they are.
    A decode node computes up to `increment_tokens` of a prompt whose beginning it holds itself. It does so while that
    is soon done and it has time for it; 0 leaves every prompt to prefill nodes. While a decode node has spent
    `decode_prefill_share` of its time on prompts, it is given no more of them, even if no node has room.
    `decode_load_slack` is how much slower a decode node's tokens may be for the sake of a prefix that it holds. With
    `by_total_length` whole prompts are compared with the threshold, cached or not, as by a router without caches: to
    compare with. With `replicate` prefixes that many requests want at once are copied to further prefill nodes of
    their cluster. With `share_egress` the senders of a cluster share their egress budgets to another one by what
    waits at each of them. At most `max_moves` prefixes are on their way at once, and none for longer than
    `move_timeout_s`.
    """

    prefill_tokens_per_s: float = 20_000.0
    tie_share: float = DEPLOYED.tie_share
    decode_slots: int = 16
    placement: str = DEPLOYED.placement
    balancing_ratio: float = 0.0
    home_cluster: str = ""
    cross_cluster_cache: bool = DEPLOYED.cross_cluster_cache
    link_bytes_per_s: float = 0.0
    fetch_bytes_per_s: float = DEPLOYED.fetch_bytes_per_s
    increment_tokens: int = DEPLOYED.increment_tokens
    decode_prefill_share: float = DEPLOYED.decode_prefill_share
    decode_load_slack: float = DEPLOYED.decode_load_slack
    by_total_length: bool = False
    replicate: bool = False
    share_egress: bool = False
    max_moves: int = 4
    move_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        require_one_of("placement", self.placement, sorted(PLACERS))
        ratio = self.balancing_ratio
        require(ratio == 0 or ratio >= 1, "balancing_ratio", ratio, "a number of at least 1, or 0, which adapts it")
        require(self.prefill_tokens_per_s > 0, "prefill_tokens_per_s", self.prefill_tokens_per_s, "a number above 0")
        require(0 <= self.tie_share <= 1, "tie_share", self.tie_share, "a number from 0 to 1")
        require(self.decode_slots > 0, "decode_slots", self.decode_slots, "an integer above 0")
        for name in ("link_bytes_per_s", "fetch_bytes_per_s", "decode_load_slack"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "a number of at least 0")
        require(self.increment_tokens >= 0, "increment_tokens", self.increment_tokens, "an integer of at least 0")
        require(
            0 <= self.decode_prefill_share <= 1,
            "decode_prefill_share",
            self.decode_prefill_share,
            "a number from 0 to 1",
        )
        require(self.max_moves > 0, "max_moves", self.max_moves, "an integer above 0")
        require(self.move_timeout_s > 0, "move_timeout_s", self.move_timeout_s, "a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """What anybody may take who reaches the port, before a request of theirs is served.

    At most `max_connections` are open, 0: as many as descriptors allow. A further one takes the place of the one that has
    been without a request for longest. `max_connections_per_address` and `max_bodies_per_address` (under way at once) do not
    hold for this host and for `trusted_proxies`, which speak for many; `max_receiving_bytes` is for all together, and so is
    `max_reading_bytes`, of bodies that are there and wait for a place, or to be read: half of it is one tenant's at most.
    A request's head must be there `header_s` after the connection or, on one that has been used, after `idle_s`. A body has
    `body_grace_s`, and a second more for every `min_body_bytes_per_s` bytes that have come, up to `timeouts.body_s`.
    """

    max_connections: int = 0
    max_connections_per_address: int = 512
    max_bodies_per_address: int = 128
    max_receiving_bytes: int = 512 * 1024 * 1024
    max_reading_bytes: int = 512 * 1024 * 1024
    trusted_proxies: tuple[str, ...] = ()
    header_s: float = 15.0
    idle_s: float = 75.0
    body_grace_s: float = 5.0
    min_body_bytes_per_s: int = 4096

    def __post_init__(self) -> None:
        require(self.max_connections >= 0, "max_connections", self.max_connections, "an integer of at least 0")
        for name in (
            "max_connections_per_address",
            "max_bodies_per_address",
            "max_receiving_bytes",
            "max_reading_bytes",
        ):
            require(getattr(self, name) > 0, name, getattr(self, name), "an integer above 0")
        for name in ("header_s", "idle_s", "body_grace_s", "min_body_bytes_per_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        for address in self.trusted_proxies:
            require(_is_address(address), "trusted_proxies", address, "a list of IP addresses")

    def divided(self, workers: int) -> Self:
        """What each of so many workers may let strangers take, so that together they never let them take more than this.

        Connections come to workers at random, so what is divided is nearly as much as the whole.
        """
        if workers == 1:
            return self
        shares = {name: getattr(self, name) // workers for name in DIVIDED}
        return replace(self, **shares)

    def trusts(self, address: str) -> bool:
        """Whether requests from `address` are those of many clients."""
        return address in self.trusted_proxies or (_is_address(address) and ip_address(address).is_loopback)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """`[gateway]`. `threshold_tokens` is the paper's t, in uncached tokens.

    `nodes` are there from the start, those of `membership` come and go.

    `port` 0 takes any free port; `metrics_port` 0 serves /metrics and /prfaas/requests on the API port, any other value on
    that port alone, with descriptors of its own.
    `workers` processes answer on one port, and are one gateway: limits, metrics and records are those of all of them.
    All answers to one request take `max_several_bytes` of requests to engines at most: each is asked with the body's fields.
    A request is tried on `max_attempts` nodes, a stream is carried on by `max_takeovers` more. Of the requests of the last ten
    seconds or so `retry_share` may be tried again after failures that cost nodes work, and `least_retries` more.
    `kept_answer_bytes` of the names of each answer's tokens are kept, about six a token. With them another decode
    node can go on when one fails in the middle of a stream; 0: no answer is continued.
    Each worker remembers `prompt_memory_bytes` of earlier prompts (tokens, hashes, texts), which tenants share
    fairly. Each of its processes for long bodies remembers as much.
    `drained_dir` remembers which links are drained when the gateway is started anew.
    `links`, as "FROM:TO" by names of clusters, are shown, and missed, before any node of theirs has been heard of.
    `lines` are described once for gateways and plans, here or in a `lines_file` that others read, too.
    Nodes of clusters that are not `near` say what they have cached by digests, which are short and may be wrong; an empty
    `near` has every node name every block.
    `tls_certificate` and `tls_key` are PEM files, read again when they change: with them all listeners speak HTTPS. A gateway
    that other machines reach without says so, unless `plain_api` says that this is meant. Over HTTPS every answer has
    `strict_transport`, which browsers remember for the whole host; with "" no answer has it.
    `certificate`, `key` and `authority` are PEM files: with them, agents are talked to over mutual TLS. `revoked` lists
    certificates that count no more. Without, agents on other machines are talked to only if `plain` says that this is known.
    `names_secret` is a file of secrets that blocks are named by (`hybrid_cache.hashing.name_secrets`), the same for all.
    Where the file has two, every prompt is named by the first at most `names_overlap_s` after the file was written.
    Media at addresses are taken from `allowed_media_domains` alone.
    `operators` may look at this gateway and change it. `operator_keys` are of operators without a name, with all rights. A
    browser in which an operator has logged in need not show the key again for `session_s`.
    Without `tenants` no client needs a key; a gateway that other machines reach then starts only if it is `open`. Such a gateway
    answers at addresses, at names without a dot and at those of `hosts`; an `open` one without `hosts` answers at any name.
    `tokenizer_dir`, `served_model`, `revisions` and `plan` are of the model of all nodes that no table of `models` names. A
    further model that nodes bring is served by the tokenizer in the folder of `models_dir` that has its name. It is forgotten
    `model_grace_s` after its last node has left. Requests that name no model are for `default_model`.
    """

    tokenizer_dir: Path | None = None
    models: tuple[ModelTable, ...] = ()
    models_dir: Path | None = None
    default_model: str = ""
    model_grace_s: float = 300.0
    nodes: tuple[NodeAddress, ...] = ()
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int = 0
    workers: int = 1
    served_model: str = ""
    revisions: tuple[str, ...] = ()
    threshold_tokens: float = 16_384.0
    max_body_bytes: int = MAX_BODY_BYTES
    max_several_bytes: int = MAX_SEVERAL_BYTES
    max_in_flight: int = 1024
    max_waiting: int = 256
    max_attempts: int = DEPLOYED.max_attempts
    max_takeovers: int = 8
    retry_share: float = 0.2
    least_retries: int = 10
    kept_answer_bytes: int = 1 << 20
    prompt_memory_bytes: int = 128 << 20
    tokenise_threads: int = 2
    kept_records: int = 4096
    drained_dir: WrittenPath | None = None
    links: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    lines_file: Path | None = None
    log_level: str = "info"
    log_format: str = "text"
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    revoked: Path | None = None
    names_secret: Path | None = None
    names_overlap_s: float = 86_400.0
    plain: bool = False
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    plan: PlanConfig = field(default_factory=PlanConfig)
    strangers: Strangers = field(default_factory=Strangers)
    request_log: RequestLogConfig = field(default_factory=RequestLogConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    classes: Mapping[str, ClassConfig] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    operators: tuple[OperatorConfig, ...] = ()
    operator_keys: tuple[str, ...] = ()
    session_s: float = 43_200.0
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    plain_api: bool = False
    strict_transport: str = STRICT_TRANSPORT
    wrong_keys: WrongKeysConfig = field(default_factory=WrongKeysConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    oidc: OidcConfig = field(default_factory=OidcConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    open: bool = False
    hosts: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            require_range(name, getattr(self, name), 0, 65535)
        for name in (
            "max_body_bytes",
            "max_several_bytes",
            "max_in_flight",
            "max_waiting",
            "max_attempts",
            "tokenise_threads",
            "kept_records",
            "prompt_memory_bytes",
        ):
            require(getattr(self, name) > 0, name, getattr(self, name), "an integer above 0")
        require(self.retry_share >= 0, "retry_share", self.retry_share, "a number of at least 0")
        require(self.max_takeovers >= 0, "max_takeovers", self.max_takeovers, "an integer of at least 0")
        require(self.least_retries >= 0, "least_retries", self.least_retries, "an integer of at least 0")
        require(self.kept_answer_bytes >= 0, "kept_answer_bytes", self.kept_answer_bytes, "an integer of at least 0")
        require_range("workers", self.workers, 1, MAX_WORKERS)
        for name in DIVIDED:
            limit = getattr(self.strangers, name)
            wanted = f"at least the number of workers, {self.workers}"
            require(limit == 0 or limit >= self.workers, f"strangers.{name}", limit, wanted)
        for link in self.links:
            source, _, destination = link.partition(":")
            require(bool(source and destination) and source != destination, "links", link, '"FROM:TO", two clusters')
        check_lines(self.lines, "lines")
        require_one_of("log_level", self.log_level, LOG_LEVELS)
        require_one_of("log_format", self.log_format, LOG_FORMATS)
        require(self.threshold_tokens >= 0, "threshold_tokens", self.threshold_tokens, "a number of at least 0")
        check_models(self.models, self.served_model, self.default_model, self.models_dir, self.workers)
        require(self.model_grace_s >= 0, "model_grace_s", self.model_grace_s, "a number of seconds of at least 0")
        if self.tokenizer_dir is None and not self.models:
            raise SettingsError("missing: tokenizer_dir (or [[gateway.models]] tables, each with its own)")
        check_classes(self.classes, self.admission.default_class)
        check_tenants(self.tenants, names_of(self.classes), has_tokens=self.oidc.takes_tenants)
        require(self.names_overlap_s >= 0, "names_overlap_s", self.names_overlap_s, "a number of seconds of at least 0")
        require(self.session_s > 0, "session_s", self.session_s, "a number of seconds above 0")
        for key in self.operator_keys:
            check_digest("operator_keys", key)
        check_operators(self.all_operators, self.tenants)
        for name in self.allowed_media_domains:
            require(bool(HOST.fullmatch(name)), "allowed_media_domains", name, "a list of names, in lower case")
        for name in self.hosts:
            require(bool(HOST.fullmatch(name)), "hosts", name, "a list of names, in lower case and without a port")
        if not (self.tenants or self.open or is_loopback(self.host)):
            raise SettingsError(
                f"host = {self.host!r}: other machines reach it without a key: "
                "add [gateway.tenants.NAME] (`prfaas key` makes keys), or set open = true"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise SettingsError("tls_certificate and tls_key go together")
        is_policy = not self.strict_transport or bool(POLICY.fullmatch(self.strict_transport))
        require(is_policy, "strict_transport", self.strict_transport, f'"" or as {STRICT_TRANSPORT!r}')
        missing = [name for name in IDENTITY_KEYS if getattr(self, name) is None]
        if missing and len(missing) < len(IDENTITY_KEYS):
            raise SettingsError(f"{missing[0]} is missing: {', '.join(IDENTITY_KEYS)} go together")
        if self.revoked is not None and missing:
            raise SettingsError(f"revoked = {str(self.revoked)!r}: allowed only with {', '.join(IDENTITY_KEYS)}")
        agents = [node.agent for node in self.nodes]
        is_listed = bool(agents) or self.membership.is_set
        require(is_listed, "nodes", agents, "at least one [[gateway.nodes]] table, or [gateway.membership] says where")
        require(len(set(agents)) == len(agents), "nodes", agents, "every agent once")
        if self.fleet.etcd is not None and self.drained_dir is not None:
            raise SettingsError("drained_dir: the etcd of [gateway.fleet] remembers drained links already")
        if missing and not self.plain and (far := [node.agent for node in self.nodes if not node.is_here]):
            raise SettingsError(
                f"nodes: {far[0]!r} is another machine, and traffic to it would be in clear: set "
                f"{', '.join(IDENTITY_KEYS)} (`prfaas certificates` makes them), or set plain = true"
            )

    def admits(self, member: Member) -> bool:
        """Whether it may be spoken to: traffic to other machines is in clear only where the file says so."""
        return self.plain or self.identity is not None or member.is_here

    def with_changes_of(self, other: Self) -> Self:
        """This configuration with what `other` has different and a running gateway can take over."""
        routing = replace(self.routing, **{name: getattr(other.routing, name) for name in CHANGEABLE_ROUTING})
        taken = {name: getattr(other, name) for name in CHANGEABLE}
        if not self._may_have(other.nodes):
            taken["nodes"] = self.nodes
        if not self._may_take_models_of(other):
            taken["models"] = self.models
        return replace(self, routing=routing, **taken)

    def _may_take_models_of(self, other: Self) -> bool:
        """Whether its models go with the rest of this configuration; the parts of the default one stay as long as a gateway."""
        kept = ("served_model", "models_dir", "default_model", "tokenizer_dir")
        is_kept = all(getattr(self, name) == getattr(other, name) for name in kept)
        was, will = (each.catalog.by_name(each.catalog.default) for each in (self, other))
        assert was is not None
        assert will is not None
        if was.name != REST and (was.tokenizer_dir, was.plan) != (will.tokenizer_dir, will.plan):
            return False
        return is_kept and was.name == will.name

    def _may_have(self, nodes: Sequence[NodeAddress]) -> bool:
        """Whether these nodes go with the rest of this configuration; with that of their own file they do."""
        return (bool(nodes) or self.membership.is_set) and all(self.admits(node.member) for node in nodes)

    @property
    def catalog(self) -> ModelCatalog:
        """The models that the file names."""
        own = ModelTable(name=REST, revisions=self.revisions, plan=self.plan)
        models = (own, *self.models) if self.tokenizer_dir is not None else self.models
        default = self.default_model if self.default_model != self.served_model else REST
        own_nodes = frozenset({self.served_model} - {""}) if self.models_dir is not None else None
        return ModelCatalog(ordered(models, default), self.served_model, own_nodes)

    def differences(self, other: Self) -> list[str]:
        """The keys in which `other` differs."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]

    @property
    def scheme(self) -> str:
        """How clients speak to its listeners."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def is_in_clear(self) -> bool:
        """Whether what other machines ask crosses networks in clear, and nothing says that this is meant."""
        return self.scheme == "http" and not self.plain_api and not is_loopback(self.host)

    @property
    def all_operators(self) -> tuple[OperatorConfig, ...]:
        """Those of `operators`, and those that `operator_keys` stands for."""
        return (*self.operators, *nameless(self.operator_keys))

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """The ends of `links` and of `lines`: source, destination."""
        pairs = (link.partition(":") for link in self.links)
        named = ((source, destination) for source, _, destination in pairs)
        return tuple(dict.fromkeys((*named, *(line.ends for line in self.lines))))

    @property
    def identity(self) -> Identity | None:
        """Who the gateway is to agents; None: it talks to them in plain text."""
        if self.certificate is None or self.key is None or self.authority is None:
            return None
        return Identity(certificate=self.certificate, key=self.key, authority=self.authority, revoked=self.revoked)


DIVIDED: Final = (
    "max_connections",
    "max_connections_per_address",
    "max_bodies_per_address",
    "max_receiving_bytes",
    "max_reading_bytes",
)
CHANGEABLE: Final = (
    "nodes", "models", "revisions", "threshold_tokens", "max_in_flight", "max_waiting", "log_level", "admission", "classes",
    "tenants", "operators", "operator_keys", "names_secret", "names_overlap_s", "links", "lines", "near",
)  # fmt: skip
CHANGEABLE_ROUTING: Final = (
    "prefill_tokens_per_s", "tie_share", "placement", "balancing_ratio", "home_cluster", "cross_cluster_cache",
    "fetch_bytes_per_s", "increment_tokens", "decode_prefill_share", "decode_load_slack", "by_total_length",
)  # fmt: skip
LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
IDENTITY_KEYS: Final = ("certificate", "key", "authority")


def load(path: Path, copy: Path | None = None) -> GatewayConfig:
    """Reads the [gateway] table of a TOML file, from a `copy` of it if there is one. Raises GatewayConfigError.

    A relative path in it is relative to the file.
    """
    with in_file(path, GatewayConfigError):
        document = read_toml(copy or path)
        _only_a_gateway(document)
        if not {"nodes", "membership"} & document["gateway"].keys():
            raise SettingsError("[gateway]: missing: nodes")
        return _with_lines(build(GatewayConfig, document["gateway"], "[gateway]", path.parent))


def _with_lines(config: GatewayConfig) -> GatewayConfig:
    """With those of its `lines_file`. Raises SettingsError."""
    if config.lines_file is None:
        return config
    require(not config.lines, "lines", "[[gateway.lines]]", "left out beside lines_file, which describes them all")
    return replace(config, lines=read_lines(config.lines_file))


def _only_a_gateway(document: Mapping[str, Any]) -> None:
    if "clusters" in document:
        raise SettingsError("this is a topology, for `prfaas up`; a gateway's file has one table, [gateway]")
    if "node" in document and "gateway" not in document:
        raise SettingsError("this is a node's file, for `prfaas node`; a gateway's file has one table, [gateway]")
    require_known(document, ["gateway"])
    if not isinstance(document.get("gateway"), dict):
        raise SettingsError("a gateway's file has one table, [gateway]; it is missing")
