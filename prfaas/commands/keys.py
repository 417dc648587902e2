"""`prfaas key`: makes an API key. A gateway's file has only its digest."""

import secrets
from collections.abc import Callable
from datetime import date
from typing import Final

from gateway.auth.keyring import digest_of
from gateway.config.operators import OperatorRole
from gateway.config.tenants import NAME
from prfaas.errors import KeyNameError

PREFIX: Final = "sk-prfaas-"  # so that scanners of leaked secrets know what they have found
SECRET_BYTES: Final = 32
OPERATOR: Final = "operator"  # a key of this name is an operator's, with all rights


def new_key() -> str:
    """One that cannot be guessed: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def make_and_tell(
    name: str, say: Callable[[str], None], role: OperatorRole | None = None, expires: date | None = None
) -> None:
    """A key for a tenant or, with a `role`, for an operator: said once, with the gateway's table for it. Raises KeyNameError."""
    if not NAME.fullmatch(name):
        raise KeyNameError(f"{name!r}: a name has up to 64 letters, digits, '.', '_' and '-'")
    if role is None and name == OPERATOR:
        role = OperatorRole.ADMIN
    key = new_key()
    head = [f'[gateway.tenants."{name}"]'] if role is None else operator_lines(name, role)
    lines = [*head, f'keys = ["{digest_of(key)}"]', *([f"expires = {expires}"] if expires is not None else [])]
    # At once: who reads one line and leaves, as `head -1` does, must not get a traceback beside it.
    say(
        f"{key}\n\n# Give it to whom it is for: it is shown this once.\n"
        "# In the gateway's file, and then `prfaas reload` or SIGHUP:\n" + "\n".join(lines)
    )


def operator_lines(name: str, role: OperatorRole) -> list[str]:
    """How an operator's table begins."""
    return ["[[gateway.operators]]", f'name = "{name}"', f'role = "{role}"']
