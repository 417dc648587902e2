"""`[gateway.oidc]`: the identity provider whose tokens name tenants and operators."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from yarl import URL

from gateway.config.operators import OperatorRole
from transport.control.settings import require

THIS_MACHINE: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcOperators:
    """`[gateway.oidc.operators]`: tokens for `audience` are operators'. `claim` gives a role by its values, the highest of
    several; `viewer`, `operator` and `admin` list them. `name_claim` names the person in the audit log.
    """

    audience: str
    claim: str = "groups"
    name_claim: str = "sub"
    viewer: tuple[str, ...] = ()
    operator: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("audience", "claim", "name_claim"):
            require(bool(getattr(self, name)), f"oidc.operators.{name}", "", "a text that is not empty")
        values = [*self.viewer, *self.operator, *self.admin]
        require(bool(values), "oidc.operators", "", f"values of {self.claim} for viewer, operator or admin")
        require(all(values), "oidc.operators", values, "no empty value: tokens would have it by chance")
        require(len(set(values)) == len(values), "oidc.operators", values, "each value with one role")

    def role_of(self, values: Iterable[str]) -> OperatorRole | None:
        """The highest role that these values of the claim give."""
        held = set(values)
        by_role = {
            OperatorRole.ADMIN: self.admin,
            OperatorRole.OPERATOR: self.operator,
            OperatorRole.VIEWER: self.viewer,
        }
        return next((role for role, giving in by_role.items() if not held.isdisjoint(giving)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcConfig:
    """`[gateway.oidc]`: tokens of `issuer` for `audience` name tenants by `tenant_claim`; none do without an issuer.

    Those for another audience name `operators`. `jwks_url` is where its keys are, if not where its discovery document says.
    """

    issuer: str = ""
    audience: str = ""
    tenant_claim: str = "azp"
    jwks_url: str = ""
    operators: OidcOperators | None = None

    def __post_init__(self) -> None:
        is_for_some = bool(self.audience) or self.operators is not None
        require(not self.issuer or is_for_some, "oidc.audience", self.audience, "whom tokens must be for")
        if self.operators is not None:
            require(bool(self.issuer), "oidc.issuer", self.issuer, "the provider of operators' tokens")
            wanted = "another audience than tenants': no token may be both a tenant's and an operator's"
            require(self.operators.audience != self.audience, "oidc.operators.audience", self.audience, wanted)
        require(bool(self.tenant_claim), "oidc.tenant_claim", self.tenant_claim, "the name of a claim")
        for name in ("issuer", "jwks_url"):
            url = getattr(self, name)
            require(not url or _is_safe(url), f"oidc.{name}", url, "an https URL; http on this machine only")

    @property
    def takes_tenants(self) -> bool:
        """Whether tenants may show tokens."""
        return bool(self.issuer and self.audience)

    @property
    def audiences(self) -> tuple[str, ...]:
        """Whom tokens may be for."""
        operators = self.operators.audience if self.operators is not None else ""
        return tuple(each for each in (self.audience, operators) if each)


def _is_safe(url: str) -> bool:
    """Whether only the host that `url` names can answer."""
    try:
        parsed = URL(url)
    except ValueError:
        return False
    if parsed.scheme == "https":
        return bool(parsed.host)
    return parsed.scheme == "http" and parsed.host in THIS_MACHINE
