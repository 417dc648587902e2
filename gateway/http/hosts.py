"""By which names a gateway that asks for no key may be called.

A stranger's page can have a name of its own lead here (DNS rebinding), and its browser then lets it read every answer. The
browser says that name as `Host`. So where no key protects answers, they are given at addresses and at those of
`[gateway]` `hosts`. They are also given at names that cannot be registered: those without a dot and those that end in
.localhost (RFC 6761).
"""

from collections.abc import Collection
from functools import lru_cache
from ipaddress import ip_address

from gateway.errors import ApiError


def check_host(host: str, known: Collection[str]) -> None:
    """Raises ApiError for a request to a name that may be a stranger's; `known` are names that are not."""
    name = _name(host)
    if not (_is_nobodys(name) or name in known):
        raise ApiError(
            403,
            f"Without keys this gateway answers at its address, not at the name {name[:80]!r}, which any site may use: "
            "list the gateway's own names as 'hosts' in its file.",
            code="foreign_host",
        )


def _name(host: str) -> str:
    """What a `Host` names, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


@lru_cache(maxsize=256)
def _is_nobodys(name: str) -> bool:
    """Whether no stranger can have this name lead anywhere; "" is said by what is no browser."""
    if "." not in name and ":" not in name:
        return True
    try:
        ip_address(name)
    except ValueError:
        return name.endswith(".localhost")
    return True
