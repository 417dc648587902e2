"""The plan service's configuration: one TOML file with a [plan] table, checked where it is read.

[plan]
gateways = ["http://127.0.0.1:8000"]     # where each serves /prfaas/load
state_dir = "plan"                       # its memory, its log, and the lock of the leader
profile = "profiles/internal-1t.json"
pd_hardware = "h20x8"
prfaas_hardware = "h200x8"
egress_gbps = 100
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from membership.etcd.settings import EtcdConfig
from membership.lines import BYTES_PER_S_PER_GBPS, read_lines
from planner.errors import InputError
from planner.model.profile import load_profile
from planner.solve.control.controller import ControllerConfig, HardwareModel
from planner.solve.control.ledger import PlanLimits
from planner.solve.control.readings import Units
from planner.solve.control.wishes import LoadAims
from transport.control.secret_files import read_secret
from transport.control.settings import (
    SettingsError,
    WrittenPath,
    build,
    in_file,
    mapped,
    read_toml,
    require,
    require_known,
    require_range,
)
from transport.path.tcp import is_loopback
from transport.peers.guard import Guard
from transport.peers.name import PeerRole
from transport.wire.identity import Identity

DEFAULT_PORT: Final = 8100
WILDCARDS: Final = ("0.0.0.0", "::")
UNREACHABLE: Final = 1_000_000  # nodes of a role: a controller that needs so many converts none


class ApplyMode(StrEnum):
    """Who applies a proposal."""

    ADVISORY = "advisory"  # a person
    AUTO = "auto"  # the service itself, within the limits, as long as it finds it better


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """`[plan]`. `time_scale`, `token_scale` and `byte_scale` are those of a system that stands in for the profile's model.

    `gateway_model` is the model that it plans for, where gateways serve several; without one their default model.
    `token_file` holds a secret that every caller must show; needed where other hosts reach the port. `gateway_key_file`
    holds an operator's key of the gateways, where they ask for one. `certificate`, `key` and `authority` are for mutual
    TLS: with nodes that are to convert, and with all callers where other machines reach the service, unless `plain`
    says that HTTP is meant; `revoked` lists certificates that count no more. `conversions` lets plans move nodes between
    prefill and decode. A node has `drain_timeout_s` to end what it does. `scale` are the loads that scalers should aim at.

    With `etcd` one of several services leads, and all have its plans; `url` is where others reach this one. Where etcd has no
    ledger yet, that of `state_dir` is the first.
    """

    state_dir: WrittenPath
    profile: Path
    pd_hardware: str
    prfaas_hardware: str = ""
    egress_gbps: float = 0.0
    lines_file: Path | None = None
    gateways: tuple[str, ...] = ()
    gateway_model: str = ""
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    gateway_key_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    revoked: Path | None = None
    plain: bool = False
    mode: ApplyMode = ApplyMode.ADVISORY
    conversions: bool = False
    drain_timeout_s: float = 60.0
    poll_timeout_s: float = 5.0
    time_scale: float = 1.0
    token_scale: float = 1.0
    byte_scale: float = 1.0
    log_bytes: int = 4 * 1024 * 1024
    etcd: EtcdConfig | None = None
    url: str = ""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    limits: PlanLimits = field(default_factory=PlanLimits)
    scale: LoadAims = field(default_factory=LoadAims)

    def __post_init__(self) -> None:
        require_range("port", self.port, 0, 65535)
        for name in ("drain_timeout_s", "poll_timeout_s", "log_bytes", "time_scale", "token_scale", "byte_scale"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        require(self.egress_gbps >= 0, "egress_gbps", self.egress_gbps, "a number of at least 0")
        if self.lines_file is not None and self.egress_gbps:
            raise SettingsError(
                "egress_gbps and lines_file: what the lines carry is in their file; leave egress_gbps out"
            )
        require(not self.url or self.url.startswith(("http://", "https://")), "url", self.url, "an http(s) URL")
        if self.url and self.etcd is None:
            raise SettingsError("url: it is what other services say with etcd, and there is no [plan.etcd]")
        if self.etcd is not None and self.host in WILDCARDS and not self.url:
            raise SettingsError(f"host = {self.host!r}: with [plan.etcd] it needs url, where others reach this service")
        for url in self.gateways:
            require(url.startswith(("http://", "https://")), "gateways", url, "http(s) URLs")
        if is_loopback(self.host) or self.speaks_tls:
            return
        if self.token_file is None:
            raise SettingsError(f"host = {self.host!r}: other machines reach it, so token_file is needed")
        if not self.plain:
            raise SettingsError(
                f"host = {self.host!r}: other machines reach it: set certificate, key and authority, "
                "or plain = true if its plans and secret may travel in clear"
            )

    @property
    def speaks_tls(self) -> bool:
        """Whether callers of the service must show a certificate: where other machines reach it, and it has one."""
        return self.identity is not None and not self.plain and not is_loopback(self.host)

    @property
    def identity(self) -> Identity | None:
        """Who the service is to nodes, gateways and operators; None: it has no certificate."""
        if self.certificate is None or self.key is None or self.authority is None:
            return None
        return Identity(certificate=self.certificate, key=self.key, authority=self.authority, revoked=self.revoked)

    @property
    def warnings(self) -> list[str]:
        """What others could do on the ways of this configuration, though it is one that may be served."""
        hops = self.etcd.plain_hops if self.etcd is not None else ()
        return [
            f"[plan.etcd]: etcd at {hop} is another machine, and is asked in clear: others on the way can set plans; "
            "use https:// endpoints with authority, certificate and key"
            for hop in hops
        ]

    @property
    def units(self) -> Units:
        return Units(time=self.time_scale, tokens=self.token_scale, bytes=self.byte_scale)

    @property
    def ruled(self) -> ControllerConfig:
        """The controller's limits; without conversions it may convert nothing."""
        if self.conversions:
            return self.controller
        return replace(self.controller, min_prefill=UNREACHABLE, min_decode=UNREACHABLE)

    def model(self) -> HardwareModel:
        """The hardware as the profile has it. Raises InputError."""
        profile = load_profile(self.profile)
        decode = profile.decode_on(self.pd_hardware)
        return HardwareModel(
            local=profile.prefill_on(self.pd_hardware),
            remote=profile.prefill_on(self.prfaas_hardware or self.pd_hardware),
            kv=profile.kv_size(),
            num_prfaas=0,
            egress_bytes_per_s=self._egress_bytes_per_s(),
            decode_s_per_token=decode.full_step_s / decode.max_running,
        )

    def _egress_bytes_per_s(self) -> float:
        """What all lines carry together. Raises InputError."""
        if self.lines_file is None:
            return self.egress_gbps * BYTES_PER_S_PER_GBPS
        with mapped(InputError):
            return sum(line.bytes_per_s for line in read_lines(self.lines_file))

    def peers(self) -> Guard | None:
        """What knows the rights of those who ask; None: no certificates are asked for. Raises InputError."""
        identity = self.identity
        if identity is None or not self.speaks_tls:
            return None
        try:
            identity.check()
            guard = identity.guard()
        except OSError as exc:
            raise InputError(f"[plan]: {exc}") from exc
        if guard.own.role is not PeerRole.PLANNER:
            raise InputError(f"[plan]: certificate {self.certificate}: it belongs to {guard.own}, not to a planner")
        return guard

    def token(self) -> str:
        """The secret that callers must show, "" without one. Raises InputError."""
        return _secret("token_file", self.token_file)

    def gateway_key(self) -> str:
        """What gateways ask for, "" without one. Raises InputError."""
        return _secret("gateway_key_file", self.gateway_key_file)


def _secret(name: str, file: Path | None) -> str:
    if file is None:
        return ""
    try:
        text = read_secret(file)
    except OSError as exc:
        raise InputError(f"[plan]: {name}: {exc}") from exc
    if not text:
        raise InputError(f"[plan]: {name}: {file} is empty")
    return text


def load(path: Path) -> ServiceConfig:
    """Reads the [plan] table of a file; a relative path in it is relative to the file. Raises InputError."""
    with in_file(path, InputError):
        document = read_toml(path)
        if "clusters" in document:
            raise SettingsError("this is a topology, for `prfaas up`; a plan service's file has one table, [plan]")
        require_known(document, ["plan"])
        if not isinstance(document.get("plan"), dict):
            raise SettingsError("a plan service's file has one table, [plan]; it is missing")
        try:
            return build(ServiceConfig, document["plan"], "[plan]", path.parent)
        except SettingsError:
            raise
        except ValueError as exc:  # of the limits, which are not only read from files
            raise SettingsError(f"[plan]: {exc}") from exc
