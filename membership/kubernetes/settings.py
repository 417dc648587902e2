"""Where the API server is, which Pods are nodes, and who we are."""

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
MAX_NAMESPACES: Final = 16
MAX_SELECTOR_CHARS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """`[gateway.membership.kubernetes]`. Pods that `selector` chooses in `namespaces` are nodes; without one, in our own.

    `readiness` says who decides that a node may be asked: its `agent` alone, the Ready condition of its `pod`, or the
    `endpoints` of the `services`. `agent_port` counts where a Pod names no port itself. `token_file` and `authority` are
    those that a kubelet gives each Pod, unless they are named; that token does not go to a `server` in clear.
    """

    selector: str
    namespaces: tuple[str, ...] = ()
    readiness: str = "agent"
    services: tuple[str, ...] = ()
    agent_port: int = 0
    server: str = IN_CLUSTER
    token_file: Path = ACCOUNT / "token"
    authority: Path = ACCOUNT / "ca.crt"

    def __post_init__(self) -> None:
        is_short = 0 < len(self.selector) <= MAX_SELECTOR_CHARS and self.selector.isprintable()
        require(is_short, "selector", self.selector, f"a label selector of 1 to {MAX_SELECTOR_CHARS} characters")
        for key in ("namespaces", "services"):
            names = getattr(self, key)
            require(len(names) <= MAX_NAMESPACES, key, names, f"at most {MAX_NAMESPACES} names")
            require(len(set(names)) == len(names), key, names, "every name once")
            for name in names:
                require(bool(NAME.fullmatch(name)), key, name, "names of lower-case letters, digits and '-'")
        require_one_of("readiness", self.readiness, READINESS)
        if (self.readiness == "endpoints") != bool(self.services):
            raise SettingsError('services and readiness = "endpoints" go together')
        require_range("agent_port", self.agent_port, 0, 65535)
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
    def choice(self) -> str:
        """Which Pods are nodes, in words."""
        where = f"namespaces {', '.join(self.namespaces)}" if self.namespaces else "our own namespace"
        of = f" of services {', '.join(self.services)}" if self.services else ""
        return f"selector {self.selector!r} in {where}, readiness by {self.readiness}{of}"

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
