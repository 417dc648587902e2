"""Which class a request is of: the one that a header names, or else that of its API key, or else of its tenant.

[gateway.classes.interactive]
ttft_s = 2.0
tbt_ms = 50
priority = 10
keys = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]     # sha256 of a key

A class with keys is for those who show one of them. Who shows none, or an unknown one, is of the default class: keys say
what somebody is promised here, not who may come. A tenant with `classes` (`gateway.auth.keyring`) has these and no others.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Final

from gateway.auth.keyring import digest_of, key_in
from gateway.errors import ApiError, BadRequest
from planner.decisions.admission import AdmissionPolicy
from planner.decisions.classes import MOST_PRIORITY, ServiceClass
from transport.control.settings import require, require_range

HEADER: Final = "x-prfaas-class"
NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassConfig:
    """`[gateway.classes.NAME]`; `inf`: nothing is promised. Decode is filled with these requests up to `max_load`.

    `keys` are SHA-256 digests of API keys, in hexadecimal.
    """

    ttft_s: float = inf
    tbt_ms: float = inf
    deadline_s: float = inf
    priority: int = 0
    max_load: float = 1.0
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tbt_ms", "deadline_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        require_range("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        require(0 < self.max_load <= 1, "max_load", self.max_load, "a number above 0, 1 at most")
        for key in self.keys:
            require(
                bool(_DIGEST.fullmatch(key)), "keys", key, "a list of SHA-256 digests, 64 lower-case hex digits each"
            )

    def named(self, name: str) -> ServiceClass:
        """The class that this describes."""
        return ServiceClass(
            name=name,
            ttft_s=self.ttft_s,
            tbt_s=self.tbt_ms / 1000,
            deadline_s=self.deadline_s,
            priority=self.priority,
            max_load=self.max_load,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """`[gateway.admission]`. Where no class promises anything, no policy refuses anybody.

    `default_class` is that of requests which say nothing. Every `ageing_s` in line count as one more priority.
    """

    policy: AdmissionPolicy = AdmissionPolicy.PREDICTION
    default_class: str = "default"
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        require(self.ageing_s > 0, "ageing_s", self.ageing_s, "a number of seconds above 0")


def names_of(classes: Iterable[str]) -> list[str]:
    """The names that requests may be of: those of the file, and `default`."""
    return list(dict.fromkeys([*classes, "default"]))


def check_classes(classes: Mapping[str, ClassConfig], default_class: str) -> None:
    """Raises SettingsError for names that no header could carry, and keys that stand for two classes."""
    for name in classes:
        require(bool(NAME.fullmatch(name)), "classes", name, "names of letters, digits, '.', '_' and '-', 64 at most")
    known = names_of(classes)
    require(default_class in known, "default_class", default_class, f"one of {', '.join(known)}")
    keys = [key for each in classes.values() for key in each.keys]
    require(len(set(keys)) == len(keys), "keys", keys, "each key in one class")


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
            raise ApiError(403, f"The class '{name}' is none of {', '.join(granted)}.", code="class_not_allowed")
        if name in self._closed:
            raise ApiError(403, f"The class '{name}' is for API keys of its own.", code="class_not_allowed")
        return found
