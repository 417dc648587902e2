"""Who may ask: digests of API keys, and whose they are.

[gateway.tenants.acme]
keys = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]   # as `prfaas key` prints them
group = "acme"                                     # shares KVCache with the tenants of this group; default: its own
requests_per_minute = 600                          # 0, the default, is no limit
weight = 2.0                                       # of its part while tenants wait for the same
classes = ["interactive", "batch"]                 # its requests may be of these; the first, where they say nothing

Without tenants everybody may ask, and prompts share one cache. With them each request needs a key, and operators' pages
one of `operator_keys`.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Final

from gateway.auth.oidc import TokenSubject, TokenVerifier, looks_like_a_token
from gateway.config.tenants import PINNED_TOKENS, TenantConfig
from gateway.errors import BadRequest, Unauthorised
from planner.decisions.admission.limits import NO_LIMITS, TenantLimits
from planner.decisions.admission.waiting import EVERYBODYS, TenantShare

API_KEY_HEADER: Final = "x-api-key"  # of Anthropic's clients
MEMORY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose a request is. `group` is who shares KVCache with it; `memory` whose prompts are remembered beside its own."""

    name: str = ""
    group: str = ""
    memory: bytes = b""
    limits: TenantLimits = NO_LIMITS
    share: TenantShare = EVERYBODYS
    pinned_tokens: int = PINNED_TOKENS
    classes: tuple[str, ...] = ()


class Keyring:
    """The keys of a gateway's file, which may change while it runs."""

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        operator_keys: Sequence[str],
        tokens: TokenVerifier | None = None,
        unix_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Of who shows a token, `tokens` says whom it names; at `unix_s`."""
        self._tokens = tokens
        self._unix_s = unix_s
        self.configure(tenants, operator_keys)

    def configure(self, tenants: Mapping[str, TenantConfig], operator_keys: Sequence[str]) -> None:
        """What holds from the next request on."""
        self._named = {
            name: Tenant(
                name,
                group,
                _memory(group),
                each.limits,
                TenantShare(name, each.weight),
                each.pinned_tokens,
                each.classes,
            )
            for name, each in tenants.items()
            for group in [each.group or name]
        }
        self._by_key = {key: self._named[name] for name, each in tenants.items() for key in each.keys}
        self._by_subject = {
            subject: self._named[name] for name, each in tenants.items() for subject in (name, *each.subjects)
        }
        self._operators = frozenset(operator_keys)

    @property
    def has_tenants(self) -> bool:
        return bool(self._named)

    @property
    def has_operators(self) -> bool:
        """Whether operators' pages need a key of theirs."""
        return bool(self._operators)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(sorted(self._named))

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Whose key or token a client shows. Raises Unauthorised, and Unavailable while tokens cannot be checked."""
        authorisation = headers.get("Authorization", "")
        if not self._named:
            return Tenant(memory=_digest(authorisation)) if authorisation else EVERYBODY
        key = key_in(headers)
        if not key:
            raise Unauthorised(
                "You didn't provide an API key: send it as `Authorization: Bearer KEY`.", "missing_api_key"
            )
        digest = digest_of(key)
        found = self._by_key.get(digest)  # by digest: how long this takes says nothing of the key
        if found is None and self._tokens is not None and looks_like_a_token(key):
            return self._of_token(self._tokens.holder(key, digest, self._unix_s()))
        if found is None:
            raise Unauthorised("Incorrect API key provided.", "invalid_api_key")
        return found

    def _of_token(self, holder: TokenSubject) -> Tenant:
        found = self._by_subject.get(holder.subject)
        if found is None:
            raise Unauthorised("The token names no tenant of this gateway.", "unknown_tenant")
        return found

    def named(self, name: str) -> Tenant:
        """The tenant of that name, for an operator who asks what would become of its request; "" for none. Raises BadRequest."""
        found = self._named.get(name) if name else EVERYBODY
        if found is None:
            raise BadRequest(f"There is no tenant '{name}'.", param="tenant", code="unknown_tenant")
        return found

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Whether an operator's key is shown: as a bearer's, or as the password that a browser asks for."""
        key = bearer(authorisation := headers.get("Authorization", "")) or password(authorisation)
        return bool(key) and digest_of(key) in self._operators

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raises Unauthorised for who may not see operators' pages."""
        if not (self._operators or self._named) or self.is_operator(headers):
            return
        missing = "" if self._operators else " The gateway's file has no operator_keys."
        raise Unauthorised(
            f"This page is for operators: show one of their keys.{missing}", "operators_only", scheme="Basic"
        )


EVERYBODY: Final = Tenant()


def _memory(group: str) -> bytes:
    return blake2b(group.encode(), digest_size=MEMORY_BYTES).digest()


def digest_of(key: str) -> str:
    """What is kept of a key, in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_in(headers: Mapping[str, str]) -> str:
    """The key or token that a client shows, as OpenAI's clients do or as Anthropic's; "" for none."""
    return bearer(headers.get("Authorization", "")) or headers.get(API_KEY_HEADER, "")


def bearer(authorisation: str) -> str:
    """The key in an Authorization header (RFC 6750); "" without one."""
    scheme, _, key = authorisation.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def password(authorisation: str) -> str:
    """The password in an Authorization header (RFC 7617), whatever the user name; "" without one."""
    scheme, _, both = authorisation.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(both.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _digest(authorisation: str) -> bytes:
    return blake2b(authorisation.encode("utf-8", "surrogateescape"), digest_size=MEMORY_BYTES).digest()
