"""Where the API server is, which Pods are nodes or model servers, and who we are."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from membership.member import is_here, require_address
from transport.control.settings import SettingsError, require, require_one_of, require_range

KUBERNETES: Final = "kubernetes"  # as metrics and logs call the registry
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where kubelets put a Pod's own token
IN_CLUSTER: Final = "https://kubernetes.default.svc"
PLAIN: Final = "http://"
TLS: Final = "https://"
READINESS: Final = ("agent", "pod", "endpoints")
NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # a DNS label, as namespaces and services are named
POOL_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # a DNS subdomain, as objects are named
MAX_NAMESPACES: Final = 16
MAX_SELECTOR_CHARS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerConfig:
    """Where an API server is, and who we are to it.

    `token_file` and `authority` are those that a kubelet gives each Pod, unless they are named; that token does not go to a
    `server` in clear.
    """

    server: str = IN_CLUSTER
    token_file: Path = ACCOUNT / "token"
    authority: Path = ACCOUNT / "ca.crt"

    def check_server(self) -> None:
        """Raises SettingsError unless it can be asked, and safely."""
        require(self.server.startswith((PLAIN, TLS)), "server", self.server, "http://… or https://…")
        if ":" in self._address.removeprefix("["):
            require_address("server", self._address)
        elif not self._address or "/" in self._address:
            raise SettingsError(f"server = {self.server!r}: must be a scheme, a host and maybe a port")
        if not self.is_tls and not is_here(self._address):
            raise SettingsError(f"server: the token would go to {self._address} in clear: use https:// with authority")

    @property
    def is_tls(self) -> bool:
        """Whether the API server is talked to over TLS."""
        return self.server.startswith(TLS)

    @property
    def base(self) -> str:
        """What the address of each question begins with."""
        return self.server.rstrip("/")

    @property
    def has_token(self) -> bool:
        """Whether there is one to show: `kubectl proxy` has its own."""
        return self.is_tls or not self.is_kubelets

    @property
    def is_kubelets(self) -> bool:
        """Whether the token is the one that the kubelet keeps for this Pod."""
        return self.token_file == ACCOUNT / "token"

    @property
    def _address(self) -> str:
        return self.base.removeprefix(PLAIN).removeprefix(TLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig(ApiServerConfig):
    """`[gateway.membership.kubernetes]`. Pods that `selector` chooses in `namespaces` are nodes; without one, in our own.

    `readiness` says who decides that a node may be asked: its `agent` alone, the Ready condition of its `pod`, or the
    `endpoints` of the `services`. `agent_port` counts where a Pod names no port itself.
    """

    selector: str
    namespaces: tuple[str, ...] = ()
    readiness: str = "agent"
    services: tuple[str, ...] = ()
    agent_port: int = 0

    def __post_init__(self) -> None:
        is_short = 0 < len(self.selector) <= MAX_SELECTOR_CHARS and self.selector.isprintable()
        require(is_short, "selector", self.selector, f"a label selector of 1 to {MAX_SELECTOR_CHARS} characters")
        for key in ("namespaces", "services"):
            names = getattr(self, key)
            require(len(names) <= MAX_NAMESPACES, key, names, f"at most {MAX_NAMESPACES} names")
            require(len(set(names)) == len(names), key, names, "every name once")
            for name in names:
                _require_name(key, name, names)
        require_one_of("readiness", self.readiness, READINESS)
        if (self.readiness == "endpoints") != bool(self.services):
            raise SettingsError('services and readiness = "endpoints" go together')
        require_range("agent_port", self.agent_port, 0, 65535)
        self.check_server()

    @property
    def choice(self) -> str:
        """Which Pods are nodes, in words."""
        where = f"namespaces {', '.join(self.namespaces)}" if self.namespaces else "our own namespace"
        of = f" of services {', '.join(self.services)}" if self.services else ""
        return f"selector {self.selector!r} in {where}, readiness by {self.readiness}{of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePoolConfig(ApiServerConfig):
    """The InferencePool `name`, whose Pods are model servers. Without a `namespace` it is in our own."""

    name: str
    namespace: str = ""

    def __post_init__(self) -> None:
        require(bool(POOL_NAME.fullmatch(self.name)), "name", self.name, "lower-case letters, digits, '-' and '.'")
        if self.namespace:
            _require_name("namespace", self.namespace, self.namespace)
        self.check_server()

    def pods(self, selector: str, namespace: str) -> KubernetesConfig:
        """The Pods that are ready, of those that `selector` chooses."""
        return KubernetesConfig(
            selector=selector,
            namespaces=(namespace,),
            readiness="pod",
            server=self.server,
            token_file=self.token_file,
            authority=self.authority,
        )


def _require_name(key: str, name: str, shown: object) -> None:
    require(bool(NAME.fullmatch(name)), key, shown, "names of lower-case letters, digits and '-'")
