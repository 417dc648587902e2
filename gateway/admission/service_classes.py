"""Which class a request is of: the one that a header names, or else that of its API key, or else of its tenant.

[gateway.classes.interactive]
ttft_s = 2.0
tbt_ms = 50
priority = 10
keys = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]     # sha256 of a key

A class with keys is for those who show one of them. Who shows none, or an unknown one, is of the default class: keys say
what a request is promised here, and grants no access. A tenant with `classes` (`gateway.auth.keyring`) has these and no others.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from gateway.auth.keyring import digest_of, key_in
from gateway.config.classes import NAME, ClassConfig
from gateway.errors import ApiError, BadRequest
from planner.decisions.admission.classes import ServiceClass

HEADER: Final = "x-prfaas-class"


class Classes:
    """The classes of a gateway's file, and `default`, which promises nothing if the file does not say otherwise."""

    def __init__(
        self, classes: Mapping[str, ClassConfig] = MappingProxyType({}), default_class: str = "default"
    ) -> None:
        described = {"default": ClassConfig(), **classes}
        self._by_name = {name: each.named(name) for name, each in described.items()}
        self._by_key = {key: self._by_name[name] for name, each in described.items() for key in each.keys}
        self._closed = {name for name, each in described.items() if each.keys}
        self._default = self._by_name[default_class]

    def all(self) -> list[ServiceClass]:
        """Every class, in the order of the file."""
        return list(self._by_name.values())

    def of(self, headers: Mapping[str, str], granted: Sequence[str] = ()) -> ServiceClass:
        """The class of a request with these headers, of a tenant that is `granted` some, if it is. Raises ApiError."""
        name = headers.get(HEADER)
        if name is None and not self._by_key and not granted:
            return self._default
        by_key = self._by_key.get(digest_of(key)) if self._by_key and (key := key_in(headers)) else None
        if name is None:
            return by_key or (self._by_name.get(granted[0]) if granted else None) or self._default
        found = self._by_name.get(name) if NAME.fullmatch(name) else None
        if found is None:
            known = ", ".join(sorted(self._by_name))
            raise BadRequest(f"{HEADER} names no class of this gateway; known are {known}.", code="unknown_class")
        if found is by_key or name in granted:
            return found
        if granted:
            raise ApiError(
                403,
                f"The class '{name}' is not for this key; choose {' or '.join(granted)}.",
                code="class_not_allowed",
            )
        if name in self._closed:
            raise ApiError(403, f"The class '{name}' needs an API key that names it.", code="class_not_allowed")
        return found
