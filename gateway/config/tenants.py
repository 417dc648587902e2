"""`[gateway.tenants.NAME]`, and what is checked of all tenants together."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from planner.decisions.admission.limits import Bucket, TenantLimits
from transport.control.settings import require, require_range

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")
MAX_TENANTS: Final = 1024  # each has series of its own in the metrics
PINNED_TOKENS: Final = 262_144
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """`[gateway.tenants.NAME]`. `keys` are SHA-256 digests in hexadecimal; several while one replaces another.

    `subjects` are what tokens of an identity provider call it (`gateway.auth.oidc`), beside its name here.
    From `expires` on its keys are refused. A limit of 0 is no limit. `pinned_tokens` is what it may have kept in nodes'
    memories (`prompt_cache_breakpoint`, `cache_control`), each block once; 0: nothing. Of what tenants wait for together each
    gets a part by its `weight`.
    `classes` are names of `[gateway.classes]`: with them its requests are of these only; without, of any that has no keys.
    `models` are names of models: with them it may use these only, and is told of no others.
    """

    keys: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    group: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    weight: float = 1.0
    pinned_tokens: int = PINNED_TOKENS
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    expires: datetime | None = None

    def __post_init__(self) -> None:
        for key in self.keys:
            check_digest("keys", key)
        require(not self.group or bool(NAME.fullmatch(self.group)), "group", self.group, WHAT_NAMES_ARE)
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "pinned_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "an integer of at least 0")
        require_range("weight", self.weight, LEAST_WEIGHT, MOST_WEIGHT)

    @property
    def limits(self) -> TenantLimits:
        """What its requests may take."""
        return TenantLimits(
            _bucket(self.requests_per_minute), _bucket(self.tokens_per_minute), self.concurrent_requests
        )


def _bucket(per_minute: int) -> Bucket | None:
    return Bucket(per_minute) if per_minute else None


WHAT_NAMES_ARE: Final = "a name of letters, digits, '.', '_' and '-', 64 at most"


def check_digest(name: str, key: str) -> None:
    """Raises SettingsError for what is no digest: a key itself, above all."""
    require(bool(DIGEST.fullmatch(key)), name, "…", "a list of SHA-256 digests, 64 lower-case hex digits each")


def check_tenants(tenants: Mapping[str, TenantConfig], classes: Collection[str], has_tokens: bool = False) -> None:
    """Raises SettingsError for invalid names of tenants or `classes`, keys that two have, and tenants without keys."""
    require(len(tenants) <= MAX_TENANTS, "tenants", len(tenants), f"{MAX_TENANTS} at most")
    for name, each in tenants.items():
        require(bool(NAME.fullmatch(name)), "tenants", name, WHAT_NAMES_ARE)
        for known in each.classes:
            require(known in classes, f"tenants.{name}.classes", known, f"some of {', '.join(classes)}")
    keys = [key for each in tenants.values() for key in each.keys]
    require(len(set(keys)) == len(keys), "keys", "…", "each key with one tenant")
    subjects = [subject for name, each in tenants.items() for subject in {name, *each.subjects}]
    require(len(set(subjects)) == len(subjects), "subjects", sorted(subjects), "each name and subject with one tenant")
    if not has_tokens:
        for name, each in tenants.items():
            require(bool(each.keys), f"tenants.{name}.keys", each.keys, "at least one SHA-256 digest of a key")
