"""Errors of planning.

PlannerError
├── NoReadyNode        routing: nothing can decode the request
│   └── NobodyPrefills routing: the decode nodes that could take it need a prefill node, and have none
├── InputError         a configuration, profile or trace names the field, the value and what would do
│   └── OutsideProfile a length beyond the profiled points, without leave to extrapolate
├── MissingExtra       scipy is needed, which the extra `planner` installs
├── NothingSeen        gateways have not been seen, or not of late: their load cannot be told
├── ServiceUnusable    no plan service answers there, or not as one of this version does, or it refuses
├── ChangeRefused      a change of the plan that cannot be made now
│   └── Deposed        this service does not lead any more
└── Infeasible         no plan meets the constraints; says which one and the nearest change that would
"""

from collections.abc import Iterator
from contextlib import contextmanager


class PlannerError(Exception):
    """Base of all errors of the planner."""


class NoReadyNode(PlannerError):
    """No decode node is ready to answer the request."""


class NobodyPrefills(NoReadyNode):
    """Decode nodes are ready that cannot compute a prompt, and none of them is reached by a prefill node that is ready."""


class InputError(PlannerError, ValueError):
    """An input is wrong; the message names it, its value, and the nearest value that would do."""


class OutsideProfile(InputError):
    """A length lies outside the profiled points."""


class MissingExtra(PlannerError):
    """A package is needed that only the extra `planner` installs."""


class NothingSeen(PlannerError):
    """Gateways have not been seen, or not of late; the message says why."""


class ServiceUnusable(PlannerError):
    """A plan service that was asked gave no usable answer; the message names its address and what came from there."""


class ChangeRefused(PlannerError):
    """A change of the plan that cannot be made now; the message says why."""


class Deposed(ChangeRefused):
    """This service does not lead any more: another one does, or its lease has ended."""


class Infeasible(PlannerError):
    """No plan meets the constraints."""


@contextmanager
def needing_scipy(what: str) -> Iterator[None]:
    """For the import of scipy, which `what` needs. Raises MissingExtra where scipy is not installed."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise MissingExtra(f"{what} need scipy: pip install 'prfaas[planner]'") from exc
