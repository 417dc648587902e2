"""What stands for an address where callers are counted."""

from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

IPV6_PREFIX_BITS: Final = 64  # what one customer has at least


@lru_cache(maxsize=1024)
def site_of(address: str) -> str:
    """What stands for an address: itself, or the first 64 bits of an IPv6 one, which may have as many as it likes."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ip_network((parsed, IPV6_PREFIX_BITS), strict=False))
