"""`[[gateway.operators]]`: people that look at a gateway and change it, each by a key and a name of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gateway.config.tenants import NAME, WHAT_NAMES_ARE, TenantConfig, check_digest
from transport.control.settings import SettingsError, require


class OperatorRole(StrEnum):
    """What an operator may do; each role may do what the ones before it may (`gateway.auth.rights`)."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def covers(self, needed: "OperatorRole") -> bool:
        """Whether this role may do what `needed` may."""
        order = list(OperatorRole)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """`[[gateway.operators]]`. `keys` are SHA-256 digests in hexadecimal; several while one replaces another.

    From `expires` on they are refused.
    """

    name: str
    keys: tuple[str, ...]
    role: OperatorRole = OperatorRole.VIEWER
    expires: datetime | None = None

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), "name", self.name, WHAT_NAMES_ARE)
        require(bool(self.keys), "keys", self.keys, "at least one SHA-256 digest of a key")
        for key in self.keys:
            check_digest("keys", key)


def nameless(keys: Sequence[str]) -> list[OperatorConfig]:
    """The operators that `operator_keys` stands for: with such a key one may do everything."""
    return [
        OperatorConfig(name=f"operator-{number}", keys=(key,), role=OperatorRole.ADMIN)
        for number, key in enumerate(keys, 1)
    ]


def check_operators(operators: Sequence[OperatorConfig], tenants: Mapping[str, TenantConfig]) -> None:
    """Raises SettingsError for a name or a key that two operators have, and for a key that a tenant has, too."""
    names = [each.name for each in operators]
    require(len(set(names)) == len(names), "operators", sorted(names), "each name once")
    keys = [key for each in operators for key in each.keys]
    require(len(set(keys)) == len(keys), "operators", "…", "each key with one operator")
    for name, tenant in tenants.items():
        if shared := _shared(operators, tenant.keys):
            raise SettingsError(
                f"tenants.{name}.keys: a key of operator {shared!r}: clients and operators must have different keys; "
                "`prfaas key` makes another one"
            )


def _shared(operators: Iterable[OperatorConfig], keys: Iterable[str]) -> str:
    return next((each.name for each in operators if not set(each.keys).isdisjoint(keys)), "")
