"""From where engines may fetch what a request names by an address: domains of `allowed_media_domains`, none by default.

An engine fetches from inside of the operator's network, where a client could have it ask for anything. A `data:` URL is no
address. Whatever else has a scheme, but for `file:` (which engines refuse by themselves), is taken for one, however it is
spelled: engines may read it more kindly than this does.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.errors import BadRequest

INLINE: Final = ("data:", "file:")
ODD: Final = re.compile(r"[\x00-\x20\\\x7f@]")  # what parsers of addresses disagree about


def check_addresses(part: Mapping[str, Any], kinds: Collection[str], allowed: Collection[str], where: str) -> None:
    """Raises BadRequest for an address in a part of these kinds whose domain is not allowed."""
    for address in _addresses(part, kinds):
        if ":" in address and not address.lower().startswith(INLINE) and _host(address) not in allowed:
            raise BadRequest(
                f"'{where}' is an address of {_host(address)[:80] or 'no domain'!r}: send media as data: URLs, or from a "
                "domain of allowed_media_domains in the gateway's file.",
                param=where,
                code="media_domain_not_allowed",
            )


def check_all_addresses(value: Any, kinds: Collection[str], allowed: Collection[str], where: str) -> None:
    """The same of every part in a body, wherever it lies. Raises BadRequest."""
    waiting = [(where, value)]
    while waiting:
        at, each = waiting.pop()
        if isinstance(each, dict):
            check_addresses(each, kinds, allowed, at)
            waiting += [(f"{at}.{name}" if at else name, inner) for name, inner in each.items()]
        elif isinstance(each, list):
            waiting += [(f"{at}[{number}]", inner) for number, inner in enumerate(each)]


def _addresses(part: Mapping[str, Any], kinds: Collection[str]) -> Iterator[str]:
    for name in kinds:
        said = part.get(name)
        url = said.get("url") if isinstance(said, Mapping) else said
        # Only what ends with _url, and input_image, is ever an address: embeddings and samples are not fetched.
        if isinstance(url, str) and (name.endswith("_url") or name == "input_image"):
            yield url


def _host(address: str) -> str:
    if ODD.search(address.partition("?")[0]):
        return ""
    try:
        parsed = urlsplit(address)
        return (parsed.hostname or "") if parsed.scheme in ("http", "https") else ""
    except ValueError:
        return ""
