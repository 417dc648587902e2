"""`[gateway.classes]` and `[gateway.admission]`: what kinds of requests are promised, and which are refused."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

from planner.decisions.admission.classes import MOST_PRIORITY, ServiceClass
from planner.decisions.admission.overload import AdmissionPolicy
from transport.control.settings import require, require_range

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
