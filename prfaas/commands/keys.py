"""`prfaas key`: makes an API key. A gateway's file has only its digest."""

import secrets
from collections.abc import Callable
from typing import Final

from gateway.auth.keyring import digest_of
from gateway.config.tenants import NAME
from prfaas.errors import KeyNameError

PREFIX: Final = "sk-prfaas-"  # so that scanners of leaked secrets know what they have found
SECRET_BYTES: Final = 32
OPERATOR: Final = "operator"


def new_key() -> str:
    """One that cannot be guessed: 256 random bits."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def make_and_tell(tenant: str, say: Callable[[str], None]) -> None:
    """A key for a tenant, or for operators, said once, and what to write into the gateway's file. Raises KeyNameError."""
    if not NAME.fullmatch(tenant):
        raise KeyNameError(f"{tenant!r}: a tenant has a name of letters, digits, '.', '_' and '-', 64 at most")
    key = new_key()
    table, name = ("gateway", "operator_keys") if tenant == OPERATOR else (f'gateway.tenants."{tenant}"', "keys")
    # At once: who reads one line and leaves, as `head -1` does, must not get a traceback beside it.
    say(
        f"{key}\n\n# Give it to whom it is for: it is shown this once. In the gateway's file, and then SIGHUP:\n"
        f'[{table}]\n{name} = ["{digest_of(key)}"]'
    )
