"""`[gateway.oidc]`: the identity provider whose tokens name tenants."""

from dataclasses import dataclass
from typing import Final

from yarl import URL

from transport.control.settings import require

THIS_MACHINE: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcConfig:
    """`[gateway.oidc]`: tokens of `issuer` for `audience` name tenants by `tenant_claim`; none do without an issuer.

    `jwks_url` is where its keys are, if not where its discovery document says.
    """

    issuer: str = ""
    audience: str = ""
    tenant_claim: str = "azp"
    jwks_url: str = ""

    def __post_init__(self) -> None:
        require(not self.issuer or bool(self.audience), "oidc.audience", self.audience, "whom tokens must be for")
        require(bool(self.tenant_claim), "oidc.tenant_claim", self.tenant_claim, "the name of a claim")
        for name in ("issuer", "jwks_url"):
            url = getattr(self, name)
            require(not url or _is_safe(url), f"oidc.{name}", url, "an https URL; http on this machine only")


def _is_safe(url: str) -> bool:
    """Whether only the host that `url` names can answer."""
    try:
        parsed = URL(url)
    except ValueError:
        return False
    if parsed.scheme == "https":
        return bool(parsed.host)
    return parsed.scheme == "http" and parsed.host in THIS_MACHINE
