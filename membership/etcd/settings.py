"""Where etcd is, and who we are to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from membership.member import MAX_WORD_CHARS, is_here, require_address
from transport.control.settings import SettingsError, require

PLAIN: Final = "http://"
TLS: Final = "https://"
MAX_ENDPOINTS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """`[gateway.membership.etcd]`, `[node.etcd]` and `[plan.etcd]`. `endpoints` are addresses of one etcd, tried in order.

    Every key of ours begins with `prefix`. An endpoint is host:port, and may begin with http:// or https://. `authority`, a
    PEM file, makes it https; https without one trusts the authorities that gRPC knows. `name` is what etcd's certificate
    carries, where that is not the host. etcd's user is the CN of `certificate`, or `user` with the password in
    `password_file`.
    """

    endpoints: tuple[str, ...]
    prefix: str = "/prfaas/"
    authority: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    name: str = ""
    user: str = ""
    password_file: Path | None = None

    def __post_init__(self) -> None:
        require(
            0 < len(self.endpoints) <= MAX_ENDPOINTS, "endpoints", self.endpoints, f"1 to {MAX_ENDPOINTS} addresses"
        )
        require(len(set(self.targets)) == len(self.endpoints), "endpoints", self.endpoints, "every address once")
        for endpoint, target in zip(self.endpoints, self.targets, strict=True):
            require_address("endpoints", target)
            if endpoint.startswith(PLAIN) and (self.authority is not None or self.certificate is not None):
                raise SettingsError(f"endpoints: {endpoint!r}: certificates are for https://")
        require(len({*map(self._is_tls, self.endpoints)}) == 1, "endpoints", self.endpoints, "all http or all https")
        is_word = 0 < len(self.prefix) <= MAX_WORD_CHARS and self.prefix.isprintable() and " " not in self.prefix
        require(is_word, "prefix", self.prefix, f"1 to {MAX_WORD_CHARS} characters that can be printed, and no blanks")
        if (self.certificate is None) != (self.key is None):
            raise SettingsError("certificate and key go together")
        if self.certificate is not None and not self.is_tls:
            raise SettingsError("certificate: it would not be shown: use https:// endpoints, or an authority")
        if bool(self.user) != (self.password_file is not None):
            raise SettingsError("user and password_file go together")
        if self.user and self.plain_hops:
            raise SettingsError(
                f"user: the password would go to {self.plain_hops[0]} in clear: use https:// endpoints with authority"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The endpoints as host:port."""
        return tuple(endpoint.removeprefix(PLAIN).removeprefix(TLS).rstrip("/") for endpoint in self.endpoints)

    @property
    def is_tls(self) -> bool:
        """Whether etcd is talked to over TLS."""
        return self._is_tls(self.endpoints[0])

    @property
    def plain_hops(self) -> Sequence[str]:
        """Endpoints on other machines to which all is said in clear."""
        return () if self.is_tls else [target for target in self.targets if not is_here(target)]

    @property
    def root(self) -> str:
        """What the keys of all nodes begin with."""
        return f"{self.prefix.rstrip('/')}/nodes/"

    @property
    def fleet_root(self) -> str:
        """What the keys of all gateways begin with."""
        return f"{self.prefix.rstrip('/')}/gateways/"

    @property
    def plans_root(self) -> str:
        """What the keys of all plan services begin with."""
        return f"{self.prefix.rstrip('/')}/plans/"

    @property
    def secrets(self) -> Sequence[Path]:
        """Files that others must not read."""
        return [path for path in (self.key, self.password_file) if path is not None]

    def _is_tls(self, endpoint: str) -> bool:
        return endpoint.startswith(TLS) or (not endpoint.startswith(PLAIN) and self.authority is not None)
