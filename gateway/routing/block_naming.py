"""The secrets by which this gateway names blocks, read from their file: at the start, and each time that it reloads.

While one replaces another, a prompt has names by both (`gateway.routing.name_rotation`).
"""

from pathlib import Path

from gateway.errors import GatewayConfigError
from gateway.prompt.prompt import BlockNames, Prompt
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from hybrid_cache.index.index import PrefixIndex
from transport.control.secret_files import read_secret


def name_secrets(path: Path | None) -> NameSecrets:
    """Those of `names_secret`. Raises GatewayConfigError."""
    if path is None:
        return UNKEYED
    try:
        return NameSecrets.of(read_secret(path))
    except (OSError, ValueError) as error:
        raise GatewayConfigError(f"names_secret: {path.name}: {error}") from error


def by_known_names(prompt: Prompt, index: PrefixIndex | None) -> Prompt:
    """`prompt` by the earlier of its names, if most of it is cached under those and not under the others.

    So what goes on does so where it has begun. What only begins as others did has new names, and with it their beginning.
    """
    if prompt.earlier is None or index is None:
        return prompt

    def cached(names: Prompt | BlockNames) -> int:
        found = index.match_all(names.hashes, prompt.transfer_tokens)
        return max((holding.hit.num_tokens for holding in found.values()), default=0)

    gained = cached(prompt.earlier) - cached(prompt)
    return prompt.by_earlier_names() if 2 * gained > prompt.num_tokens else prompt
