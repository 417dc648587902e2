"""The policies to compare, by name: each sets a deployment, a placement or an admission rule, and nothing else."""

from enum import StrEnum
from types import MappingProxyType
from typing import Final

from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.routing.placement import PLACERS


class Estimates(StrEnum):
    """What the deciders of a simulation know of how long things take."""

    LEARNED = "learned"  # what gateways learn from what has ended
    EXACT = "exact"  # the truth, queues included: to compare with closed forms


POLICIES: Final = MappingProxyType[str, dict[str, str]](
    {
        "prfaas": {"deployment": ""},
        "homogeneous": {"deployment": "homogeneous"},
        "naive": {"deployment": "naive"},
        **{name: {"placer": name} for name in PLACERS},
        **{str(name): {"admission": str(name)} for name in AdmissionPolicy},
    }
)
