"""A plan against what runs: which settings differ, and whether the plan can be had at all."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

SETTINGS: Final = ("threshold_tokens", "tie_share", "num_prfaas", "num_prefill", "num_decode")
TOLERANCE: Final = 0.01  # of a threshold: Λ does not notice less


class DiffStatus(IntEnum):
    """What `diff` exits with."""

    SAME = 0
    DIFFERENT = 1
    INFEASIBLE = 3


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting that differs; None where the running configuration does not name it."""

    name: str
    current: Any
    planned: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """The verdict, what differs, and what stands in the way."""

    verdict: DiffStatus
    changes: tuple[SettingChange, ...]
    obstacles: tuple[str, ...]


def compare_plans(plan: Mapping[str, Any], current: Mapping[str, Any]) -> Difference:
    """`plan` is a plan file; `current` the same keys, plus, where known, `max_prfaas` and `num_pd` there are."""
    changes = tuple(
        SettingChange(name, current.get(name), plan[name])
        for name in SETTINGS
        if name in plan and not _same(name, plan[name], current.get(name, 0 if name == "tie_share" else None))
    )
    obstacles = tuple(_obstacles(plan, current))
    if obstacles:
        return Difference(DiffStatus.INFEASIBLE, changes, obstacles)
    return Difference(DiffStatus.DIFFERENT if changes else DiffStatus.SAME, changes, ())


def _same(name: str, planned: Any, current: Any) -> bool:
    if name == "threshold_tokens" and planned is not None and current is not None:
        return bool(abs(planned - current) <= TOLERANCE * max(planned, 1))
    return bool(planned == current)


def _obstacles(plan: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    found = []
    wanted = plan["num_prefill"] + plan["num_decode"]
    have = current.get("num_pd", _sum(current.get("num_prefill"), current.get("num_decode")))
    if have is not None and wanted > have:
        found.append(f"the plan splits {wanted} PD instances, {have} run: solve again with instances = {have}")
    most = current.get("max_prfaas", current.get("num_prfaas"))
    if most is not None and plan["num_prfaas"] > most:
        found.append(f"the plan uses {plan['num_prfaas']} PrfaaS instances, {most} run: solve again with {most}")
    return found


def _sum(one: Any, other: Any) -> Any:
    return None if one is None or other is None else one + other
