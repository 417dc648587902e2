"""`[gateway.plan]`: the plan service that is followed."""

from dataclasses import dataclass
from pathlib import Path

from gateway.errors import GatewayConfigError
from transport.control.secret_files import read_secret
from transport.control.settings import WrittenPath, require
from transport.peers.rights import SERVE_PLAN
from transport.wire.asked_servers import AskedServers
from transport.wire.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """`[gateway.plan]`: the plan service that is followed; an empty `url` follows none.

    `token_file` holds the secret that the service asks for, `plan_file` keeps the last plan over a restart. A question to the
    service is held open for `wait_s`.
    """

    url: str = ""
    token_file: Path | None = None
    plan_file: WrittenPath | None = None
    wait_s: float = 20.0

    def __post_init__(self) -> None:
        require(not self.url or self.url.startswith(("http://", "https://")), "url", self.url, "an http(s) URL")
        require(0 < self.wait_s <= 60, "wait_s", self.wait_s, "a number of seconds above 0, at most 60")

    def asked(self, identity: Identity | None) -> AskedServers | None:
        """Which certificates the service may have, for a gateway that is `identity`. Raises GatewayConfigError."""
        if identity is None or not self.url:
            return None
        try:
            return AskedServers(identity, SERVE_PLAN)
        except OSError as exc:
            raise GatewayConfigError(str(exc)) from exc

    def headers(self) -> dict[str, str]:
        """With the secret. Raises GatewayConfigError."""
        if self.token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {read_secret(self.token_file)}"}
        except OSError as exc:
            raise GatewayConfigError(f"[gateway.plan]: token_file: {exc}") from exc
