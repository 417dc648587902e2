"""Who may ask: digests of API keys, and whose they are.

[gateway.tenants.acme]
keys = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]   # as `prfaas key` prints them
group = "acme"                                     # shares KVCache with the tenants of this group; default: its own
requests_per_minute = 600                          # 0, the default, is no limit
weight = 2.0                                       # of its part while tenants wait for the same
classes = ["interactive", "batch"]                 # its requests may be of these; the first, where they say nothing

[[gateway.operators]]
name = "alice"                                     # as the audit log calls her
keys = ["3a7b…"]
role = "operator"                                  # viewer, operator or admin
expires = 2027-01-31                               # from when on her keys are refused

Without tenants everybody may ask, and prompts share one cache. With them each request needs a key, and operators' pages
an operator's.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from hashlib import blake2b, sha256
from math import inf
from typing import Final, Generic, TypeVar

from gateway.auth.oidc import TokenRefused, TokenSubject, TokenVerifier, looks_like_a_token
from gateway.auth.operator import Operator
from gateway.auth.sessions import OperatorSessions
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.config.tenants import PINNED_TOKENS, TenantConfig
from gateway.errors import ApiError, BadRequest, Forbidden, Unauthorised
from planner.decisions.admission.limits import NO_LIMITS, TenantLimits
from planner.decisions.admission.waiting import EVERYBODYS, TenantShare

API_KEY_HEADER: Final = "x-api-key"  # of Anthropic's clients
MEMORY_BYTES: Final = 16

Holder = TypeVar("Holder")


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
    models: tuple[str, ...] = ()  # that it may use; without: all


@dataclass(frozen=True, slots=True)
class _Known(Generic[Holder]):
    """Whose a key is, and from when on it is refused."""

    holder: Holder
    expires_unix_s: float

    def at(self, unix_s: float) -> Holder:
        """Raises Unauthorised for a key that has expired."""
        if unix_s >= self.expires_unix_s:
            raise Unauthorised("The key has expired.", EXPIRED)
        return self.holder


class Keyring:
    """The keys of a gateway's file, which may change while it runs."""

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig],
        operators: Sequence[OperatorConfig],
        tokens: TokenVerifier | None = None,
        unix_s: Callable[[], float] = lambda: 0.0,
        sessions: OperatorSessions | None = None,
    ) -> None:
        """Of who shows a token, `tokens` says whom it names; at `unix_s`. `sessions` are those of operators' browsers."""
        self._tokens = tokens
        self._unix_s = unix_s
        self._sessions = sessions
        self.configure(tenants, operators)

    def configure(self, tenants: Mapping[str, TenantConfig], operators: Sequence[OperatorConfig]) -> None:
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
                each.models,
            )
            for name, each in tenants.items()
            for group in [each.group or name]
        }
        self._by_key = {
            key: _Known(self._named[name], _unix_s_of(each.expires))
            for name, each in tenants.items()
            for key in each.keys
        }
        self._by_subject = {
            subject: self._named[name] for name, each in tenants.items() for subject in (name, *each.subjects)
        }
        self._operators = {
            key: _Known(Operator(each.name, each.role), _unix_s_of(each.expires))
            for each in operators
            for key in each.keys
        }

    @property
    def has_tenants(self) -> bool:
        return bool(self._named)

    @property
    def has_operators(self) -> bool:
        """Whether operators' pages need a key or a token of theirs."""
        return bool(self._operators) or (self._tokens is not None and self._tokens.takes_operators)

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
        return found.at(self._unix_s())

    def _of_token(self, holder: TokenSubject) -> Tenant:
        found = self._by_subject.get(holder.subject) if holder.operator is None else None
        if found is None:
            raise TokenRefused("The token names no tenant of this gateway.", "unknown_tenant", "unknown_tenant")
        return found

    def named(self, name: str) -> Tenant:
        """The tenant of that name, for an operator's question about its request; "" for none. Raises BadRequest."""
        found = self._named.get(name) if name else EVERYBODY
        if found is None:
            raise BadRequest(f"There is no tenant '{name}'.", param="tenant", code="unknown_tenant")
        return found

    def operator(self, headers: Mapping[str, str]) -> Operator | None:
        """Whose key, token or session is shown: a key as a bearer's or as a password.

        Raises Unauthorised for one that does not hold any more, and Unavailable while tokens cannot be checked.
        """
        key = operator_key_in(headers)
        if not key:
            return self._of_session(headers)
        digest = digest_of(key)
        found = self._operators.get(digest)
        if found is None and self._tokens is not None and self._tokens.takes_operators and looks_like_a_token(key):
            return self._tokens.holder(key, digest, self._unix_s()).operator
        return found.at(self._unix_s()) if found is not None else None

    def _of_session(self, headers: Mapping[str, str]) -> Operator | None:
        session = self._sessions.of(headers, self._unix_s()) if self._sessions is not None else None
        if session is None:
            return None
        if session.operator is not None:
            return session.operator if self._trusts(session.operator) else None
        found = self._operators.get(session.key_digest)
        return found.at(self._unix_s()) if found is not None else None

    def _trusts(self, operator: Operator) -> bool:
        """Whether the settings are still those by which its token was checked: they name the issuer, and give the roles."""
        return self._tokens is not None and self._tokens.terms == operator.terms

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Whether an operator's key, token or session is shown."""
        try:
            return self.operator(headers) is not None
        except ApiError:
            return False

    def check_operator(
        self, headers: Mapping[str, str], needed: OperatorRole = OperatorRole.VIEWER, page: str = "This page"
    ) -> Operator:
        """Who may use a page that needs this role. Raises Unauthorised without an operator's key or token, else Forbidden."""
        if not (self.has_operators or self._named):
            return ANYBODY
        found = self.operator(headers)
        if found is None:
            missing = "" if self.has_operators else " The gateway's file has no operators."
            raise Unauthorised(f"{page} is for operators: send an operator's key.{missing}", "operators_only")
        if not found.role.covers(needed):
            raise Forbidden(f"{page} needs the role {needed}, and {found.name} has {found.role}.", "role_needed")
        return found

    def standing(self, headers: Mapping[str, str]) -> "KeyStanding":
        """What the keys that a request shows are worth: a right one speaks for it, and a wrong one against an old one."""
        found = self._standings(headers)
        ranked = (KeyStanding.RIGHT, KeyStanding.WRONG, KeyStanding.PAST)
        return next((each for each in ranked if each in found), KeyStanding.NONE)

    def shows_wrong(self, headers: Mapping[str, str]) -> bool:
        """Whether any key that a request shows is wrong."""
        return KeyStanding.WRONG in self._standings(headers)

    def _standings(self, headers: Mapping[str, str]) -> "set[KeyStanding]":
        if not (self.has_operators or self._named):
            return set()
        return {self._standing_of(key) for key in {operator_key_in(headers), key_in(headers)} if key}

    def _standing_of(self, key: str) -> "KeyStanding":
        digest = digest_of(key)
        known = self._operators.get(digest) or self._by_key.get(digest)
        if known is not None:
            return KeyStanding.RIGHT if self._unix_s() < known.expires_unix_s else KeyStanding.PAST
        if self._tokens is None or not looks_like_a_token(key):
            return KeyStanding.WRONG
        try:
            self._check_token(self._tokens, key)
        except ApiError:  # a signature cannot be guessed: it is old, or of another provider
            return KeyStanding.PAST
        return KeyStanding.RIGHT

    def _check_token(self, tokens: TokenVerifier, token: str) -> None:
        holder = tokens.holder(token, digest_of(token), self._unix_s())
        if holder.operator is None:
            self._of_token(holder)

    def token_refusal(self, headers: Mapping[str, str]) -> str:
        """Why a token that a request shows does not hold; "" where each does, or none is shown."""
        if self._tokens is None:
            return ""
        for key in (operator_key_in(headers), key_in(headers)):
            if not looks_like_a_token(key):
                continue
            try:
                self._check_token(self._tokens, key)
            except TokenRefused as refusal:
                return refusal.reason
            except ApiError:  # nothing is known of it
                continue
        return ""


class KeyStanding(Enum):
    """What a key that is shown is worth; PAST: it held once, or is no guess for another reason."""

    NONE = auto()
    RIGHT = auto()
    PAST = auto()
    WRONG = auto()


EVERYBODY: Final = Tenant()
ANYBODY: Final = Operator()
EXPIRED: Final = "expired_api_key"


def _unix_s_of(moment: datetime | None) -> float:
    return inf if moment is None else moment.timestamp()


def _memory(group: str) -> bytes:
    return blake2b(group.encode(), digest_size=MEMORY_BYTES).digest()


def digest_of(key: str) -> str:
    """What is kept of a key, in hexadecimal."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_in(headers: Mapping[str, str]) -> str:
    """The key or token that a client shows, as OpenAI's clients do or as Anthropic's; "" for none."""
    return bearer(headers.get("Authorization", "")) or headers.get(API_KEY_HEADER, "")


def operator_key_in(headers: Mapping[str, str]) -> str:
    """The key that an operator shows; "" for none."""
    return bearer(authorisation := headers.get("Authorization", "")) or password(authorisation)


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
