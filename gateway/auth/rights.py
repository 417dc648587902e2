"""What operators may do: the role that each route of theirs needs. A route that is missing here is not served.

viewer     looks: metrics, records, links, usage, the console, where a request would go
operator   and drains links, applies and pauses plans
admin      and has the gateway read its file again, which holds these rights
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.config.operators import OperatorRole

VIEWER, OPERATOR, ADMIN = OperatorRole.VIEWER, OperatorRole.OPERATOR, OperatorRole.ADMIN

Route = tuple[str, str]  # method, path


@dataclass(frozen=True, slots=True)
class Right:
    """The role that a route needs (None: none), and what its use is called in the audit log; "": it changes nothing."""

    role: OperatorRole | None
    action: str = ""


RIGHTS: Final[Mapping[Route, Right]] = {
    ("GET", "/metrics"): Right(VIEWER),
    ("GET", "/prfaas/requests"): Right(VIEWER),
    ("GET", "/prfaas/flows"): Right(VIEWER),
    ("GET", "/prfaas/links"): Right(VIEWER),
    ("GET", "/prfaas/load"): Right(VIEWER),
    ("GET", "/prfaas/usage"): Right(VIEWER),
    ("GET", "/prfaas/audit"): Right(VIEWER),
    ("GET", "/prfaas/console"): Right(VIEWER),
    ("GET", "/prfaas/plan"): Right(VIEWER),
    ("GET", "/prfaas/config"): Right(VIEWER),
    ("POST", "/prfaas/explain"): Right(VIEWER),
    ("POST", "/prfaas/links"): Right(OPERATOR, "link"),
    ("POST", "/prfaas/plan"): Right(OPERATOR, "plan"),
    ("POST", "/prfaas/config"): Right(ADMIN, "reload"),
    ("GET", "/prfaas/session"): Right(VIEWER),
    ("POST", "/prfaas/session"): Right(VIEWER, "log in"),
    ("DELETE", "/prfaas/session"): Right(VIEWER, "log out"),
    ("GET", "/console"): Right(None),  # which asks a stranger to log in
    ("GET", "/console/login.js"): Right(None),
    ("GET", "/console/login.css"): Right(None),
    ("GET", "/console/icon.svg"): Right(None),
    ("GET", "/console/"): Right(VIEWER),  # all other files of the console
}


def right_of(method: str, path: str) -> Right:
    """The cell of a route. Raises KeyError for one that has none."""
    found = RIGHTS.get((method, path))
    if found is None and path.startswith("/console/"):
        found = RIGHTS.get((method, "/console/"))
    if found is None:
        raise KeyError(f"{method} {path}: no right is declared for it")
    return found
